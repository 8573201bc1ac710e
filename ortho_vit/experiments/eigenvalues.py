"""Leading eigenvalues: the paper's test bed, figure by figure.

    max tr(XᵀAX N)  over St(n, m),    A = (Ξ + Ξᵀ) / (2√n),  Ξ standard normal

N = I is the paper's problem; its optimum is the sum of the m largest eigenvalues.  There XᵀG is symmetric, so the rotation
part Z of the momentum stays zero, and the metric, the matrix exponential and the coefficient of U·Z make no difference.
N = diag(m, …, 1)/m is Brockett's cost, where they do; its optimum is Σ Nᵢ λᵢ.

    python -m ortho_vit.experiments.eigenvalues FIGURE [--quick] [--seed 0] [--output DIR]

FIGURE is fig-convergence, fig-metrics, fig-manifold, fig-retraction, fig-learning-rate, fig-time or all.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ortho_vit.errors import DivergedError
from ortho_vit.experiments import figure as style
from ortho_vit.experiments.figure import legend_below, new_figure, staggered
from ortho_vit.experiments.result import Progress, Result, make_parser, produce, run_command
from ortho_vit.optim import MomentumlessStiefelSGD, ProjectedStiefelSGD, StiefelAdam, StiefelSGD
from ortho_vit.parameter import StiefelParameter
from ortho_vit.stiefel import orthogonality_error, polar, project_tangent, random_stiefel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Factory = Callable[..., Optimizer]  # of a list of parameters

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Problem:
    """max tr(XᵀAX diag(N)) from a random start, with the optimum from an eigendecomposition in float64."""

    A: Tensor  # (n, n), symmetric
    N: Tensor  # (m,)
    start: Tensor  # (n, m); its precision is that of the iterates
    optimum: float

    @classmethod
    def random(cls, n: int, m: int, *, seed: int, brockett: bool = False) -> "Problem":
        if not 1 <= m <= n:
            raise ValueError(f"eigenvalues: m must be between 1 and n = {n}, got {m}")
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(n, n, generator=generator, dtype=torch.float64)
        A = (noise + noise.mT) / (2 * math.sqrt(n))
        N = torch.arange(m, 0, -1, dtype=torch.float64) / m if brockett else torch.ones(m).double()
        leading = torch.linalg.eigvalsh(A).flip(0)[:m]
        start = random_stiefel(n, m, dtype=torch.float64, generator=generator)
        return cls(A, N, start, float(leading @ N))

    def evaluate(self, X: Tensor) -> tuple[float, Tensor]:
        """|f(X) − f*| in float64, above the optimum too; and the gradient, in the precision of X."""
        exact = X.double()
        AX = self.A @ exact
        error = abs(self.optimum - torch.sum(AX * (exact * self.N)).item())
        if X.dtype == torch.float32:
            AX = self.A_single @ X
        return error, 2 * AX * self.N.to(X.dtype)

    @cached_property
    def A_single(self) -> Tensor:
        return self.A.float()


@dataclass
class Run:
    """One method on one problem: the error and ‖XᵀX − I‖_max at the start and after every iteration."""

    errors: list[float]
    deviations: list[float]
    overflowed: bool = False

    def first_below(self, threshold: float) -> int | None:
        return next((i for i, error in enumerate(self.errors) if error < threshold), None)


def maximize(
    problem: Problem, factory: Factory, iterations: int, *, stop_below: float = 0.0, deviations: bool = True
) -> Run:
    """Ascend from the problem's start until `iterations`, an error below `stop_below`, or a number that is not finite."""
    parameter = StiefelParameter(problem.start.clone())
    optimizer = factory([parameter])
    run = Run([], [])
    for step in range(iterations + 1):
        error, gradient = problem.evaluate(parameter.detach())
        run.errors.append(error)
        run.deviations.append(orthogonality_error(parameter) if deviations else math.nan)
        run.overflowed = not math.isfinite(error)
        if run.overflowed or step == iterations or error < stop_below:
            break
        parameter.grad = -gradient
        try:
            optimizer.step()
        except DivergedError:
            run.overflowed = True
            break
    return run


