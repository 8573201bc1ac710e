"""Projection-robust Wasserstein on a corpus: every pair of its point clouds, every optimizer, one batched run each.

    python -m ortho_vit.experiments.transport digits                     features of a small CNN trained on them
    python -m ortho_vit.experiments.transport mnist --data DIR           the same on MNIST, in DIR/MNIST/raw
    python -m ortho_vit.experiments.transport shakespeare --texts DIR    word2vec of the plays in DIR/*.txt; needs gensim
    python -m ortho_vit.experiments.transport hypercube                  Lin et al.'s fragmented hypercube

The paper compares the methods at one learning rate each.  Here each also runs at multiples of it, so that methods are
compared and not how well each was tuned.
"""

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
from ortho_vit.experiments.result import Progress, Result, make_parser, produce, run_command
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
        """The same clouds with every squared distance multiplied by `factor`."""
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
Methods = dict[str, tuple[Maker, float]]  # how an optimizer is made, and its learning rate


def methods_at(*rates: float, beta: float = 0.8) -> Methods:
    """The methods, in the order of `COLOURS`, at the learning rates of the paper for one corpus."""
    makers: tuple[Maker, ...] = (
        RGAS,
        partial(RAGAS, beta=beta),
        partial(StiefelSGD, momentum=0.5),
        partial(ProjectedStiefelSGD, momentum=0.5),
        MomentumlessStiefelSGD,
    )
    return dict(zip(COLOURS, zip(makers, rates, strict=True), strict=True))


IMAGES = methods_at(8e-4, 0.01, 1e-3, 7e-4, 6e-4)
WORDS = methods_at(2.0, 0.08, 2.0, 15.0, 2.0, beta=0.9)
CUBE = methods_at(0.05, 0.1, 0.05, 0.05, 0.05)


def compare(
    name: str, corpus: Corpus, methods: Methods, *, reg: float, quick: bool, settings: dict[str, Any]
) -> Result:
    """The mean value over all pairs after every step, for every method at multiples of its learning rate.

    The best multiple also runs six times as long, which shows whether methods differ in speed or in where they end.
    """
    iterations, multiples = (3, (1.0, 0.5)) if quick else (50, (1.0, 0.25, 0.5, 2.0, 4.0))
    clouds = corpus.pairs()
    count, points, d = clouds[0].shape
    size = {"clouds": corpus.names, "pairs": count, "points": points, "d": d}
    options: dict[str, Any] = {"k": 2, "reg": reg, "sweeps": 100, "sinkhorn_tolerance": 1e-3}
    result = Result(name, {**settings, **size, **options, "iterations": iterations, "long": 6 * iterations})
    progress = Progress(len(methods) * (len(multiples) + 6) * iterations)

    def run(method: str, multiple: float, steps: int, label: str) -> list[float]:
        make, rate = methods[method]
        optimizer = partial(make, lr=rate * multiple)
        with progress.part(f"{name}: {method}, lr {rate * multiple:g}, {steps} iterations", steps):
            solved = projection_robust_wasserstein(
                *clouds, optimizer=optimizer, iterations=steps, tolerance=0, **options
            )
        curve = solved.history.mean(1).tolist()
        iteration = list(map(float, range(len(curve))))
        result.series[f"{method} | {label}"] = {"iteration": iteration, "value": curve}
        return curve

    for method, (_, rate) in methods.items():
        rows: list[dict[str, Any]] = []
        for multiple in multiples:
            curve = run(method, multiple, iterations, f"{multiple:g}")
            at = {f"at {i}": curve[i] for i in (5, 10, 20) if i < iterations}
            row = {"method": method, "lr": rate * multiple, "multiple": multiple, **at, "last": curve[-1]}
            rows.append(row)
        best = max(rows, key=lambda row: row["last"])
        long = run(method, best["multiple"], 6 * iterations, "long")[-1]
        result.table += [row | {"long": long if row is best else None} for row in rows]
    return result


def plot_compare(result: Result) -> "Figure":
    """How far each method is from the largest value that any of them reached; the values themselves look alike."""
    figure, axes = new_figure(1, 3, 3.9, sharey=True)
    top = max(row["long"] for row in result.table if row["long"] is not None)
    for method, colour in COLOURS.items():
        rows = [row for row in result.table if row["method"] == method]
        (best,) = (row for row in rows if row["long"] is not None)
        labels = (f"{rows[0]['multiple']:g}", f"{best['multiple']:g}", "long")
        for axis, label in zip(axes, labels, strict=True):
            curve = result.series[f"{method} | {label}"]
            missing = [max(1 - value / top, 1e-9) for value in curve["value"]]
            axis.semilogy(curve["iteration"], missing, color=colour, ls=LINES[method], lw=1.5, label=method)
    titles = ("the paper's learning rates", "each method's best rate", "the same, six times as long")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="iteration")
    axes[0].set(ylabel="1 − value / largest value", ylim=(3e-4, 1.5))
    legend_below(figure, axes[0], 3)
    about = "{pairs} pairs, reg {reg:g}".format(**result.settings)
    figure.suptitle(f"{result.name}: {about}, largest value {top:.4g}", fontsize=11)
    return figure


# ---- digits and MNIST: features of a CNN ----------------------------------------------------------------


