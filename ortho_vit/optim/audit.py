"""Which parameter moves by which rule: a look at a model and its optimizers before they run for days."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from ortho_vit.optim.base import StiefelOptimizer, stiefel_lr
from ortho_vit.parameter import StiefelParameter, stiefel_parameters
from ortho_vit.stiefel import orthogonality_error


@dataclass(frozen=True)
class AuditRow:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    constrained: bool
    blocks: str  # such as "24 of 32×384", empty for a free parameter
    rule: str  # the optimizer that moves it, empty if none does
    lr: float | None  # of its blocks, or of itself
    error: float | None  # the largest |X Xᵀ − I|
    problem: str  # empty if there is none


@dataclass(frozen=True)
class Audit:
    """What `audit` found: `rows`, one per parameter; printed, a table."""

    rows: list[AuditRow]

    @property
    def problems(self) -> list[str]:
        return [f"{row.name}: {row.problem}" for row in self.rows if row.problem]

    @property
    def summary(self) -> str:
        """One line: how many parameters move by which rule."""
        constrained = sum(row.constrained for row in self.rows)
        rows = sorted(self.rows, key=lambda row: (not row.rule, not row.constrained))
        moved = Counter(
            f"by {row.rule}" if row.rule else "frozen" for row in rows if row.rule or not row.problem
        )
        counts = ", ".join(f"{count} {how}" for how, count in moved.items())
        problems = f"; {len(self.problems)} problems, such as {self.problems[0]}" if self.problems else ""
        return f"{len(self.rows)} parameters, {constrained} of them constrained: {counts or 'none moves'}{problems}"

    def __str__(self) -> str:
        cells = [("parameter", "shape", "blocks", "moves by", "lr", "|XXᵀ−I|", "")]
        for row in self.rows:
            lr = "" if row.lr is None else f"{row.lr:.3g}"
            error = "" if row.error is None else f"{row.error:.1e}"
            shape = "×".join(map(str, row.shape))
            cells.append((row.name, shape, row.blocks, row.rule or "–", lr, error, row.problem))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
        return "\n".join([*lines, self.summary])


def audit(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]) -> Audit:
    """A table of every parameter of a model: constrained or free, by which rule and rate it moves, and how exactly.

    It reports constrained parameters that no optimizer of `ortho_vit.optim` steps, parameters that two optimizers step, and
    parameters that do not move at all.

        print(audit(model, optimizer))
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    list(stiefel_parameters(model))  # raises where a constrained parameter is not the weight in use
    return Audit([_row(name, p, optimizers) for name, p in model.named_parameters()])


def _row(name: str, p: nn.Parameter, optimizers: list[Optimizer]) -> AuditRow:
    owners = list(_owners(p, optimizers))
    constrained = isinstance(p, StiefelParameter)
    blocks, error = "", None
    if isinstance(p, StiefelParameter):
        B, r, c = p.matrices().shape
        blocks, error = f"{B} of {r}×{c}", None if p.is_meta else orthogonality_error(p)
    owner, lr = owners[0] if owners else (None, None)
    return AuditRow(
        name=name,
        shape=tuple(p.shape),
        constrained=constrained,
        blocks=blocks,
        rule=_rule(owner, constrained) if owner is not None else "",
        lr=lr,
        error=error,
        problem=_problem(p, constrained, [o for o, _ in owners]),
    )


def _owners(p: Tensor, optimizers: list[Optimizer]) -> Iterator[tuple[Optimizer, float]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(p is q for q in group["params"]):
                constrained = isinstance(p, StiefelParameter) and isinstance(optimizer, StiefelOptimizer)
                yield optimizer, float(stiefel_lr(group, host=True) if constrained else group["lr"])


def _rule(optimizer: Optimizer, constrained: bool) -> str:
    name = type(optimizer).__name__
    if constrained or not isinstance(optimizer, StiefelOptimizer):
        return name
    return f"{name} (free)"


def _problem(p: nn.Parameter, constrained: bool, owners: list[Optimizer]) -> str:
    if not p.requires_grad:
        return "" if not owners else "frozen (requires_grad is False), though an optimizer has it"
    if not owners:
        return "no optimizer steps it"
    if len(owners) > 1:
        return f"{len(owners)} parameter groups step it"
    if constrained and not getattr(owners[0], "keeps_stiefel", False):
        return f"{type(owners[0]).__name__} ignores the constraint: use an optimizer of ortho_vit.optim"
    return ""