def record(result: Result, label: str, run: Run) -> None:
    """Add a curve, and its row: iterations to reach an error, the last error, the largest deviation."""
    iterations = list(map(float, range(len(run.errors))))
    result.series[label] = {"iteration": iterations, "error": run.errors, "deviation": run.deviations}
    result.table.append(
        {
            "method": label,
            **{f"to {threshold:g}": run.first_below(threshold) for threshold in (1e-2, 1e-4, 1e-6)},
            "iterations": len(run.errors) - 1,
            "best error": min(run.errors),
            "last error": run.errors[-1],
            "largest deviation": max(run.deviations),
        }
    )


def compare(name: str, methods: Mapping[str, Factory], n: int, m: int, iterations: int, seed: int) -> Result:
    """Every method on one problem."""
    result = Result(name, {"n": n, "m": m, "iterations": iterations, "seed": seed})
    problem = Problem.random(n, m, seed=seed)
    progress = Progress(len(methods))
    for label, factory in methods.items():
        with progress.part(f"{name}: {label}"):
            record(result, label, maximize(problem, factory, iterations))
    return result


def draw(axes: Iterable["Axes"], curve: dict[str, list[float]], **look: Any) -> None:
    """Draw the error of a run and, on a second axis, its deviation.

    A logarithmic axis has no zero: values below rounding are drawn at 1e-15.
    """
    for axis, key in zip(axes, ("error", "deviation"), strict=False):
        axis.semilogy(curve["iteration"], [max(value, 1e-15) for value in curve[key]], **look)


# ---- the methods, at the paper's learning rates ----------------------------------------------------

METHODS: dict[str, Factory] = {
    "StiefelSGD": partial(StiefelSGD, lr=0.1, momentum=0.9),
    "StiefelSGD, as printed": partial(StiefelSGD, lr=0.1, momentum=0.9, integrator="paper"),
    "StiefelAdam": partial(StiefelAdam, lr=1e-3),
    "StiefelAdam, as printed": partial(StiefelAdam, lr=1e-3, integrator="paper"),
    "ProjectedStiefelSGD": partial(ProjectedStiefelSGD, lr=0.2, momentum=0.9),
    "ProjectedStiefelSGD, μ = 0": partial(ProjectedStiefelSGD, lr=0.2, momentum=0.0),
    "MomentumlessStiefelSGD": partial(MomentumlessStiefelSGD, lr=0.1),
}
STYLES: dict[str, dict[str, Any]] = {
    "StiefelSGD": {"color": style.BLUE, "lw": 3.5, "alpha": 0.45},  # thick: others coincide with it
    "StiefelSGD, as printed": {"color": style.BLUE, "ls": "--"},
    "StiefelAdam": {"color": style.PURPLE, "lw": 3.5, "alpha": 0.45},
    "StiefelAdam, as printed": {"color": style.PURPLE, "ls": "--"},
    "ProjectedStiefelSGD": {"color": style.ORANGE},
    "ProjectedStiefelSGD, μ = 0": {"color": style.VERMILION, "ls": "-."},
    "MomentumlessStiefelSGD": {"color": style.GREEN},
}


# ---- figure 1: convergence --------------------------------------------------------------------------


def convergence(*, seed: int = 0, quick: bool = False) -> Result:
    """Error and deviation against iterations, every method, both precisions."""
    n, m, iterations = (40, 3, 20) if quick else (1000, 10, 2500)
    result = Result("convergence", {"n": n, "m": m, "iterations": iterations, "seed": seed})
    problem = Problem.random(n, m, seed=seed)
    result.settings["optimum"] = problem.optimum
    progress = Progress(len(DTYPES) * len(METHODS))
    for precision, dtype in DTYPES.items():
        in_precision = replace(problem, start=problem.start.to(dtype))
        for method, factory in METHODS.items():
            with progress.part(f"convergence: {method}, {precision}"):
                run = maximize(in_precision, factory, iterations)
            record(result, f"{method} | {precision}", run)
    return result


