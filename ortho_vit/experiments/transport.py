"""Projection-robust Wasserstein on a corpus: every pair of its point clouds, every optimizer, one batched run each.

    python -m ortho_vit.experiments.transport digits                     features of a small CNN, trained on the spot
    python -m ortho_vit.experiments.transport mnist --data DIR           the same on MNIST, in DIR/MNIST/raw
    python -m ortho_vit.experiments.transport shakespeare --texts DIR    word2vec of the plays in DIR/*.txt; needs gensim
    python -m ortho_vit.experiments.transport hypercube                  Lin et al.'s fragmented hypercube, of known answer

The paper compares the methods at one learning rate each.  Here each also runs at multiples of it, so that methods are
compared and not how well each was tuned.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ortho_vit.experiments import figure as style
from ortho_vit.experiments.figure import legend_below, new_figure
from ortho_vit.experiments.result import Progress, Result, add_common_options, parse, produce, run_command
from ortho_vit.optim import MomentumlessStiefelSGD, ProjectedStiefelSGD, StiefelSGD
from ortho_vit.stiefel import random_stiefel
from ortho_vit.transport import RAGAS, RGAS, projection_robust_wasserstein

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Maker = Callable[..., Optimizer]
# Mean squared distances of two digits' centres and of two words: the scales of the paper's learning rates
CENTRE_DISTANCE, WORD_DISTANCE = 800.0, 6.0


@dataclass(frozen=True)
class Corpus:
    """Point clouds of one size, padded with points of weight zero."""

    names: list[str]
    points: Tensor  # (S, n, d)
    weights: Tensor  # (S, n)

    @classmethod
    def of(cls, clouds: dict[str, tuple[Tensor, Tensor]]) -> "Corpus":
        size = max(len(weights) for _, weights in clouds.values())
        points = [F.pad(points, (0, 0, 0, size - len(points))) for points, _ in clouds.values()]
        weights = [F.pad(weights, (0, size - len(weights))) for _, weights in clouds.values()]
        return cls(list(clouds), torch.stack(points), torch.stack(weights))

    def centres(self) -> Tensor:
        return (self.weights.unsqueeze(-2) @ self.points).squeeze(-2)

    def centre_distance(self) -> float:
        """The mean squared distance of two clouds' centres."""
        return torch.pdist(self.centres()).square().mean().item()

    def point_distance(self) -> float:
        """The mean squared distance of two points of two clouds."""
        variances = (self.weights * self.points.square().sum(-1)).sum(-1) - self.centres().square().sum(-1)
        return self.centre_distance() + 2 * variances.mean().item()

    def scaled(self, factor: float) -> "Corpus":
        """With every squared distance multiplied by `factor`."""
        return replace(self, points=self.points * factor**0.5)

    def pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        first, second = zip(*combinations(range(len(self.names)), 2), strict=True)
        i, j = list(first), list(second)
        return self.points[i], self.points[j], self.weights[i], self.weights[j]


# ---- the methods, and the comparison -------------------------------------------------------------

COLOURS = {
    "RGAS": style.GREY,
    "RAGAS": style.BLACK,
    "StiefelSGD": style.BLUE,
    "ProjectedStiefelSGD": style.ORANGE,
    "MomentumlessStiefelSGD": style.GREEN,
}
LINES = dict(zip(COLOURS, ("-", "--", "-", "-.", (0, (1, 1))), strict=True))
Methods = dict[str, tuple[Maker, float]]
IMAGES: Methods = {
    "RGAS": (RGAS, 8e-4),
    "RAGAS": (partial(RAGAS, beta=0.8), 0.01),
    "StiefelSGD": (partial(StiefelSGD, momentum=0.5), 1e-3),
    "ProjectedStiefelSGD": (partial(ProjectedStiefelSGD, momentum=0.5), 7e-4),
    "MomentumlessStiefelSGD": (MomentumlessStiefelSGD, 6e-4),
}
WORDS: Methods = {
    "RGAS": (RGAS, 2.0),
    "RAGAS": (partial(RAGAS, beta=0.9), 0.08),
    "StiefelSGD": (partial(StiefelSGD, momentum=0.5), 2.0),
    "ProjectedStiefelSGD": (partial(ProjectedStiefelSGD, momentum=0.5), 15.0),
    "MomentumlessStiefelSGD": (MomentumlessStiefelSGD, 2.0),
}


