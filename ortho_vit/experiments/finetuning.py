"""Fine-tuning on few images, from weights trained on CIFAR-10 and from scratch: accuracy on a test set, paired by seed.

    python -m ortho_vit.experiments.finetuning [--weights NAME] [--data mnist --root DIR] [--quick] [--output DIR]

Digits are scikit-learn's, 8×8 and enlarged to the 32×32 that the network was trained on; MNIST's are enlarged from 28×28.
All ways of training see the same images in the same order; each uses the learning rate that is best for it on held-out
training images.  From scratch the network also gets three times the steps, and on the digits both ways are also tried at
the original 8×8, which is easier from scratch.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ortho_vit.data import Digits
from ortho_vit.data.rng import hold_out
from ortho_vit.experiments import figure as style
from ortho_vit.experiments.figure import legend_below, new_figure
from ortho_vit.experiments.result import Progress, Result, make_parser, markdown, produce, run_command
from ortho_vit.experiments.transport import read_mnist
from ortho_vit.models import create_model, find_checkpoint
from ortho_vit.optim import StiefelAdam
from ortho_vit.training.schedule import warmup_cosine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHTS = "ortho_vit_nano.cifar10_within_stiefel_sgd"
RATES, BATCH, HELD_OUT = (1e-3, 3e-3, 1e-2), 16, 300
LONGER = 3
DATA = Path("data")

Images = tuple[Tensor, Tensor]  # images (N, 1, H, W) and their labels


@dataclass(frozen=True)
class Task:
    """Grey images, normalised; learning rates are chosen on `held_out`, and `test` is used only for the results."""

    train: Images
    held_out: Images
    test: Images

    @classmethod
    def of(cls, train: Images, test: Images) -> "Task":
        mean, std = train[0].mean(), train[0].std()
        (images, labels), (test_images, test_labels) = train, test
        images, test_images = (images - mean) / std, (test_images - mean) / std
        out, rest = (torch.from_numpy(rows) for rows in hold_out(labels.numpy(), HELD_OUT, 0))
        return cls((images[rest], labels[rest]), (images[out], labels[out]), (test_images, test_labels))

    def few(self, count: int, seed: int) -> Images:
        """`count` training images, every class in its proportion."""
        images, labels = self.train
        rows = torch.from_numpy(hold_out(labels.numpy(), count, seed)[0])
        return images[rows], labels[rows]


def digits_task() -> Task:
    parts = [Digits().read(train) for train in (True, False)]
    train, test = ((images / 255, labels) for images, labels in parts)
    return Task.of(train, test)


def mnist_task(root: Path) -> Task:
    """MNIST, with 1,000 of the test images, which are enough for the differences here."""
    train, (images, labels) = (read_mnist(root, train=part) for part in (True, False))
    rows = hold_out(labels.numpy(), 1000, 0)[0]
    return Task.of(train, (images[rows], labels[rows]))


@dataclass(frozen=True)
class Way:
    """A way to train a classifier: from which weights, at which image size, in how many steps."""

    label: str
    build: Callable[[], nn.Module]
    size: int
    steps: int


def pretrained(name: str, size: int) -> nn.Module:
    """The network with its weights, for grey images of a size, and with a new head."""
    model: Any = create_model(name, pretrained=True, in_chans=1, img_size=size)
    model.reset_classifier(10)
    return model


def ways(name: str, steps: int, own_size: int | None) -> list[Way]:
    checkpoint = find_checkpoint(name)
    size = checkpoint.card.golden.shape[-1]
    new = partial(create_model, checkpoint.card.architecture, num_classes=10, in_chans=1)
    found = [
        Way("pretrained", partial(pretrained, name, size), size, steps),
        Way("from scratch", new, size, steps),
        Way(f"from scratch, {LONGER}× the steps", new, size, LONGER * steps),
    ]
    if own_size is not None:
        at, more = f"at {own_size}×{own_size}, {LONGER}× the steps", LONGER * steps
        found += [
            Way(f"pretrained, {at}", partial(pretrained, name, own_size), own_size, more),
            Way(f"from scratch, {at}", partial(new, img_size=own_size), own_size, more),
        ]
    return found


def resized(images: Tensor, size: int) -> Tensor:
    return images if images.shape[-1] == size else F.interpolate(images, (size, size), mode="bilinear")


def fit(
    model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor, batches: Sequence[Tensor]
) -> None:
    """One step for each batch of indices, with label smoothing, a warm-up and a cosine."""
    shape = partial(warmup_cosine, warmup=len(batches) // 10, total=len(batches))
    schedule = LambdaLR(optimizer, shape)
    for batch in batches:
        loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    predicted = torch.cat([model.eval()(part).argmax(1) for part in images.split(250)])
    return (predicted == labels).double().mean().item()


def train(way: Way, images: Tensor, labels: Tensor, *, lr: float, seed: int) -> nn.Module:
    """The same recipe for all: StiefelAdam, batches drawn by seed."""
    torch.manual_seed(seed)
    model = way.build().train()
    optimizer = StiefelAdam(model.parameters(), lr=lr, weight_decay=5e-5)
    draw = partial(np.random.default_rng(seed).choice, len(labels), min(BATCH, len(labels)), replace=False)
    batches = [torch.from_numpy(draw()) for _ in range(way.steps)]
    fit(model, optimizer, resized(images, way.size), labels, batches)
    return model


def score(way: Way, few: Images, test: Images, *, lr: float, seed: int) -> float:
    """The accuracy on `test` of a network trained on `few`."""
    images, labels = test
    return accuracy(train(way, *few, lr=lr, seed=seed), resized(images, way.size), labels)


def choose_rate(way: Way, task: Task, count: int, seed: int, progress: Progress) -> float:
    """The rate that is best on the images held out, with a seed that is not used again."""
    scores = {}
    for lr in RATES:
        with progress.part(f"{way.label}: lr {lr:g}", way.steps):
            scores[lr] = score(way, task.few(count, seed), task.held_out, lr=lr, seed=seed)
    return max(RATES, key=lambda lr: scores[lr])


def compare(
    name: str = WEIGHTS, data: str = "digits", root: Path = DATA, *, seed: int = 0, quick: bool = False
) -> Result:
    """Test accuracy of every way, for a few sizes of training set and several seeds."""
    sizes, seeds, steps = ((20,), 2, 2) if quick else ((100, 300), 5, 120)
    settings = {"weights": name, "data": data, "steps": steps, "batch": BATCH, "seeds": seeds, "seed": seed}
    result = Result(f"finetuning-{data}", settings)
    task = mnist_task(root) if data == "mnist" else digits_task()
    tried = ways(name, steps, None if data == "mnist" else task.train[0].shape[-1])
    progress = Progress((len(RATES) + len(sizes) * seeds) * sum(way.steps for way in tried))
    for way in tried:
        lr = choose_rate(way, task, sizes[0], seed + seeds, progress)
        for count in sizes:
            for s in range(seed, seed + seeds):
                with progress.part(f"{way.label}: {count} images, seed {s}", way.steps):
                    reached = score(way, task.few(count, s), task.test, lr=lr, seed=s)
                result.add_point(way.label, {"images": count, "seed": s, "accuracy": reached})
        result.table += [row(result, way.label, lr, count) for count in sizes]
    return result


def row(result: Result, label: str, lr: float, count: int) -> dict[str, Any]:
    """Mean and standard deviation in percent, and how much less than pretrained, seed by seed."""
    mine, best = (result.grouped([name], "images", "accuracy")[count] for name in (label, "pretrained"))
    less = [100 * (b - a) for a, b in zip(mine, best, strict=True)]
    return {
        "training images": count,
        "network": label,
        "lr": lr,
        "test accuracy": mean_and_deviation([100 * a for a in mine]),
        "pretrained is better by": mean_and_deviation(less) if label != "pretrained" else None,
    }


def mean_and_deviation(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def plot(result: Result) -> "Figure":
    """The mean over seeds as a bar, every seed as a dot."""
    figure, axis = new_figure(1, 1, 4.6)
    width = 0.8 / len(result.series)
    for i, label in enumerate(result.series):
        by_size = result.grouped([label], "images", "accuracy")
        for j, accuracies in enumerate(by_size.values()):
            values = [100 * value for value in accuracies]
            place = j + (i - (len(result.series) - 1) / 2) * width
            colour, name = style.COLOURS[i], None if j else label
            axis.bar(place, statistics.mean(values), 0.9 * width, label=name, color=colour, alpha=0.75)
            axis.plot([place] * len(values), values, "o", ms=3.5, color=style.BLACK, mfc="white")
    axis.set_xticks(range(len(by_size)), [f"{count:.0f}" for count in by_size])
    title = f"{result.settings['data']}: mean over seeds, and each seed"
    axis.set(xlabel="training images", ylabel="test accuracy, %", title=title, ylim=(0, 100))
    axis.set_axisbelow(True)
    legend_below(figure, axis, 2)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("finetuning", __doc__)
    add = parser.add_argument
    add("--weights", default=WEIGHTS, help=f"where fine-tuning starts (default {WEIGHTS})")
    add("--data", choices=("digits", "mnist"), default="digits")
    add("--root", type=Path, default=DATA, help="folder that has MNIST/raw (default data/)")
    options = parser.parse_args(arguments)
    chosen = (options.weights, options.data, options.root)
    run = partial(compare, *chosen, seed=options.seed, quick=options.quick)
    print(markdown(produce(f"finetuning-{options.data}", options, run, plot).table))


if __name__ == "__main__":
    sys.exit(run_command(main))