def plot_convergence(result: Result) -> "Figure":
    figure, axes = new_figure(2, 2, 6.8, sharex=True, sharey="row")
    for column, precision in enumerate(DTYPES):
        for method, look in STYLES.items():
            draw(axes[:, column], result.series[f"{method} | {precision}"], label=method, **look)
        axes[0][column].set(title=precision)
        axes[1][column].set(xlabel="iteration", xlim=(0, min(2500, result.settings["iterations"])))
    axes[0][0].set(ylabel="error |f(X) − f*|")
    axes[1][0].set(ylabel="max |XᵀX − I|")
    legend_below(figure, axes[0][0], 3)
    figure.suptitle("Leading eigenvalues, n = {n}, m = {m}".format(**result.settings), fontsize=11)
    return figure


# ---- figure 2: metric and matrix exponential -------------------------------------------------------


def metrics(*, seed: int = 0, quick: bool = False) -> Result:
    """metric × expm × integrator for StiefelSGD and StiefelAdam, on eigenvalues and on Brockett's cost."""
    sizes = {"eigenvalues": (40, 3, 10), "brockett": (20, 3, 10)}
    if not quick:
        sizes = {"eigenvalues": (500, 10, 1500), "brockett": (60, 6, 1500)}
    rates: dict[tuple[str, str], Factory] = {
        ("eigenvalues", "SGD"): partial(StiefelSGD, lr=0.1, momentum=0.9),
        ("eigenvalues", "Adam"): partial(StiefelAdam, lr=1e-3),
        ("brockett", "SGD"): partial(StiefelSGD, lr=0.1, momentum=0.9),
        ("brockett", "Adam"): partial(StiefelAdam, lr=1e-2),
    }
    result = Result("metrics", {"sizes (n, m, iterations)": sizes, "seed": seed})
    progress = Progress(2 * sum(sizes[cost][0] for cost, _ in rates))
    for (cost, family), make in rates.items():
        n, m, iterations = sizes[cost]
        problem = Problem.random(n, m, seed=seed, brockett=cost == "brockett")
        for integrator in ("isometric", "paper"):
            with progress.part(f"metrics: {cost}, {family}, {integrator}", n):
                for metric in ("canonical", "euclidean"):
                    for expm in ("euler", "cayley", "exact"):
                        factory = partial(make, metric=metric, expm=expm, integrator=integrator)
                        run = maximize(problem, factory, iterations)
                        record(result, f"{cost} | {family} | {integrator} | {metric} | {expm}", run)
    return result


def plot_metrics(result: Result) -> "Figure":
    """Six curves per panel; where they coincide, each shows its own marker."""
    figure, axes = new_figure(2, 2, 6.4, sharex=True)
    colours = {"canonical": style.BLUE, "euclidean": style.VERMILION}
    exponentials = ("euler", "cayley", "exact")
    for label, curve in result.series.items():
        cost, family, integrator, metric, expm = label.split(" | ")
        if integrator == "isometric":
            axis = axes[("eigenvalues", "brockett").index(cost)][("SGD", "Adam").index(family)]
            number = 2 * exponentials.index(expm) + list(colours).index(metric)
            filled = {"color": colours[metric], "mfc": "white" if metric == "euclidean" else None}
            draw([axis], curve, lw=0.9, label=f"{metric}, {expm}", **filled, **staggered(number, 6))
    for row, title in enumerate(("leading eigenvalues (Z = 0)", "Brockett's cost (Z ≠ 0)")):
        for column, family in enumerate(("SGD", "Adam")):
            axes[row][column].set(title=f"Stiefel{family}, {title}", ylim=(2e-16, None))
        axes[row][0].set(ylabel="error |f(X) − f*|")
    for axis in axes[1]:
        axis.set(xlabel="iteration")
    legend_below(figure, axes[0][0], 3)
    return figure