def compare(
    name: str,
    corpus: Corpus,
    methods: Methods,
    *,
    reg: float,
    iterations: int,
    multiples: Sequence[float],
    settings: dict[str, Any],
) -> Result:
    """The mean value over all pairs after every step, for every method at multiples of its learning rate.

    The best multiple also runs six times as long, which shows whether methods differ in speed or in where they end.
    """
    clouds = corpus.pairs()
    count, points, d = clouds[0].shape
    size = {"clouds": corpus.names, "pairs": count, "points": points, "d": d}
    options: dict[str, Any] = {"k": 2, "reg": reg, "sweeps": 100, "sinkhorn_tolerance": 1e-3}
    result = Result(name, {**settings, **size, **options, "iterations": iterations, "long": 6 * iterations})

    progress = Progress(len(methods) * (len(multiples) + 6) * iterations)

    def run(method: str, multiple: float, steps: int, label: str) -> list[float]:
        make, rate = methods[method]
        chosen = partial(make, lr=rate * multiple)
        with progress.part(f"{name}: {method}, lr {rate * multiple:g}, {steps} iterations", steps):
            solved = projection_robust_wasserstein(
                *clouds, optimizer=chosen, iterations=steps, tolerance=0, **options
            )
        curve = solved.history.mean(1).tolist()
        result.series[f"{method} | {label}"] = {
            "iteration": [float(i) for i in range(len(curve))],
            "value": curve,
        }
        return curve

    for method, (_, rate) in methods.items():
        rows: list[dict[str, Any]] = []
        for multiple in multiples:
            curve = run(method, multiple, iterations, f"{multiple:g}")
            at = {f"at {i}": curve[i] for i in (5, 10, 20) if i < iterations}
            rows.append(
                {"method": method, "lr": rate * multiple, "multiple": multiple, **at, "last": curve[-1]}
            )
        best = max(rows, key=lambda row: row["last"])
        long = run(method, best["multiple"], 6 * iterations, "long")[-1]
        result.table += [row | {"long": long if row is best else None} for row in rows]
    return result


def plot_compare(result: Result) -> "Figure":
    """How far each method is from the largest value that any reached: the values themselves differ too little to see."""
    figure, axes = new_figure(1, 3, 3.9, sharey=True)
    top = max(row["long"] for row in result.table if row["long"] is not None)
    for method, colour in COLOURS.items():
        rows = [row for row in result.table if row["method"] == method]
        (best,) = (row for row in rows if row["long"] is not None)
        curves = [
            f"{method} | {multiple}"
            for multiple in (f"{rows[0]['multiple']:g}", f"{best['multiple']:g}", "long")
        ]
        for axis, name in zip(axes, curves, strict=True):
            curve = result.series[name]
            missing = [max(1 - value / top, 1e-9) for value in curve["value"]]
            axis.semilogy(curve["iteration"], missing, color=colour, ls=LINES[method], lw=1.5, label=method)
    titles = ("the paper's learning rates", "each method's best rate", "the same, six times as long")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="iteration")
    axes[0].set(ylabel="missing to the largest value, share", ylim=(3e-4, 1.5))
    legend_below(figure, axes[0], 3)
    figure.suptitle(
        f"{result.name}: {result.settings['pairs']} pairs, reg {result.settings['reg']:g}, largest value {top:.4g}",
        fontsize=11,
    )
    return figure


# ---- digits and MNIST: features of a CNN ----------------------------------------------------------------


