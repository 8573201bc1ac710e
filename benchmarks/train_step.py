"""Images per second in training, and where the time goes: data, forward and backward, optimizer.

    python -m benchmarks.train_step [--models ortho_vit_nano ortho_vit_compact ortho_vit_cifar] [--steps 5] [--compile]

A step is what a run on CIFAR-10 does: a batch of 128 is cropped, flipped and normalised (and with `--policy` goes through
AutoAugment or a relative), then forward, backward and StiefelSGD within heads.  Variants: float32, `bf16-mixed`, which is
autocast to bfloat16, and with `--compile` both as `model.compile: true` compiles them.  All variants of a network take
turns in one run; medians are printed, and the speed relative to float32.  With one thread, times are processor times, which
other programs disturb less.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.input_pipeline import CIFAR, smooth_images
from ortho_vit import create_model
from ortho_vit.data import CIFAR10
from ortho_vit.data.augment import Augmentation
from ortho_vit.data.policies import make_policy
from ortho_vit.data.sampling import Key
from ortho_vit.optim import StiefelSGD
from ortho_vit.training.compile import compile_model, write_out_attention


class Variant(NamedTuple):
    """How a step is computed."""

    bf16: bool
    compiled: bool

    def __str__(self) -> str:
        return ("bf16-mixed" if self.bf16 else "float32") + (", compiled" if self.compiled else "")


class Training:
    """One network with its optimizer, and the seconds its steps took."""

    def __init__(self, name: str, variant: Variant, images: Tensor, augment: Augmentation) -> None:
        torch.manual_seed(0)
        self.clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self.variant, self.images, self.augment = variant, images, augment
        self.model = create_model(name, constraint="within", num_classes=10)
        self.optimizer = StiefelSGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if variant.bf16:
            write_out_attention(self.model)  # as `Classifier` does on a CPU
        if variant.compiled:
            compile_model(self.model, torch.device("cpu"))
        self.seconds: list[tuple[float, float, float]] = []  # data, forward and backward, optimizer

    def step(self, number: int) -> None:
        start = self.clock()
        rows = np.arange(len(self.images))
        images, _ = self.augment(self.images, None, Key(number, rows))
        made = self.clock()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.variant.bf16):
            logits = self.model(images)
        F.cross_entropy(logits.float(), torch.from_numpy(rows % 10)).backward()
        learned = self.clock()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append((made - start, learned - made, self.clock() - learned))

    def medians(self) -> tuple[float, float, float]:
        data, network, optimizer = (statistics.median(column) for column in zip(*self.seconds, strict=True))
        return data, network, optimizer


def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 matrices by itself; elsewhere they are emulated, slowly."""
    path = Path("/proc/cpuinfo")
    return path.is_file() and any(flag in path.read_text() for flag in ("avx512_bf16", "amx_bf16"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["ortho_vit_nano", "ortho_vit_compact", "ortho_vit_cifar"]
    parser.add_argument("--models", nargs="+", default=names)
    parser.add_argument(
        "--steps", type=int, default=5, help="timed steps of each variant, after one to warm up"
    )
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--policy", choices=["autoaugment", "randaugment", "trivialaugment"])
    parser.add_argument("--compile", action="store_true", help="also compiled: a minute or so per variant")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = platform.processor() or platform.machine()
    bf16 = "with" if has_bf16() else "without"
    print(f"torch {torch.__version__}, {machine} {bf16} bfloat16 instructions, threads: {options.threads}")
    images = smooth_images(options.batch_size, 32)
    policy = make_policy(options.policy, CIFAR)
    augment = Augmentation(CIFAR10.mean, CIFAR10.std, padding=4, flip=True, policy=policy)
    for name in options.models:
        compiled = [False, True] if options.compile else [False]
        variants = [Variant(bf16, compile) for compile in compiled for bf16 in (False, True)]
        trainings = [Training(name, variant, images, augment) for variant in variants]
        for number in range(options.steps + 1):
            for training in trainings:
                training.step(number)
                if number == 0:
                    training.seconds.clear()
        print_table(name, trainings, options.batch_size)


def print_table(name: str, trainings: list[Training], batch_size: int) -> None:
    """One row per variant; the first is what the others are compared with."""
    print(f"\n{name:24}images/s  ms/image   speed    data  network  optimizer")
    reference = sum(trainings[0].medians())
    for training in trainings:
        data, network, optimizer = training.medians()
        total = data + network + optimizer
        print(
            f"  {training.variant!s:22}{batch_size / total:8.0f}{total / batch_size * 1e3:10.2f}{reference / total:7.2f}x"
            f"{data / total:8.1%}{network / total:9.1%}{optimizer / total:11.1%}"
        )


if __name__ == "__main__":
    main()