# ---- figure 3: what manifold error costs -----------------------------------------------------------


def manifold(*, seed: int = 0, quick: bool = False) -> Result:
    """The error that remains with fewer Cayley loops, rarer QR and fewer polar iterations."""
    projected = partial(ProjectedStiefelSGD, lr=0.2, momentum=0.9)
    stiefel = partial(StiefelSGD, lr=0.1, momentum=0.9, integrator="paper")
    methods: dict[str, Factory] = {
        f"loops | s = {s}": partial(projected, cayley_steps=s, qr_every=None) for s in (1, 2, 4, 8, 16)
    }
    methods |= {f"QR | {e or 'never'}": partial(projected, qr_every=e) for e in (1, 10, 100, None)}
    methods |= {f"polar | {i}": partial(stiefel, inner_steps=i) for i in (1, 2, 4, 8)}
    size = (40, 3, 20) if quick else (500, 10, 1500)
    return compare("manifold", methods, *size, seed)


def plot_manifold(result: Result) -> "Figure":
    """Curves that coincide show the marker of each."""
    figure, axes = new_figure(2, 3, 5.6, sharex=True, sharey="row")
    panels = {
        "loops": "Projected: s Cayley loops, no QR",
        "QR": "Projected: s = 5, QR every …",
        "polar": "StiefelSGD as printed: polar steps",
    }
    for column, (kind, title) in enumerate(panels.items()):
        curves = {k: v for k, v in result.series.items() if k.startswith(f"{kind} |")}
        for number, (label, curve) in enumerate(curves.items()):
            look = staggered(number, len(curves))
            draw(axes[:, column], curve, lw=1.1, label=label.split(" | ")[1], **look)
        axes[0][column].set_title(title, fontsize=9)
        axes[1][column].legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.19), labelspacing=0.2)
        axes[1][column].set(xlabel="iteration")
    axes[0][0].set(ylabel="error |f(X) − f*|", ylim=(None, 1e4))
    axes[1][0].set(ylabel="max |XᵀX − I|", ylim=(None, 1e2))
    return figure


# ---- figure 4: our retraction in another method ------------------------------------------------------


class PolarProjectedSGD(Optimizer):
    """Projected Stiefel SGD with a polar retraction for the position and nothing done for the momentum.

        M ← μ M − G ;   X ← polar(X + lr · M)

    In the experiment M is not projected to the tangent space; with `project` it is, which is the control.
    """

    keeps_stiefel = True

    def __init__(self, params: Iterable[Any], *, lr: float, momentum: float, project: bool = False) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "project": project})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                X, state = parameter.matrices(), self.state[parameter]
                M = state.setdefault("momentum_buffer", torch.zeros_like(X))
                M.mul_(group["momentum"]).sub_(parameter.grad.reshape(X.shape))
                if group["project"]:
                    M.copy_(project_tangent(X, M))
                X.copy_(polar(X + group["lr"] * M))


def retraction(*, seed: int = 0, quick: bool = False) -> Result:
    """The polar retraction in another method than StiefelSGD."""
    names = ("StiefelSGD", "ProjectedStiefelSGD", "ProjectedStiefelSGD, μ = 0")
    variant = partial(PolarProjectedSGD, momentum=0.9)
    methods: dict[str, Factory] = {
        **{name: METHODS[name] for name in names},
        "polar, momentum untouched, lr 0.2": partial(variant, lr=0.2),
        "polar, momentum untouched, lr 1": partial(variant, lr=1.0),
        "polar, momentum projected, lr 0.2": partial(variant, lr=0.2, project=True),
    }
    size = (40, 3, 20) if quick else (1000, 10, 1500)
    return compare("retraction", methods, *size, seed)


