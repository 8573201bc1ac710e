"""The learning rate of StiefelSGD, within heads and across them: test error on scikit-learn's digits by rate.

    python -m ortho_vit.experiments.rates [--quick] [--output DIR]

Two sweeps, each with both constraints: one rate for all parameters; and `stiefel_lr`, the rate of the constrained blocks
alone, while the free parameters keep `lr`.  Runs of one seed start from the same free weights and see the same batches.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

from ortho_vit.errors import DivergedError
from ortho_vit.experiments import figure as style
from ortho_vit.experiments.figure import legend_below, new_figure
from ortho_vit.experiments.finetuning import Task, digits_task, markdown
from ortho_vit.experiments.result import Progress, Result, add_common_options, parse, produce, run_command
from ortho_vit.models import create_model
from ortho_vit.models.orthogonalize import Constraint
from ortho_vit.optim import StiefelSGD
from ortho_vit.training.schedule import warmup_cosine

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
    schedule = LambdaLR(optimizer, partial(warmup_cosine, warmup=steps // 10, total=steps))
    batches = torch.Generator().manual_seed(seed)
    images, labels = task.train
    for _ in range(steps):
        batch = torch.randint(len(labels), (BATCH,), generator=batches)
        loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        try:
            optimizer.step()
        except DivergedError:  # a gradient that is not finite
            return math.nan
        schedule.step()
    images, labels = task.test
    with torch.no_grad():
        return 100 * (model.eval()(images).argmax(1) != labels).double().mean().item()


def sweep(*, seed: int = 0, quick: bool = False) -> Result:
    """The error of every constraint, rate and seed, in both sweeps."""
    factors, seeds, steps = ((1.0, 4.0), 2, 2) if quick else (FACTORS, 3, 250)
    settings = {
        "model": "ortho_vit_digits",
        "lr": LR,
        "steps": steps,
        "batch": BATCH,
        "seeds": seeds,
        "seed": seed,
    }
    result, task = Result("rates", settings), digits_task()
    progress = Progress(len(SWEEPS) * len(CONSTRAINTS) * len(factors))
    for kind in SWEEPS:
        for constraint in CONSTRAINTS:
            curve: dict[str, list[float]] = {"rate": [], "seed": [], "error": []}
            row = {"varied": kind, "constraint": constraint}
            for factor in factors:
                rate = factor * LR
                lr, stiefel_lr = (rate, None) if kind == "one rate" else (LR, rate)
                with progress.part(f"{kind}, {constraint}: {rate:.4g}"):
                    errors = [
                        error_after(task, constraint, lr, stiefel_lr, steps=steps, seed=s)
                        for s in range(seed, seed + seeds)
                    ]
                for s, error in enumerate(errors, seed):
                    for column, value in zip(curve, (rate, s, error), strict=True):
                        curve[column].append(float(value))
                row[f"{rate:.4g}"] = show(errors)
            result.series[f"{kind}, {constraint}"] = curve
            result.table.append(row)
    return result


def show(errors: list[float]) -> str:
    """Mean and standard deviation over the seeds, or how many of them diverged."""
    diverged = sum(map(math.isnan, errors))
    if diverged:
        return f"{diverged} of {len(errors)} diverged"
    return f"{statistics.mean(errors):.1f} ± {statistics.stdev(errors):.1f}"


def plot(result: Result) -> "Figure":
    """The mean over seeds as a line, every seed as a dot, one panel for each sweep."""
    figure, axes = new_figure(1, 2, 3.6, sharey=True)
    for axis, kind in zip(axes, SWEEPS, strict=True):
        for i, constraint in enumerate(CONSTRAINTS):
            curve = result.series[f"{kind}, {constraint}"]
            rates = sorted(set(curve["rate"]))
            by_rate = [
                [e for r, e in zip(curve["rate"], curve["error"], strict=True) if r == rate] for rate in rates
            ]
            colour, marker = style.COLOURS[i], style.MARKERS[i]
            axis.plot(
                rates,
                [statistics.mean(e) for e in by_rate],
                color=colour,
                marker=marker,
                ms=5,
                label=constraint,
            )
            axis.plot(curve["rate"], curve["error"], ls="", color=colour, marker=marker, ms=3, alpha=0.4)
        axis.set(xscale="log", yscale="log")
    axes[0].set(xlabel="learning rate of all parameters", ylabel="test error, %", title="one rate")
    axes[1].set(xlabel="stiefel_lr", title=f"constrained blocks alone, lr = {result.settings['lr']:g}")
    legend_below(figure, axes[0], 2)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ortho_vit.experiments.rates", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_common_options(parser)
    options = parse(parser, arguments)
    run = partial(sweep, seed=options.seed, quick=options.quick)
    print(markdown(produce("rates", options, run, plot).table))


if __name__ == "__main__":
    sys.exit(run_command(main))