def digit_net(side: int) -> nn.Sequential:
    """Features (two convolutions and 128 hidden units, taken before their ReLU: none is dead), then the classifier."""
    features = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (side // 2) ** 2, 128),
    )
    return nn.Sequential(features, nn.Sequential(nn.ReLU(), nn.Linear(128, 10)))


def train_features(images: Tensor, labels: Tensor, *, epochs: int, seed: int) -> nn.Sequential:
    """Adam at 1e-3, batches of 64; images (N, 1, s, s) in [0, 1]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = digit_net(images.shape[-1])
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(epochs):
            for batch in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(net(images[batch]), labels[batch]).backward()
                optimizer.step()
    return net.eval()


@torch.no_grad()
def digit_clouds(net: nn.Sequential, images: Tensor, labels: Tensor, size: int) -> tuple[Corpus, float]:
    """The features of up to `size` images per digit, with uniform weights; and the network's accuracy on all images."""
    extract, classify = net
    features = torch.cat([extract(part) for part in images.split(500)])
    accuracy = (classify(features).argmax(1) == labels).float().mean().item()
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
    images, labels = torch.from_numpy(data.images).float().unsqueeze(1) / 16, torch.from_numpy(data.target)
    epochs, size = (1, 10) if quick else (20, 1000)
    return _compare_images("digits", (images, labels), (images, labels), epochs, size, seed, quick)


def mnist(root: Path, *, seed: int = 0, quick: bool = False) -> Result:
    """The CNN trained on 20,000 of MNIST's training images, transport between 200 test images per digit."""
    few, size = (500, 10) if quick else (20_000, 200)
    images, labels = read_mnist(root, train=True)
    test = read_mnist(root, train=False)
    return _compare_images("mnist", (images[:few], labels[:few]), test, 1, size, seed, quick)


Images = tuple[Tensor, Tensor]  # and their labels


def _compare_images(
    name: str, train: Images, test: Images, epochs: int, size: int, seed: int, quick: bool
) -> Result:
    with Progress(1).part(f"{name}: training the CNN"):
        net = train_features(*train, epochs=epochs, seed=seed)
    corpus, accuracy = digit_clouds(net, *test, size)
    settings = {"seed": seed, "accuracy of the CNN": round(accuracy, 4)}
    settings |= {"centres' mean distance²": CENTRE_DISTANCE}
    return compare(name, corpus, IMAGES, reg=8.0, quick=quick, settings=settings)


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
    dimension, words, epochs = (20, 20, 1) if quick else (200, 300, 30)
    with Progress(1).part("shakespeare: training word2vec"):
        corpus = word_clouds(texts, dimension=dimension, words=words, epochs=epochs, seed=seed)
    settings = {"seed": seed, "word2vec epochs": epochs, "words' mean distance²": WORD_DISTANCE}
    return compare("shakespeare", corpus, WORDS, reg=0.2, quick=quick, settings=settings)


# ---- the fragmented hypercube ---------------------------------------------------------------------------------


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
            for n in sizes:
                with progress.part(f"hypercube: {method}, n = {n}, {kind}", n * n):
                    x, y = fragmented_hypercube(n, d, k, seeds=seeds, paired=kind == "paired")
                    solved = projection_robust_wasserstein(
                        x, y, optimizer=partial(make, lr=lr), start=start, **options
                    )
                gap = torch.linalg.matrix_norm(solved.projection @ solved.projection.mT - truth)
                point = {
                    "n": float(n),
                    "value": solved.value.mean().item(),
                    "subspace error": gap.mean().item(),
                    "iterations": float(len(solved.history) - 1),
                }
                result.add_point(f"{method} | {kind}", point)
            result.table.append({"method": method, "samples": kind, "lr": lr, **point})
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
    title = "Fragmented hypercube: paired samples (filled) and independent ones (hollow)"
    figure.suptitle(title, fontsize=11)
    for axis in axes:
        axis.set_xticks(range(len(curve["n"])), [f"{n:g}" for n in curve["n"]])
    legend_below(figure, axes[0], 3)
    return figure


# ---- the command -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("transport", __doc__)
    parser.add_argument("corpus", choices=("digits", "mnist", "shakespeare", "hypercube"))
    parser.add_argument("--data", type=Path, help="mnist: folder that has MNIST/raw (default data/)")
    parser.add_argument("--texts", type=Path, help="shakespeare: folder of .txt files (default texts/)")
    options = parser.parse_args(arguments)
    for option, corpus in (("data", "mnist"), ("texts", "shakespeare")):
        if getattr(options, option) and options.corpus != corpus:
            parser.error(f"--{option} is an option of {corpus}, not of {options.corpus}")
    experiments: dict[str, Callable[..., Result]] = {
        "digits": digits,
        "mnist": partial(mnist, options.data or Path("data")),
        "shakespeare": partial(shakespeare, options.texts or Path("texts")),
        "hypercube": hypercube,
    }
    run = partial(experiments[options.corpus], seed=options.seed, quick=options.quick)
    plot = plot_hypercube if options.corpus == "hypercube" else plot_compare
    produce(options.corpus, options, run, plot).print_table()


if __name__ == "__main__":
    sys.exit(run_command(main))
