"""What is compared: rows, the groups they form, the paper's figures, and two sizes of the experiment.

A row is a configuration of configs/paper/<data set> and a few arguments on top.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ortho_vit.errors import UsageError

DATA = ("CIFAR10", "CIFAR100")


@dataclass(frozen=True)
class Row:
    name: str
    method: str
    constraint: str
    config: str  # a file of configs/paper/<data set>, without .yaml
    arguments: tuple[str, ...] = ()
    reference: str | None = None  # the row that this one is tested against

    @property
    def label(self) -> str:
        return f"{self.method}, {self.constraint}"


# Test error in %, mean and standard deviation of 5 runs: CIFAR-10, CIFAR-100.
PAPER = {
    "across_stiefel_sgd": ((8.85, 0.35), (31.51, 0.39)),
    "across_projected_stiefel_sgd": ((9.65, 0.23), (32.14, 0.48)),
    "across_regularized_sgd": ((9.58, 0.21), (32.77, 0.23)),
    "across_stiefel_adam": ((8.81, 0.22), (32.48, 0.24)),
    "across_projected_stiefel_adam": ((11.58, 0.24), (33.98, 0.12)),
    "across_regularized_adam": ((11.09, 0.26), (33.90, 0.24)),
    "within_stiefel_sgd": ((8.32, 0.39), (30.20, 0.55)),
    "within_projected_stiefel_sgd": ((8.90, 0.18), (31.71, 0.26)),
    "within_regularized_sgd": ((9.78, 0.14), (33.08, 0.42)),
    "within_momentumless_stiefel_sgd": ((12.90, 0.22), (34.84, 0.24)),
    "within_stiefel_adam": ((8.46, 0.20), (31.04, 0.35)),
    "within_projected_stiefel_adam": ((10.77, 0.30), (33.73, 0.54)),
    "within_regularized_adam": ((11.53, 0.28), (34.72, 0.67)),
    "none_sgd": ((9.75, 0.37), (32.61, 0.30)),
    "none_adam": ((9.52, 0.32), (33.15, 0.50)),
    "none_adamw": ((9.05, 0.43), (33.11, 0.47)),
}
METHODS = {
    "stiefel_sgd": "StiefelSGD",
    "projected_stiefel_sgd": "ProjectedStiefelSGD",
    "regularized_sgd": "RegularizedSGD",
    "momentumless_stiefel_sgd": "MomentumlessStiefelSGD",
    "stiefel_adam": "StiefelAdam",
    "projected_stiefel_adam": "ProjectedStiefelAdam",
    "regularized_adam": "RegularizedAdam",
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
}
LEARNING_RATE = 0.15  # StiefelSGD's
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
INTEGRATORS = {"paper": "within_stiefel_sgd", "isometric": "within_stiefel_sgd_isometric"}
SHARES = (0.25, 4.0)  # of the learning rate for the constrained blocks alone
PROJECTIONS = {
    "q": "within_stiefel_sgd_q",
    "qk": "within_stiefel_sgd",
    "qkv": "within_stiefel_sgd_qkv",
    "qk+mlp": "within_stiefel_sgd_qk_mlp",
}


def _table() -> Iterable[Row]:
    for name in PAPER:
        constraint, _, optimizer = name.partition("_")
        family = "none_sgd" if name.endswith("sgd") else "none_adam"
        yield Row(name, METHODS[optimizer], constraint, name, reference=None if name == family else family)


def _own() -> Iterable[Row]:
    isometric = ("--model.optimizer.init_args.integrator", "isometric")
    for kind in ("sgd", "adam"):
        name = f"within_stiefel_{kind}"
        method = f"{METHODS[f'stiefel_{kind}']}, isometric"
        yield Row(f"{name}_isometric", method, "within", name, isometric, reference=name)
    name = "within_projected_stiefel_sgd"
    one_rate = ("--model.optimizer.init_args.stiefel_lr", "0.1")
    yield Row(f"{name}_one_rate", "ProjectedStiefelSGD, one rate", "within", name, one_rate, reference=name)
    as_stiefel = ("--model.optimizer.init_args.lr", f"{LEARNING_RATE:g}")
    yield Row(
        "none_sgd_same_rate", "SGD, lr of StiefelSGD", "none", "none_sgd", as_stiefel, reference="none_sgd"
    )
    start = "none_sgd_orthonormal_start"  # weights that begin on the manifold, and nothing to keep them there
    no_penalty = ("--model.optimizer.init_args.penalty", "0")
    yield Row(
        start, "SGD, orthonormal start", "none", "within_regularized_sgd", no_penalty, reference="none_sgd"
    )


def rate_row(integrator: str, factor: float) -> str:
    """The name of the row at `factor` times the paper's learning rate."""
    base = INTEGRATORS[integrator]
    return base if factor == 1 else f"{base}_rate_x{factor:g}"


