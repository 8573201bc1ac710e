"""Train, validate, test or predict: `python train.py --help`."""

import os
import sys

# Threads that wait for work should sleep: spinning, they make a small model several times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from ortho_vit.cli.main import main
from ortho_vit.training.memory import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