def plot_retraction(result: Result) -> "Figure":
    figure, axes = new_figure(1, 2, 4.0)
    thick = {"color": style.GREY, "lw": 3.5, "alpha": 0.45}  # another coincides with it
    others = iter((thick, {"color": style.BLACK, "ls": "--"}, {"color": style.SKY}))
    for label, curve in result.series.items():
        draw(axes, curve, label=label, **(STYLES.get(label) or next(others)))
    axes[0].set(xlabel="iteration", ylabel="error |f(X) − f*|")
    axes[1].set(xlabel="iteration", ylabel="max |XᵀX − I|")
    legend_below(figure, axes[0], 2)
    return figure


# ---- figure 5: the learning rate ----------------------------------------------------------------------


def learning_rate(*, seed: int = 0, quick: bool = False) -> Result:
    """Iterations to an error of 1e-6 by learning rate, median of three seeds, and the rates that overflow."""
    n, m, iterations, seeds = (40, 3, 40, 1) if quick else (200, 10, 1000, 3)
    grid = [0.05, 0.5] if quick else [float(f"{10 ** (i / 4 - 3):.3g}") for i in range(17)]
    chosen = list(range(seed, seed + seeds))
    result = Result("learning-rate", {"n": n, "m": m, "iterations": iterations, "seeds": chosen})
    problems = [Problem.random(n, m, seed=s) for s in chosen]
    progress = Progress(len(METHODS))
    for method, make in METHODS.items():
        with progress.part(f"learning rate: {method}"):
            for lr in grid:
                runs = [
                    maximize(problem, partial(make, lr=lr), iterations, stop_below=1e-6, deviations=False)
                    for problem in problems
                ]
                reached = [count for run in runs if (count := run.first_below(1e-6)) is not None]
                median = statistics.median(reached) if len(reached) == seeds else math.nan
                point = {"lr": lr, "iterations": median, "reached": len(reached)}
                result.add_point(method, point | {"overflowed": sum(run.overflowed for run in runs)})
        result.table.append({"method": method, **usable_rates(result.series[method])})
    return result


def usable_rates(curve: dict[str, list[float]]) -> dict[str, float | None]:
    works = [(n, lr) for n, lr in zip(curve["iterations"], curve["lr"], strict=True) if math.isfinite(n)]
    bursts = [lr for lr, count in zip(curve["lr"], curve["overflowed"], strict=True) if count]
    fewest, best = min(works) if works else (None, None)
    return {
        "best lr": best,
        "fewest iterations": fewest,
        "least lr that works": min((lr for _, lr in works), default=None),
        "largest lr that works": max((lr for _, lr in works), default=None),
        "least lr that overflows": min(bursts, default=None),
    }


def plot_learning_rate(result: Result) -> "Figure":
    """Iterations against the rate; crosses above the line mark rates at which a method overflows."""
    figure, axes = new_figure(1, 1, 5.2)
    axis: Axes = axes
    ceiling = result.settings["iterations"]
    height = ceiling * 1.2
    rates = next(iter(result.series.values()))["lr"]
    for number, (method, curve) in enumerate(result.series.items()):
        size = 9 if method == "ProjectedStiefelSGD, μ = 0" else 5  # its only point coincides with another's
        look = STYLES[method] | {"marker": style.MARKERS[number], "ms": size}
        axis.loglog(curve["lr"], curve["iterations"], label=method, **look)
        burst = [lr for lr, count in zip(curve["lr"], curve["overflowed"], strict=True) if count]
        if burst:
            axis.loglog(burst, [height] * len(burst), "x", color=look["color"], ms=6)
            note = f"× {method}: overflows"
            axis.text(rates[0], height, note, fontsize=9, color=look["color"], va="center")
            height *= 1.2
    axis.axhline(ceiling, color=style.GREY, lw=0.8)
    axis.set_xlim(rates[0] / 1.3, rates[-1] * 1.3)
    note = f"a rate without a marker: not within {ceiling} iterations"
    axis.text(rates[0], 0.97 * ceiling, note, fontsize=9, color=style.GREY, va="top")
    axis.set(xlabel="learning rate", ylabel="iterations to an error of 1e-6, median of the seeds")
    axis.set_yticks([200, 400, 600, 1000], ["200", "400", "600", "1000"])
    axis.tick_params(axis="y", which="minor", labelleft=False)
    axis.set_title("Leading eigenvalues, n = {n}, m = {m}".format(**result.settings))
    legend_below(figure, axis, 3)
    return figure


