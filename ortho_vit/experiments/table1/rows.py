"""What is compared: rows, the groups they form, and the paper's figures.

A row is a configuration of configs/paper/<data set> with a few more arguments.  Two questions share rows and code: the
paper's Table 1, and the contrasts, which ask what the constraint does beyond setting the size of W^Q and W^K.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ortho_vit.errors import UsageError, did_you_mean
from ortho_vit.experiments.table1.presets import Preset

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
LEARNING_RATE, FREE_RATE = 0.15, 0.1  # StiefelSGD's, SGD's
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
INTEGRATORS = {"paper": "within_stiefel_sgd", "isometric": "within_stiefel_sgd_isometric"}

# The contrasts: the constrained row against each of three controls; plain SGD for reference.
CONSTRAINED = "within_stiefel_sgd_isometric"
CONTROLS = ("none_sgd_large_start", "none_sgd_held_norm", "none_sgd_qk_norm")
CONTRASTED = (CONSTRAINED, *CONTROLS, "none_sgd")
CONTRAST_FACTORS = (0.25, 0.5, 1.0, 2.0)  # of a row's own learning rate
LARGE_FACTORS = (4.0, 8.0, 16.0, 32.0, 64.0)  # until nothing trains
HIGH_FACTORS = (1.0, 2.0, *LARGE_FACTORS)
# The factors with the smallest error on held-out images, in the order of `CONTRASTED`, by the preset they were chosen on.
# `paper` has the paper's own rates; on `few` a quarter was tried after these had been chosen.
CHOSEN = {
    preset: dict(zip(CONTRASTED, factors, strict=True))
    for preset, factors in {
        "paper": (1.0, 1.0, 1.0, 1.0, 1.0),
        "few": (2.0, 0.5, 1.0, 0.5, 0.5),
        "augmented": (0.5, 0.5, 0.5, 0.5, 1.0),
        "brief": (2.0, 2.0, 1.0, 2.0, 2.0),
    }.items()
}


def at_rate(row: str, factor: float) -> str:
    """The name of a row at `factor` times its learning rate."""
    return row if factor == 1 else f"{row}_rate_x{factor:g}"


def chosen(row: str, preset: Preset) -> str:
    """The name of a contrasted row at the learning rate that was chosen for it."""
    return at_rate(row, CHOSEN[preset.rates][row])


def base_rate(row: str) -> float:
    return LEARNING_RATE if row == CONSTRAINED else FREE_RATE


def rate_of(row: str, preset: Preset) -> float:
    """The learning rate that was chosen for a contrasted row."""
    return base_rate(row) * CHOSEN[preset.rates][row]


# ----------------------------------------------------------------------------------------------------------- the rows

LR, STIEFEL_LR, INTEGRATOR = (
    f"--model.optimizer.init_args.{name}" for name in ("lr", "stiefel_lr", "integrator")
)
KWARGS = "--model.model_kwargs"
ISOMETRIC = (INTEGRATOR, "isometric")
NO_PENALTY = ("--model.optimizer.init_args.penalty", "0")
LARGE_START, HELD_NORM = (
    (f"--trainer.callbacks+=ortho_vit.experiments.table1.controls.{name}",)
    for name in ("LargeStart", "HeldNorm")
)


def paper_row(name: str) -> Row:
    constraint, _, optimizer = name.partition("_")
    family = "none_sgd" if name.endswith("sgd") else "none_adam"
    return Row(name, METHODS[optimizer], constraint, name, reference=None if name == family else family)


def vary(base: Row, suffix: str, method: str, arguments: tuple[str, ...], **changes: Any) -> Row:
    """A row with more arguments than another, against which it is tested."""
    about = {"name": f"{base.name}_{suffix}", "method": method, "reference": base.name}
    return replace(base, arguments=base.arguments + arguments, **(about | changes))


def at_rates(row: Row, rate: float, factors: Iterable[float]) -> list[Row]:
    """The row at multiples of its learning rate, except 1."""
    return [
        vary(row, f"rate_x{factor:g}", f"{row.method}, lr × {factor:g}", (LR, f"{rate * factor:g}"))
        for factor in factors
        if factor != 1
    ]


TABLE = {name: paper_row(name) for name in PAPER}
SGD, STIEFEL_SGD = TABLE["none_sgd"], TABLE["within_stiefel_sgd"]
WITHIN = vary(STIEFEL_SGD, "isometric", "StiefelSGD, isometric", ISOMETRIC)
PROJECTED = TABLE["within_projected_stiefel_sgd"]
OWN = (
    WITHIN,
    vary(TABLE["within_stiefel_adam"], "isometric", "StiefelAdam, isometric", ISOMETRIC),
    vary(PROJECTED, "one_rate", "ProjectedStiefelSGD, one rate", (STIEFEL_LR, "0.1")),
    vary(SGD, "same_rate", "SGD, lr of StiefelSGD", (LR, "0.15")),
    # begins on the manifold; nothing keeps it there
    vary(SGD, "orthonormal_start", "SGD, orthonormal start", NO_PENALTY, config="within_regularized_sgd"),
)
RATES = tuple(
    row
    for integrator, name in INTEGRATORS.items()
    for row in at_rates(
        Row(name, f"StiefelSGD, {integrator}", "within", "within_stiefel_sgd", (INTEGRATOR, integrator)),
        LEARNING_RATE,
        dict.fromkeys(CONTRAST_FACTORS + FACTORS + LARGE_FACTORS),
    )
)
TWO_RATES = (
    vary(STIEFEL_SGD, "stiefel_rate_x0.25", "StiefelSGD, constrained lr × 0.25", (STIEFEL_LR, "0.0375")),
    vary(STIEFEL_SGD, "stiefel_rate_x4", "StiefelSGD, constrained lr × 4", (STIEFEL_LR, "0.6")),
)
PROJECTIONS = (
    vary(STIEFEL_SGD, "q", "StiefelSGD on Q", (KWARGS, '{"projections": "q"}')),
    STIEFEL_SGD,
    vary(STIEFEL_SGD, "qkv", "StiefelSGD on QKV", (KWARGS, '{"projections": "qkv"}')),
    vary(STIEFEL_SGD, "qk_mlp", "StiefelSGD on QK+MLP", (KWARGS, '{"projections": "qk+mlp"}')),
)
FREE = (
    SGD,
    vary(SGD, "large_start", "SGD, large start", LARGE_START),
    vary(SGD, "held_norm", "SGD, norm held", HELD_NORM),
    vary(SGD, "qk_norm", "SGD, qk_norm", (KWARGS, '{"qk_norm": true}')),
)
CONTRASTS = tuple(
    each for row in FREE for each in (row, *at_rates(row, FREE_RATE, CONTRAST_FACTORS + LARGE_FACTORS))
)
MUON = (
    "--model.optimizer", "ortho_vit.optim.StiefelMuon", LR, "0.001",
    "--model.optimizer.init_args.weight_decay", "0.2",  # as AdamW's
)  # fmt: skip
EXPLORATORY = (
    vary(TABLE["none_adam"], "large_start", "Adam, large start", LARGE_START),
    vary(TABLE["none_adamw"], "large_start", "AdamW, large start", LARGE_START),
    vary(TABLE["across_stiefel_sgd"], "isometric", "StiefelSGD, isometric", ISOMETRIC, reference=CONSTRAINED),
    vary(WITHIN, "frozen", "SGD, Q and K frozen", (STIEFEL_LR, "0")),
    vary(WITHIN, "qkv", "StiefelSGD on QKV, isometric", (KWARGS, '{"projections": "qkv"}')),
    vary(WITHIN, "scale", "StiefelSGD, a scale per head", ("--model.scale", "true")),
    vary(WITHIN, "2_heads", WITHIN.method, ("--model.constraint", "2"), constraint="2 heads per block"),
    vary(WITHIN, "3_heads", WITHIN.method, ("--model.constraint", "3"), constraint="3 heads per block"),
    Row("none_muon", "Muon", "none", "none_adamw", MUON, "none_adamw"),
    Row("within_stiefel_muon", "StiefelMuon", "within", "within_stiefel_adam", MUON, "none_muon"),
)
_ALL = (*TABLE.values(), *OWN, *RATES, *TWO_RATES, *PROJECTIONS, *CONTRASTS, *EXPLORATORY)
ROWS = {row.name: row for row in _ALL}


def names(rows: Iterable[Row]) -> tuple[str, ...]:
    return tuple(row.name for row in rows)


GROUPS = {
    "table": tuple(PAPER),
    "own": (*names(OWN), *CONTROLS),
    "learning-rate": tuple(at_rate(base, factor) for base in INTEGRATORS.values() for factor in FACTORS),
    "two-rates": names(TWO_RATES),
    "projections": names(PROJECTIONS),
    "contrasts": CONTRASTED,  # each at the rate that was chosen for the preset
    "rates": tuple(at_rate(name, factor) for name in CONTRASTED for factor in CONTRAST_FACTORS),
    "largest-rate": tuple(at_rate(name, factor) for name in CONTRASTED for factor in HIGH_FACTORS),
    "exploratory": ("none_adam", "none_adamw", "within_stiefel_adam_isometric", *names(EXPLORATORY)),
}
ONE_SEED = ("learning-rate", "two-rates", "projections", "rates", "largest-rate", "exploratory")


def choose(
    preset: Preset, groups: Sequence[str], patterns: Sequence[str], seeds: Sequence[int]
) -> list[tuple[Row, int]]:
    """The runs of the groups (of all groups if only patterns are given): one seed of every row, then the next seed."""
    chosen: dict[tuple[int, str], None] = {}
    for group, names in select(preset, groups, patterns).items():
        for seed in seeds[:1] if group in ONE_SEED else seeds:
            chosen |= {(seeds.index(seed), name): None for name in names}
    ordered = sorted(chosen, key=lambda key: (key[0], list(ROWS).index(key[1])))
    return [(ROWS[name], seeds[index]) for index, name in ordered]


def select(preset: Preset, groups: Sequence[str], patterns: Sequence[str]) -> dict[str, list[str]]:
    """The names of the rows in the groups that match a pattern, by group; "all" means the preset's groups."""
    groups = groups or (tuple(GROUPS) if patterns else preset.groups[:1])
    if "all" in groups:
        groups = preset.groups
    for pattern in patterns:
        if not fnmatch.filter(ROWS, pattern):
            hint = did_you_mean(pattern, ROWS) or f"; there are {', '.join(PAPER)}, ..."
            raise UsageError(f"no row matches {pattern!r}{hint}")
    members = GROUPS | {"contrasts": tuple(chosen(name, preset) for name in CONTRASTED)}
    selected = {
        group: [n for n in members[group] if not patterns or any(fnmatch.fnmatchcase(n, p) for p in patterns)]
        for group in groups
    }
    if not any(selected.values()):
        raise UsageError(
            f"no row of {', '.join(groups)} matches {' '.join(patterns)}; leave out one of the two"
        )
    return selected
