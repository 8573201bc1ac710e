"""The learning rate of StiefelSGD, within heads and across them: test error on scikit-learn's digits by rate.

    python -m ortho_vit.experiments.rates [--quick] [--output DIR]

Two sweeps, each with both constraints: one rate for all parameters; and `stiefel_lr`, the rate of the constrained blocks
alone, while the free parameters keep `lr`.  Runs of one seed start from the same free weights and see the same batches.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ortho_vit.errors import DivergedError
from ortho_vit.experiments import figure as style
from ortho_vit.experiments.figure import legend_below, new_figure
from ortho_vit.experiments.finetuning import Task, accuracy, digits_task, fit, mean_and_deviation
from ortho_vit.experiments.result import Progress, Result, make_parser, markdown, produce, run_command
from ortho_vit.models import create_model
from ortho_vit.models.orthogonalize import Constraint
from ortho_vit.optim import StiefelSGD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LR, BATCH = 0.1, 64
FACTORS = tuple(4.0**k for k in range(-3, 4))  # of LR
CONSTRAINTS: tuple[Constraint, ...] = ("within", "across")
SWEEPS = ("one rate", "stiefel_lr")


def error_after(
    task: Task, constraint: Constraint, lr: float, stiefel_lr: float | None, *, steps: int, seed: int
) -> float:
    """The test error in percent after training; NaN where it diverged."""
    torch.manual_seed(seed)
    model = create_model("ortho_vit_digits", constraint=constraint)
    optimizer = StiefelSGD(model.parameters(), lr=lr, stiefel_lr=stiefel_lr, momentum=0.9, weight_decay=5e-5)
    images, labels = task.train
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(len(labels), (BATCH,), generator=generator) for _ in range(steps)]
    try:
        fit(model, optimizer, images, labels, batches)
    except DivergedError:  # a gradient that is not finite
        return math.nan
    return 100 * (1 - accuracy(model, *task.test))


def sweep(*, seed: int = 0, quick: bool = False) -> Result:
    """The error of every constraint, rate and seed, in both sweeps."""
    factors, seeds, steps = ((1.0, 4.0), 2, 2) if quick else (FACTORS, 3, 250)
    settings = {"model": "ortho_vit_digits", "lr": LR, "steps": steps, "batch": BATCH, "seeds": seeds}
    result, task = Result("rates", settings | {"seed": seed}), digits_task()
    progress = Progress(len(SWEEPS) * len(CONSTRAINTS) * len(factors))
    for kind in SWEEPS:
        for constraint in CONSTRAINTS:
            row = {"varied": kind, "constraint": constraint}
            for factor in factors:
                rate = factor * LR
                lr, stiefel_lr = (rate, None) if kind == "one rate" else (LR, rate)
                train = partial(error_after, task, constraint, lr, stiefel_lr, steps=steps)
                with progress.part(f"{kind}, {constraint}: {rate:.4g}"):
                    errors = {s: train(seed=s) for s in range(seed, seed + seeds)}
                for s, error in errors.items():
                    result.add_point(f"{kind}, {constraint}", {"rate": rate, "seed": s, "error": error})
                row[f"{rate:.4g}"] = show(list(errors.values()))
            result.table.append(row)
    return result


def show(errors: list[float]) -> str:
    """Mean and standard deviation over the seeds, or how many of them diverged."""
    diverged = sum(map(math.isnan, errors))
    return f"{diverged} of {len(errors)} diverged" if diverged else mean_and_deviation(errors)


def plot(result: Result) -> "Figure":
    """The mean over seeds as a line, every seed as a dot, one panel for each sweep."""
    figure, axes = new_figure(1, 2, 3.6, sharey=True)
    for axis, kind in zip(axes, SWEEPS, strict=True):
        for i, constraint in enumerate(CONSTRAINTS):
            label = f"{kind}, {constraint}"
            curve, by_rate = result.series[label], result.grouped([label], "rate", "error")
            means = {rate: statistics.mean(errors) for rate, errors in by_rate.items()}
            look = {"color": style.COLOURS[i], "marker": style.MARKERS[i]}
            axis.plot(list(means), list(means.values()), ms=5, label=constraint, **look)
            axis.plot(curve["rate"], curve["error"], ls="", ms=3, alpha=0.4, **look)
        axis.set(xscale="log", yscale="log")
    axes[0].set(xlabel="learning rate of all parameters", ylabel="test error, %", title="one rate")
    axes[1].set(xlabel="stiefel_lr", title=f"constrained blocks alone, lr = {result.settings['lr']:g}")
    legend_below(figure, axes[0], 2)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser("rates", __doc__).parse_args(arguments)
    run = partial(sweep, seed=options.seed, quick=options.quick)
    print(markdown(produce("rates", options, run, plot).table))


if __name__ == "__main__":
    sys.exit(run_command(main))