# ---- figure 6: time per iteration ------------------------------------------------------------------------


def step_time(*, seed: int = 0, quick: bool = False) -> Result:
    """Median time of `optimizer.step()` alone against n and m: all methods in turn, round after round."""
    by_n = [(n, 10) for n in ((100, 300) if quick else (100, 300, 1000, 3000, 10000))]
    by_m = [(300 if quick else 1000, m) for m in ((4, 16) if quick else (4, 8, 16, 32, 64, 128, 256))]
    rounds = 3 if quick else 51
    result = Result("time", {"rounds": rounds, "seed": seed, "dtype": "float64"})
    progress = Progress(sum(n * m for n, m in by_n + by_m))
    for axis, sizes in (("n", by_n), ("m", by_m)):
        for n, m in sizes:
            with progress.part(f"time: n = {n}, m = {m}", n * m):
                medians = time_steps(n, m, rounds, seed)
            for method, milliseconds in medians.items():
                point = {"size": n if axis == "n" else m, "ms": milliseconds}
                result.add_point(f"{method} | {axis}", point)
            result.table.append({"n": n, "m": m, **{k: round(v, 4) for k, v in medians.items()}})
    return result


def time_steps(n: int, m: int, rounds: int, seed: int) -> dict[str, float]:
    """Median milliseconds of every method's `step` alone, in turn, as they maximise tr(XᵀDX) with D diagonal."""
    start = random_stiefel(n, m, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    # In the range of A's eigenvalues
    D = torch.linspace(-math.sqrt(2), math.sqrt(2), n, dtype=torch.float64).unsqueeze(1)
    parameters = {method: StiefelParameter(start.clone()) for method in METHODS}
    optimizers = {method: factory([parameters[method]]) for method, factory in METHODS.items()}
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for i in range(rounds + 2):
        for method, optimizer in optimizers.items():
            parameters[method].grad = -2 * D * parameters[method].detach()
            begin = time.perf_counter()
            optimizer.step()
            if i >= 2:  # the first two warm up
                times[method].append(1e3 * (time.perf_counter() - begin))
    return {method: statistics.median(values) for method, values in times.items()}


def plot_step_time(result: Result) -> "Figure":
    figure, axes = new_figure(1, 2, 4.2, sharey=True)
    for axis, name, title in zip(axes, ("n", "m"), ("m = 10", "n = 1000"), strict=True):
        for number, (method, look) in enumerate(STYLES.items()):
            curve = result.series[f"{method} | {name}"]
            axis.loglog(curve["size"], curve["ms"], label=method, **look, marker=style.MARKERS[number], ms=4)
        axis.set(xlabel=name, title=title)
    axes[0].set(ylabel="ms per step, gradient excluded")
    legend_below(figure, axes[0], 3)
    return figure


# ---- the command --------------------------------------------------------------------------------------------

FIGURES: dict[str, tuple[Callable[..., Result], Callable[[Result], "Figure"]]] = {
    "fig-convergence": (convergence, plot_convergence),
    "fig-metrics": (metrics, plot_metrics),
    "fig-manifold": (manifold, plot_manifold),
    "fig-retraction": (retraction, plot_retraction),
    "fig-learning-rate": (learning_rate, plot_learning_rate),
    "fig-time": (step_time, plot_step_time),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("eigenvalues", __doc__)
    parser.add_argument("figure", choices=[*FIGURES, "all"])
    options = parser.parse_args(arguments)
    for name in FIGURES if options.figure == "all" else [options.figure]:
        experiment, plot = FIGURES[name]
        run = partial(experiment, seed=options.seed, quick=options.quick)
        produce(name.removeprefix("fig-"), options, run, plot).print_table()


if __name__ == "__main__":
    sys.exit(run_command(main))
