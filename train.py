"""Train, validate, test or predict: `python train.py --help`."""

import gc
import os
import signal
import sys

# Until the command line handles signals: the imports below take seconds, in which Ctrl-C would print a traceback.
if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))

# Threads that wait for work should sleep: spinning, they make a small model several times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from ortho_vit.cli.main import main
from ortho_vit.training.memory import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory()
    code = main()
    gc.freeze()  # or the interpreter's last garbage collections take seconds
    sys.exit(code)
