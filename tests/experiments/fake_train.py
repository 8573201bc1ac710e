"""Stands in for train.py where a test is about the sweep: a run in a tenth of a second.

`--behave` says what it does besides: succeed, diverge, fail, or die or sleep unless it is resumed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

arguments = sys.argv[1:]
folder = Path(arguments[arguments.index("--trainer.default_root_dir") + 1])
behaviour = arguments[arguments.index("--behave") + 1] if "--behave" in arguments else "succeed"
resumed = "--ckpt_path" in arguments
seed = int(arguments[arguments.index("--seed_everything") + 1])

(folder / "checkpoints").mkdir(exist_ok=True)
(folder / "checkpoints" / "last.ckpt").touch()
(folder / "progress.json").write_text('{"epoch": 0, "epochs": 2, "step": 3, "steps": 10, "seconds": 6.0}')
print("resumed" if resumed else "from the beginning", os.environ["OMP_NUM_THREADS"], flush=True)
if behaviour == "fail":
    print("error: no luck", file=sys.stderr)
    sys.exit(1)
if behaviour == "die" and not resumed:
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "sleep" and not resumed:
    time.sleep(60)

point = {"epoch": 1, "step": 5, "train_loss": 2.0, "train_accuracy": 0.3, "test_loss": 1.9}
point |= {"test_accuracy": 0.4, "orthogonality": 1e-7, "lr": 0.1, "seconds": 3.0}
last = point | {"epoch": 2, "step": 10, "test_accuracy": 0.5 + seed / 100}
result = {"status": "finished", "step": 10, "test_accuracy": last["test_accuracy"], "test_loss": 1.8}
if behaviour == "diverge":
    result = {"status": "diverged", "step": 7, "reason": "the loss is nan at step 7"}
result |= {"seconds": 6.0, "orthogonality": 1e-7, "parameters": 10, "versions": {"torch": "2"}}
(folder / "result.json").write_text(json.dumps(result | {"curve": [point, last]}))
sys.exit(behaviour == "diverge")
