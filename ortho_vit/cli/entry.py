"""The entry point of `train.py` and `ortho-vit`: help and version at once, everything else by `main`.

Importing Lightning and timm takes seconds, so it waits until a command needs them.
"""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

from ortho_vit import __version__

HELP = """\
Train, evaluate and use Vision Transformers with orthogonal attention.

    {program} --config FILE.yaml [--key value ...]                train (the same as `fit`)
    {program} fit      --ckpt_path RUN                            continue a run that was interrupted
    {program} fit      --ckpt_path RUN --data.batch_size 64 --allow_changes data.batch_size    ... with a change
    {program} test     --ckpt_path RUN                            the run's best checkpoint on its test set
    {program} validate --ckpt_path RUN                            ... on its validation set
    {program} predict  --ckpt_path RUN --predictions.path OUT.csv
    {program} predict  --weights NAME --pictures FOLDER           classify your images with trained weights
    {program} test     --weights NAME                             measure the accuracy on their card again
    {program} test     --weights NAME --per_class.folder OUT      and that of each class, with a confusion matrix
    {program} export   --ckpt_path RUN --name TAG                 turn a run into such weights
    {program} demo     --port 7860                                try trained weights in the browser

    {program} models                                              the trained weights, as a table
    {program} info | verify NAME                                  show their card; check them against it
    {program} onnx NAME OUT.onnx                                  write them as an ONNX model

Start with   {program} --config quickstart.yaml

RUN is the folder that training prints, runs/NAME/version_N, one of its checkpoints, or `best` or `last`: the newest run
below runs/, or with --name or --config of that name.  A command without --config is configured as that run was.
A FILE.yaml that is not in the working directory is looked up among the configurations of the package.  Several
--config are merged, the later wins; a file builds on others by `base: [other.yaml]`.  Any key of a file is an option too:

    --model.name NAME                 the model: ortho_vit_cifar, ortho_vit_nano, ... or any of timm's
    --model.constraint within         orthonormal W^Q, W^K within each head, across heads, or null
    --model.optimizer StiefelSGD --model.optimizer.lr 0.15
    --model.weights FILE              start from these weights
    --data CIFAR10 --data.root DIR --data.batch_size 128
    --trainer.max_epochs 200 --trainer.default_root_dir runs --trainer.accelerator gpu --trainer.devices 4
    --name NAME                       where below default_root_dir the run's folder goes
    --seed_everything 0
    --test_after_fit true             test the best checkpoint at the end

    --print_config                    show the whole configuration, composed, and stop
    fit --help                        every option;  fit --data.help CIFAR10  those of a class
    --version                         the version of ortho_vit
"""


def program() -> str:
    """What a user types to run this command line."""
    return "ortho-vit" if Path(sys.argv[0]).stem == "ortho-vit" else "python train.py"


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    if arguments is None:
        _exit_quietly_on_signals()
        arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP.format(program=program()), end="")
        return 0
    if arguments[0] == "--version":
        print(f"ortho_vit {__version__}")
        return 0
    # Threads that wait for work should sleep: if they spin, a small model is several times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    if arguments[0] == "demo":
        from ortho_vit.demo import main as demo

        return demo(arguments[1:], f"{program()} demo")
    gc.disable()  # the imports create no garbage, and searching for it takes a quarter of the start-up time
    try:
        from ortho_vit.cli.main import main as run
    finally:
        gc.enable()
    keep_freed_memory()
    try:
        return run(arguments)
    finally:
        gc.freeze()  # the interpreter's last garbage collections would take seconds


def keep_freed_memory() -> bool:
    """Let glibc keep the memory that a training step frees for the next step.  Returns whether it does.

    It earns its lines on a CPU, where clearing pages that were returned to the system takes up to a tenth of a small model's
    step.  Results are the same to the bit.  The user's own MALLOC_ settings and other allocators are left alone.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc; TypeError: Windows
        return False
    # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h; not every glibc accepts a threshold of more than 2^25 bytes
    return all(mallopt(option, 2**30) or mallopt(option, 2**25) for option in (-3, -1))


def _exit_quietly_on_signals() -> None:
    """Exit without a traceback on Ctrl-C during the imports, which take seconds; later the command line handles signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(128 + number))