class DigitNet(nn.Module):
    """Two convolutions and a hidden layer of 128 units, whose values before the ReLU are the features: none is dead."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * (side // 2) ** 2, 128),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


def train_features(images: Tensor, labels: Tensor, *, epochs: int, seed: int) -> DigitNet:
    """Adam at 1e-3, batches of 64; images (N, 1, s, s) in [0, 1]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = DigitNet(images.shape[-1])
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(net(images[batch]), labels[batch]).backward()
                optimizer.step()
    return net.eval()


@torch.no_grad()
def digit_clouds(net: DigitNet, images: Tensor, labels: Tensor, size: int) -> tuple[Corpus, float]:
    """The features of up to `size` images per digit, with uniform weights; and the network's accuracy on all images."""
    features = torch.cat([net.features(part) for part in images.split(500)])
    accuracy = (net.head(features).argmax(1) == labels).float().mean().item()
    clouds = {}
    for digit in range(10):
        points = features[labels == digit][:size].double()
        clouds[str(digit)] = points, points.new_full((len(points),), 1 / len(points))
    corpus = Corpus.of(clouds)
    return corpus.scaled(CENTRE_DISTANCE / corpus.centre_distance()), accuracy


def digits(*, seed: int = 0, quick: bool = False) -> Result:
    """scikit-learn's 1,797 digits of 8 × 8: a CNN trained on them, then transport between them."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(data.target)
    with Progress(1).part("digits: training the CNN"):
        net = train_features(images, labels, epochs=1 if quick else 20, seed=seed)
    corpus, accuracy = digit_clouds(net, images, labels, 10 if quick else 1000)
    return _compare_images("digits", corpus, accuracy, seed, quick)


def mnist(root: Path, *, seed: int = 0, quick: bool = False) -> Result:
    """The CNN trained on 20,000 of MNIST's training images, transport between 200 test images per digit."""
    images, labels = read_mnist(root, train=True)
    test_images, test_labels = read_mnist(root, train=False)
    few = 500 if quick else 20_000
    with Progress(1).part("mnist: training the CNN"):
        net = train_features(images[:few], labels[:few], epochs=1, seed=seed)
    corpus, accuracy = digit_clouds(net, test_images, test_labels, 10 if quick else 200)
    return _compare_images("mnist", corpus, accuracy, seed, quick)


def _compare_images(name: str, corpus: Corpus, accuracy: float, seed: int, quick: bool) -> Result:
    settings = {
        "seed": seed,
        "accuracy of the CNN": round(accuracy, 4),
        "centres' mean distance²": CENTRE_DISTANCE,
    }
    iterations, multiples = (3, (1.0, 0.5)) if quick else (50, (1.0, 0.25, 0.5, 2.0, 4.0))
    return compare(
        name, corpus, IMAGES, reg=8.0, iterations=iterations, multiples=multiples, settings=settings
    )


def read_mnist(root: Path, *, train: bool) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 28, 28) in [0, 1] and labels, from torchvision's files."""
    from torchvision.datasets import MNIST

    try:
        data = MNIST(str(root), train=train, download=False)
    except RuntimeError:
        remedy = f"torchvision.datasets.MNIST('{root}', download=True) puts it there"
        raise FileNotFoundError(f"no MNIST in {root / 'MNIST' / 'raw'}; {remedy}") from None
    return data.data.unsqueeze(1).float() / 255, data.targets


# ---- Shakespeare: word vectors ------------------------------------------------------------------------------