def _learning_rate() -> Iterable[Row]:
    for integrator, base in INTEGRATORS.items():
        for factor in FACTORS:
            if factor == 1:
                continue
            arguments = (
                "--model.optimizer.init_args.integrator", integrator,
                "--model.optimizer.init_args.lr", f"{LEARNING_RATE * factor:g}",
            )  # fmt: skip
            method = f"StiefelSGD, {integrator}, lr × {factor:g}"
            yield Row(rate_row(integrator, factor), method, "within", "within_stiefel_sgd", arguments, base)


def _two_rates() -> Iterable[Row]:
    base = "within_stiefel_sgd"
    for share in SHARES:
        arguments = ("--model.optimizer.init_args.stiefel_lr", f"{LEARNING_RATE * share:g}")
        method = f"StiefelSGD, constrained lr × {share:g}"
        yield Row(f"{base}_stiefel_rate_x{share:g}", method, "within", base, arguments, base)


def _projections() -> Iterable[Row]:
    base = "within_stiefel_sgd"
    for parts, name in PROJECTIONS.items():
        if name != base:
            kwargs = ("--model.model_kwargs", f'{{"projections": "{parts}"}}')
            yield Row(name, f"StiefelSGD on {parts.upper()}", "within", base, kwargs, base)


_MADE = (_table(), _own(), _learning_rate(), _two_rates(), _projections())
ROWS = {row.name: row for rows in _MADE for row in rows}
GROUPS = {
    "table": tuple(PAPER),
    "own": tuple(row.name for row in _own()),
    "learning-rate": tuple(rate_row(integrator, factor) for integrator in INTEGRATORS for factor in FACTORS),
    "two-rates": tuple(row.name for row in _two_rates()),
    "projections": tuple(PROJECTIONS.values()),
}
ONE_SEED = ("learning-rate", "two-rates", "projections")


@dataclass(frozen=True)
class Preset:
    seeds: int
    arguments: tuple[str, ...]


# The shared ones: a folder without versions, no event files, no pictures; the recorder keeps what is needed.
SHARED = (
    "--trainer.devices", "1",
    "--trainer.logger", "false",
    "--trainer.callbacks+=ortho_vit.training.recorder.Recorder",
    "--images.every_n_epochs", "0",
    "--test_after_fit", "true",
)  # fmt: skip
PRESETS = {
    "paper": Preset(5, SHARED),
    "reduced": Preset(
        3,
        (
            *SHARED,
            "--trainer.accelerator", "cpu",
            "--trainer.max_epochs", "10",
            "--model.name", "ortho_vit_pico",
            "--model.warmup_epochs", "1",
            "--model.compile", "true",
            "--data.autoaugment", "false",
            "--data.num_workers", "0",
            "--checkpoints.every_n_steps", "100",
        ),
    ),
}  # fmt: skip


def choose(groups: Sequence[str], patterns: Sequence[str], seeds: Sequence[int]) -> list[tuple[Row, int]]:
    """The runs of some groups, or of all where only patterns are given: one seed of every row, then the next."""
    chosen: dict[tuple[int, str], None] = {}
    for group, names in select(groups, patterns).items():
        for seed in seeds[:1] if group in ONE_SEED else seeds:
            chosen |= {(seeds.index(seed), name): None for name in names}
    ordered = sorted(chosen, key=lambda key: (key[0], list(ROWS).index(key[1])))
    return [(ROWS[name], seeds[index]) for index, name in ordered]


def select(groups: Sequence[str], patterns: Sequence[str]) -> dict[str, list[str]]:
    """The names of the rows that groups and patterns leave, by group."""
    groups = groups or (("all",) if patterns else ("table",))
    if "all" in groups:
        groups = tuple(GROUPS)
    _check_patterns(patterns)
    selected = {
        group: [n for n in GROUPS[group] if not patterns or any(fnmatch.fnmatchcase(n, p) for p in patterns)]
        for group in groups
    }
    if not any(selected.values()):
        raise UsageError(
            f"no row of {', '.join(groups)} matches {' '.join(patterns)}; leave out one of the two"
        )
    return selected


def _check_patterns(patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if not fnmatch.filter(ROWS, pattern):
            close = difflib.get_close_matches(pattern, ROWS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(PAPER)}, ..."
            raise UsageError(f"no row matches {pattern!r}; {hint}")
