"""What is compared: rows, the groups they form, and the paper's figures.

A row is a configuration of configs/paper/<data set> with a few more arguments.  Two questions share rows and code: the
paper's Table 1, and the contrasts, which ask what the constraint does beyond setting the size of W^Q and W^K.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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


ISOMETRIC = ("--model.optimizer.init_args.integrator", "isometric")


def _own() -> Iterable[Row]:
    for kind in ("sgd", "adam"):
        name = f"within_stiefel_{kind}"
        method = f"{METHODS[f'stiefel_{kind}']}, isometric"
        yield Row(f"{name}_isometric", method, "within", name, ISOMETRIC, reference=name)
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


def at_rate(row: str, factor: float) -> str:
    """The name of a row at `factor` times its learning rate."""
    return row if factor == 1 else f"{row}_rate_x{factor:g}"


def _at_rates(row: Row, rate: float, factors: Iterable[float]) -> Iterable[Row]:
    """The row at multiples of its learning rate, except 1."""
    for factor in factors:
        if factor != 1:
            arguments = (*row.arguments, "--model.optimizer.init_args.lr", f"{rate * factor:g}")
            name, method = at_rate(row.name, factor), f"{row.method}, lr × {factor:g}"
            yield replace(row, name=name, method=method, arguments=arguments, reference=row.name)


def _learning_rate() -> Iterable[Row]:
    for integrator, base in INTEGRATORS.items():
        arguments = ("--model.optimizer.init_args.integrator", integrator)
        row = Row(base, f"StiefelSGD, {integrator}", "within", "within_stiefel_sgd", arguments)
        yield from _at_rates(row, LEARNING_RATE, dict.fromkeys((*FACTORS, *LARGE_FACTORS)))


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


# The contrasts: the constrained row against each of three controls; plain SGD for reference.
CONSTRAINED = "within_stiefel_sgd_isometric"
CONTROLS = ("none_sgd_large_start", "none_sgd_held_norm", "none_sgd_qk_norm")
CONTRASTED = (CONSTRAINED, *CONTROLS, "none_sgd")
CONTRAST_FACTORS = (0.5, 1.0, 2.0)  # of a row's own learning rate
LARGE_FACTORS = (4.0, 8.0, 16.0, 32.0, 64.0)  # until nothing trains
CHOSEN = {  # factors chosen on the preset `few` and used for all presets; 1 for rows that are not listed
    CONSTRAINED: 2.0,
    "none_sgd_large_start": 0.5,
    "none_sgd_held_norm": 1.0,
    "none_sgd_qk_norm": 0.5,
    "none_sgd": 0.5,
}
FREE_RATE = 0.1  # SGD's
LARGE_START, HELD_NORM = (
    f"--trainer.callbacks+=ortho_vit.experiments.table1.controls.{name}"
    for name in ("LargeStart", "HeldNorm")
)


def chosen(row: str) -> str:
    """The name of the row at the learning rate that was chosen for it."""
    return at_rate(row, CHOSEN.get(row, 1.0))


def base_rate(row: str) -> float:
    return LEARNING_RATE if row == CONSTRAINED else FREE_RATE


def rate_of(row: str) -> float:
    """The learning rate that was chosen for a row."""
    return base_rate(row) * CHOSEN.get(row, 1.0)


def _contrasts() -> Iterable[Row]:
    free: dict[str, tuple[str, tuple[str, ...]]] = {
        "none_sgd": ("SGD", ()),
        "none_sgd_large_start": ("SGD, large start", (LARGE_START,)),
        "none_sgd_held_norm": ("SGD, norm held", (HELD_NORM,)),
        "none_sgd_qk_norm": ("SGD, qk_norm", ("--model.model_kwargs", '{"qk_norm": true}')),
    }
    for name, (method, arguments) in free.items():
        row = Row(name, method, "none", "none_sgd", arguments, None if name == "none_sgd" else "none_sgd")
        yield row
        yield from _at_rates(row, FREE_RATE, (*CONTRAST_FACTORS, *LARGE_FACTORS))


def _exploratory() -> Iterable[Row]:
    """One seed each; besides these, rows of other groups."""
    for kind in ("adam", "adamw"):
        name, method = f"none_{kind}", f"{METHODS[kind]}, large start"
        yield Row(f"{name}_large_start", method, "none", name, (LARGE_START,), name)
    across = "across_stiefel_sgd"
    yield Row(f"{across}_isometric", "StiefelSGD, isometric", "across", across, ISOMETRIC, CONSTRAINED)
    base = "within_stiefel_sgd"
    frozen = (*ISOMETRIC, "--model.optimizer.init_args.stiefel_lr", "0")
    yield Row(f"{CONSTRAINED}_frozen", "SGD, Q and K frozen", "within", base, frozen, CONSTRAINED)
    values = (*ISOMETRIC, "--model.model_kwargs", '{"projections": "qkv"}')
    yield Row(f"{CONSTRAINED}_qkv", "StiefelSGD on QKV, isometric", "within", base, values, CONSTRAINED)
    scaled = (*ISOMETRIC, "--model.scale", "true")
    yield Row(f"{CONSTRAINED}_scale", "StiefelSGD, a scale per head", "within", base, scaled, CONSTRAINED)
    for heads in (2, 3):
        shared = (*ISOMETRIC, "--model.constraint", str(heads))
        method, what = "StiefelSGD, isometric", f"{heads} heads per block"
        yield Row(f"{CONSTRAINED}_{heads}_heads", method, what, base, shared, CONSTRAINED)
    optimizer = "--model.optimizer"
    muon = (
        *(optimizer, "ortho_vit.optim.StiefelMuon", f"{optimizer}.init_args.lr", "0.001"),
        *(f"{optimizer}.init_args.weight_decay", "0.2"),  # as AdamW's
    )
    yield Row("none_muon", "Muon", "none", "none_adamw", muon, "none_adamw")
    yield Row("within_stiefel_muon", "StiefelMuon", "within", "within_stiefel_adam", muon, "none_muon")


_MADE = (_table(), _own(), _learning_rate(), _two_rates(), _projections(), _contrasts(), _exploratory())
ROWS = {row.name: row for rows in _MADE for row in rows}
GROUPS = {
    "table": tuple(PAPER),
    "own": tuple(row.name for row in _own()),
    "learning-rate": tuple(at_rate(base, factor) for base in INTEGRATORS.values() for factor in FACTORS),
    "two-rates": tuple(row.name for row in _two_rates()),
    "projections": tuple(PROJECTIONS.values()),
    "contrasts": tuple(chosen(name) for name in CONTRASTED),
    "rates": tuple(at_rate(name, factor) for name in CONTRASTED for factor in CONTRAST_FACTORS),
    "largest-rate": tuple(
        at_rate(name, factor) for name in CONTRASTED for factor in (*CONTRAST_FACTORS[1:], *LARGE_FACTORS)
    ),
    "exploratory": (
        *("none_adam", "none_adamw", "within_stiefel_adam_isometric"),
        *(row.name for row in _exploratory()),
    ),
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
            hint = did_you_mean(pattern, ROWS) or f"; there are {', '.join(PAPER)}, ..."
            raise UsageError(f"no row matches {pattern!r}{hint}")