def read_texts(folder: Path) -> dict[str, list[list[str]]]:
    """The .txt files of a folder, each as lines of lower-case words."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    texts = {}
    for path in sorted(folder.glob("*.txt")):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {path} as UTF-8 text: {error}") from None
        lines = [re.findall(r"[a-z']*[a-z][a-z']*", line.lower()) for line in text.splitlines()]
        texts[path.stem] = [line for line in lines if line]
        if not texts[path.stem]:
            raise ValueError(f"{path} has no words in it")
    if len(texts) < 2:
        raise ValueError(f"{folder} has {len(texts)} .txt files; pairs need at least two")
    return texts


def word_clouds(
    texts: dict[str, list[list[str]]], *, dimension: int, words: int, epochs: int, seed: int
) -> Corpus:
    """Each text's most frequent words, weighted by frequency, as word2vec vectors (skip-gram, trained on all texts)."""
    try:
        from gensim.models import Word2Vec
    except ModuleNotFoundError:
        raise ModuleNotFoundError("word vectors need gensim: pip install gensim") from None
    options = {"window": 8, "min_count": 1, "sg": 1, "negative": 10, "workers": 1}
    sentences = [line for lines in texts.values() for line in lines]
    vectors = Word2Vec(sentences, vector_size=dimension, epochs=epochs, seed=seed, **options).wv
    clouds = {}
    for name, lines in texts.items():
        counts = Counter(word for line in lines for word in line).most_common(words)
        weights = torch.tensor([count for _, count in counts], dtype=torch.float64)
        points = torch.stack([torch.tensor(vectors[word], dtype=torch.float64) for word, _ in counts])
        clouds[name] = points, weights / weights.sum()
    corpus = Corpus.of(clouds)
    return corpus.scaled(WORD_DISTANCE / corpus.point_distance())


def shakespeare(folder: Path, *, seed: int = 0, quick: bool = False) -> Result:
    """All pairs of the texts in a folder: reg 0.2, 50 iterations, the 300 most frequent words of each."""
    texts = read_texts(folder)
    dimension, words, epochs, iterations = (20, 20, 1, 3) if quick else (200, 300, 30, 50)
    with Progress(1).part("shakespeare: training word2vec"):
        corpus = word_clouds(texts, dimension=dimension, words=words, epochs=epochs, seed=seed)
    multiples = (1.0, 0.5) if quick else (1.0, 0.25, 0.5, 2.0, 4.0)
    settings = {"seed": seed, "word2vec epochs": epochs, "words' mean distance²": WORD_DISTANCE}
    return compare(
        "shakespeare", corpus, WORDS, reg=0.2, iterations=iterations, multiples=multiples, settings=settings
    )


# ---- the fragmented hypercube ---------------------------------------------------------------------------------

CUBE: Methods = {
    "RGAS": (RGAS, 0.05),
    "RAGAS": (RAGAS, 0.1),
    "StiefelSGD": (partial(StiefelSGD, momentum=0.5), 0.05),
    "ProjectedStiefelSGD": (partial(ProjectedStiefelSGD, momentum=0.5), 0.05),
    "MomentumlessStiefelSGD": (MomentumlessStiefelSGD, 0.05),
}


def fragmented_hypercube(
    n: int, d: int, k: int, *, seeds: Sequence[int], paired: bool
) -> tuple[Tensor, Tensor]:
    """x uniform on [−1, 1]ᵈ and y = T(x'),  T(x) = x + 2 sign(x) on the first k coordinates; one pair (x, y) per seed.

    T is the gradient of a convex function, so it is the optimal map and W² = 4k, all of it in the first k coordinates.
    Where x' = x (`paired`) this is true for the samples themselves, and 4k is their exact projection-robust value.
    """
    x, y = torch.empty(2, len(seeds), n, d, dtype=torch.float64)
    for i, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        x[i] = 2 * torch.rand(n, d, generator=generator, dtype=torch.float64) - 1
        other = x[i] if paired else 2 * torch.rand(n, d, generator=generator, dtype=torch.float64) - 1
        y[i] = torch.cat([other[:, :k] + 2 * other[:, :k].sign(), other[:, k:]], 1)
    return x, y


