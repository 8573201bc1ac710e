"""The time to augment an image: our batches against torchvision's transforms, one image at a time.

    python -m benchmarks.input_pipeline [--batch_size 128] [--rounds 15] [--size 32]

The work is a training batch of CIFAR-10: crop, flip, a policy (or none), normalisation, from uint8 images in memory to a
float32 batch.  torchvision's `v2` transforms take one image at a time, as tensors and as PIL images; its transforms of the
first generation take PIL images.  Single thread; all contestants take turns in one run.  It prints medians, and
ratios of medians to ours with the same policy.  Times are processor times, which other programs disturb less.
The images are random but smooth, like photographs.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from itertools import count

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import ortho_vit.data  # noqa: F401  # first: it makes an incomplete torchvision importable

# isort: split
import torchvision
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from ortho_vit.data import CIFAR10
from ortho_vit.data.augment import Augmentation
from ortho_vit.data.policies import AutoAugmentPolicy, PolicyName, make_policy
from ortho_vit.data.sampling import Key

POLICIES: tuple[PolicyName | None, ...] = (None, "autoaugment", "randaugment", "trivialaugment")
CIFAR = AutoAugmentPolicy.CIFAR10


def ours(images: Tensor, policy: PolicyName | None) -> Callable[[], Tensor]:
    augment = Augmentation(CIFAR10.mean, CIFAR10.std, padding=4, flip=True, policy=make_policy(policy, CIFAR))
    epochs, rows = count(), np.arange(len(images))
    return lambda: augment(images, None, Key(next(epochs), rows))[0]


def one_by_one(samples: list, steps: list) -> Callable[[], Tensor]:
    transform = v2.Compose(steps)
    return lambda: torch.stack([transform(sample) for sample in samples])


def peers(images: Tensor, policy: PolicyName | None) -> dict[str, Callable[[], Tensor]]:
    side = images.shape[-1]
    pil = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
    modern = {"autoaugment": lambda: v2.AutoAugment(CIFAR), "randaugment": v2.RandAugment,
              "trivialaugment": v2.TrivialAugmentWide}  # fmt: skip
    first = {"autoaugment": lambda: v1.AutoAugment(CIFAR), "randaugment": v1.RandAugment,
             "trivialaugment": v1.TrivialAugmentWide}  # fmt: skip
    start = [v2.RandomCrop(side, padding=4), v2.RandomHorizontalFlip()]
    end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(CIFAR10.mean, CIFAR10.std)]
    middle = [modern[policy]()] if policy else []
    old = [v1.RandomCrop(side, padding=4), v1.RandomHorizontalFlip(), *([first[policy]()] if policy else [])]
    return {
        "torchvision v2, tensors": one_by_one(list(images), [*start, *middle, *end]),
        "torchvision v2, PIL": one_by_one(pil, [*start, *middle, v2.ToImage(), *end]),
        "torchvision v1, PIL": one_by_one(
            pil, [*old, v1.ToTensor(), v1.Normalize(CIFAR10.mean, CIFAR10.std)]
        ),
    }


def smooth_images(number: int, side: int) -> Tensor:
    coarse = torch.rand(number, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return (F.interpolate(coarse, (side, side), mode="bicubic") * 300 - 20).clamp(0, 255).to(torch.uint8)


def measure(contestants: dict[str, Callable[[], Tensor]], images: int, rounds: int) -> dict[str, float]:
    """Median µs per image."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 2):
        for name, run in contestants.items():
            start = time.process_time()
            run()
            if number >= 2:  # the first two warm up
                times[name].append((time.process_time() - start) / images * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15, help="timed batches of each contestant")
    parser.add_argument("--size", type=int, default=32, help="side of the images")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = smooth_images(options.batch_size, options.size)
    machine = platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {machine}, 1 thread")
    print(f"batches of {options.batch_size} images of {options.size}×{options.size}, µs per image")
    for policy in POLICIES:
        contestants = {"ortho_vit, batches": ours(images, policy)} | peers(images, policy)
        medians = measure(contestants, options.batch_size, options.rounds)
        print(f"\ncrop, flip, {policy or 'no policy'}, normalisation")
        for name, median in medians.items():
            print(f"  {name:26}{median:9.1f}{median / medians['ortho_vit, batches']:8.1f}x")


if __name__ == "__main__":
    main()