def hypercube(*, seed: int = 0, quick: bool = False) -> Result:
    """The value against the exact 4k, and the subspace found against the true one, by method and number of points."""
    d, k, repeats, sizes = (8, 2, 2, (10, 20)) if quick else (30, 2, 10, (25, 50, 100, 250))
    seeds = range(seed, seed + repeats)
    options: dict[str, Any] = {"k": k, "reg": 0.05, "iterations": 5 if quick else 500, "tolerance": 1e-4}
    options["sinkhorn_tolerance"] = 1e-4
    result = Result("hypercube", {"d": d, "exact": 4 * k, "seeds": list(seeds), **options})
    start = random_stiefel(d, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    truth = torch.diag((torch.arange(d) < k).double())
    progress = Progress(2 * len(CUBE) * sum(n * n for n in sizes))
    for kind in ("paired", "independent"):
        for method, (make, lr) in CUBE.items():
            curve: dict[str, list[float]] = {"n": [], "value": [], "subspace error": [], "iterations": []}
            for n in sizes:
                with progress.part(f"hypercube: {method}, n = {n}, {kind}", n * n):
                    x, y = fragmented_hypercube(n, d, k, seeds=seeds, paired=kind == "paired")
                    solved = projection_robust_wasserstein(
                        x, y, optimizer=partial(make, lr=lr), start=start, **options
                    )
                U = solved.projection
                gap = torch.linalg.matrix_norm(U @ U.mT - truth)
                steps = float(len(solved.history) - 1)
                row = (float(n), solved.value.mean().item(), gap.mean().item(), steps)
                for key, number in zip(curve, row, strict=True):
                    curve[key].append(number)
            result.series[f"{method} | {kind}"] = curve
            last = {key: values[-1] for key, values in curve.items()}
            result.table.append({"method": method, "samples": kind, "lr": lr, **last})
    return result


def plot_hypercube(result: Result) -> "Figure":
    """The methods side by side for each number of points; their results agree."""
    figure, axes = new_figure(1, 2, 4.2)
    markers = dict(zip(COLOURS, style.MARKERS, strict=False))
    for label, curve in result.series.items():
        method, kind = label.split(" | ")
        shift = 0.14 * (list(COLOURS).index(method) - (len(COLOURS) - 1) / 2)
        places = [place + shift for place in range(len(curve["n"]))]
        look = {"color": COLOURS[method], "marker": markers[method], "ls": "none", "ms": 6}
        look |= {"mfc": COLOURS[method] if kind == "paired" else "white"}
        axes[0].plot(places, curve["value"], label=method if kind == "paired" else None, **look)
        axes[1].plot(places, curve["subspace error"], **look)
    axes[0].axhline(result.settings["exact"], color=style.BLACK, lw=0.8)
    axes[0].set(xlabel="points", ylabel="value (line: exact 4k)")
    axes[1].set(yscale="log", xlabel="points", ylabel="‖UUᵀ − U*U*ᵀ‖ (Frobenius)")
    figure.suptitle(
        "Fragmented hypercube: paired samples (filled) and independent ones (hollow)", fontsize=11
    )
    for axis in axes:
        axis.set_xticks(range(len(curve["n"])), [f"{n:g}" for n in curve["n"]])
    legend_below(figure, axes[0], 3)
    return figure


# ---- the command -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ortho_vit.experiments.transport", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="corpus", required=True)
    for name in ("digits", "mnist", "shakespeare", "hypercube"):
        command = commands.add_parser(name)
        if name == "mnist":
            command.add_argument(
                "--data", type=Path, default=Path("data"), help="folder that has MNIST/raw (default data/)"
            )
        if name == "shakespeare":
            command.add_argument(
                "--texts",
                type=Path,
                default=Path("texts"),
                help="folder of .txt files, one per play (default texts/)",
            )
        add_common_options(command)
    options = parse(parser, arguments)
    run = partial(_experiment(options), seed=options.seed, quick=options.quick)
    plot = plot_hypercube if options.corpus == "hypercube" else plot_compare
    produce(options.corpus, options, run, plot).print_table()


def _experiment(options: argparse.Namespace) -> Callable[..., Result]:
    if options.corpus == "mnist":
        return partial(mnist, options.data)
    if options.corpus == "shakespeare":
        return partial(shakespeare, options.texts)
    return digits if options.corpus == "digits" else hypercube


if __name__ == "__main__":
    sys.exit(run_command(main))
