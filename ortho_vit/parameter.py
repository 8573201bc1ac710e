"""A parameter that knows which of its rows are orthonormal.

The constraint lives on the parameter, not in a module: any module may own a `StiefelParameter`, and every optimizer in
`ortho_vit.optim` recognises it.  To everything else it is an ordinary `nn.Parameter`, and in a state dict a plain tensor.
"""

import copy
import math
import operator
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing import reduction
from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ortho_vit.stiefel import orthogonality_error, polar, random_stiefel, require_effective

__all__ = ["StiefelParameter", "constrain", "orthogonality_error", "project_", "stiefel_parameters"]

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


class StiefelParameter(nn.Parameter):
    """A parameter whose first `rows` rows (default: all) are `blocks` equal blocks, each orthonormal along its shorter side.

        StiefelParameter(data, *, blocks=1, rows=None, requires_grad=True)

    Rows are orthonormal where a block is wide, columns where it is tall: the convention of `nn.init.orthogonal_`.  The
    rows after the first `rows` are free.  With more than two dimensions the leading ones are a batch of matrices.

        StiefelParameter(random_stiefel(32, 384))                  # one frame of 32 rows
        StiefelParameter(qkv, blocks=2 * heads, rows=2 * d_model)  # a fused (3d, d) attention weight: W^Q, W^K by heads

    The values are taken as they are; `constrain` and the optimizers put them on the manifold.  Type and blocks survive
    deepcopy, pickle, spawned processes, `Module.to`, `load_state_dict`, EMA copies, `torch.compile` and `torch.export`.
    torch itself makes plain parameters in two places: `load_state_dict(assign=True)`, and `Module.to_empty` or
    `.to("meta")`.  After those, `constrain(module, name, blocks=..., rows=..., init="keep")` restores it.
    `nn.Parameter(p)` raises torch's error about `detach()`, which no subclass can replace: `nn.Parameter(p.detach())` is a
    free parameter on the same memory, `copy.deepcopy(p)` a constrained one on its own.
    """

    blocks: int
    rows: int

    def __new__(
        cls, data: Tensor, *, blocks: int = 1, rows: int | None = None, requires_grad: bool = True
    ) -> "StiefelParameter":
        blocks, rows = check_blocks(data, blocks, rows)
        _watch_optimizers()
        self = torch.Tensor._make_subclass(cls, laid_out(data.detach(), blocks, rows), requires_grad)
        self.blocks, self.rows = blocks, rows
        return self

    def matrices(self) -> Tensor:
        """A writable view (B, r, c) of the constrained blocks."""
        self.restore_layout()
        return cut_blocks(self.detach(), self.blocks, self.rows)

    def free(self) -> Tensor | None:
        """A writable view (..., free rows, c) of the rows after the constrained ones, or None."""
        return cut_free(self.detach(), self.rows)

    def restore_layout(self) -> None:
        """Undo `Module.to(memory_format=...)` on a batch of matrices: blocks would no longer be views of it."""
        if self.ndim > 3 and not self.is_contiguous():
            self.data = laid_out(self.data, self.blocks, self.rows)

    def _refuse_sharding(self, *_: Any) -> NoReturn:
        """Raise an error where FSDP takes the parameter: it has no hook to refuse one, and would drop the constraint."""
        raise TypeError(
            f"a StiefelParameter of shape {tuple(self.shape)} cannot be sharded: FSDP would cut its blocks apart and drop "
            "the constraint; use DistributedDataParallel, with shard_stiefel=True in the optimizer"
        )

    _fsdp_orig_uid = property(None, _refuse_sharding)  # fully_shard writes this on what it takes
    _fsdp_flattened = property(_refuse_sharding, _refuse_sharding)  # FullyShardedDataParallel reads this

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StiefelParameter(blocks={self.blocks}, rows={self.rows}) containing:\n{self.data!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "StiefelParameter":
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = _rebuild(data, copy.deepcopy(self.__dict__, memo), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _rebuild, (self.data, dict(self.__dict__), self.requires_grad)


def _rebuild(data: Tensor, attributes: dict[str, Any], requires_grad: bool) -> StiefelParameter:
    parameter = torch.Tensor._make_subclass(StiefelParameter, data, requires_grad)
    parameter.__dict__.update(attributes)
    return parameter


def _reduce(parameter: StiefelParameter):
    return parameter.__reduce_ex__(2)


# torch.load(weights_only=True) of a saved parameter
torch.serialization.add_safe_globals([_rebuild, StiefelParameter])
# torch.multiprocessing: a spawned copy keeps its type and shares memory
reduction.register(StiefelParameter, _reduce)


def check_blocks(data: Tensor, blocks: int, rows: int | None) -> tuple[int, int]:
    """The number of blocks and of constrained rows, if `data` can be cut that way."""
    if not isinstance(data, Tensor):
        raise TypeError(f"StiefelParameter: needs a tensor, got {type(data).__name__}; use torch.tensor")
    what = f"StiefelParameter of shape {tuple(data.shape)}"
    if data.ndim < 2 or data.numel() == 0:
        raise ValueError(f"{what}: needs at least two dimensions, none of them empty")
    if not data.is_floating_point():
        raise ValueError(f"{what}: needs a real floating-point dtype, got {data.dtype}")
    rows = data.shape[-2] if rows is None else rows
    try:
        blocks, rows = operator.index(blocks), operator.index(rows)
    except TypeError:
        raise TypeError(f"{what}: rows and blocks must be integers, got {rows} and {blocks}") from None
    if not 1 <= rows <= data.shape[-2]:
        raise ValueError(f"{what}: rows must be in [1, {data.shape[-2]}], got {rows}")
    if blocks < 1 or rows % blocks:
        raise ValueError(f"{what}: blocks must divide the {rows} constrained rows, got {blocks}")
    if blocks > 1 and rows < data.shape[-2] and math.prod(data.shape[:-2]) > 1:
        raise ValueError(f"{what}: a batch of matrices cannot have both free rows and several blocks")
    return blocks, rows


def laid_out(data: Tensor, blocks: int, rows: int) -> Tensor:
    """`data` itself if its blocks are a view (B, r, c) of it, else (a permuted batch) a contiguous copy."""
    flat = cut_blocks(data, blocks, rows)
    same = flat.is_meta or flat.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
    return data if same else data.contiguous()


def cut_blocks(x: Tensor, blocks: int, rows: int) -> Tensor:
    """The first `rows` rows of x (..., R, c) as blocks (B, r, c): a view, except of a batch with gaps between matrices."""
    return x.narrow(-2, 0, rows).unflatten(-2, (blocks, rows // blocks)).flatten(0, -3)


def cut_free(x: Tensor, rows: int) -> Tensor | None:
    """A view (..., R − rows, c) of the rows of x (..., R, c) after the first `rows`, or None where there are none."""
    count = x.shape[-2] - rows
    return x.narrow(-2, rows, count) if count else None


def constrain(
    module: nn.Module,
    name: str = "weight",
    *,
    blocks: int = 1,
    rows: int | None = None,
    init: Literal["polar", "random", "keep"] = "polar",
) -> nn.Module:
    """Make `module.<name>` a `StiefelParameter`, and return the module.

    `init` is "polar" (the nearest orthonormal blocks), "random" (uniform ones) or "keep" (the values as they are).  The
    parameter stays the same object, so weights that are tied, hooked or already in an optimizer remain so.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"constrain: needs a module, got {type(module).__name__}; use StiefelParameter for a tensor"
        )
    parameter = module._parameters.get(name)
    if parameter is None:
        have = ", ".join(k for k, p in module._parameters.items() if p is not None) or "none"
        raise ValueError(f"constrain: {type(module).__name__} has no parameter {name!r}; it has: {have}")
    if init not in ("polar", "random", "keep"):
        raise ValueError(f"constrain: init must be 'polar', 'random' or 'keep', got {init!r}")
    if parameter.ndim > 2 and isinstance(module, _CONVOLUTIONS):
        raise ValueError(
            f"constrain: {name!r} of {type(module).__name__} has shape {tuple(parameter.shape)}; as a matrix it is "
            f"({parameter.shape[0]}, {parameter[0].numel()}), but here leading dimensions are a batch of matrices: "
            "convolutions cannot be constrained"
        )
    if type(parameter) not in (nn.Parameter, StiefelParameter):
        raise ValueError(f"constrain: {name!r} is a {type(parameter).__name__}, not a plain nn.Parameter")
    if parameter.is_meta and init != "keep":
        raise ValueError(f"constrain: {name!r} is on the meta device and has no values; use init='keep'")
    blocks, rows = check_blocks(parameter, blocks, rows)
    parameter.data = laid_out(parameter.data, blocks, rows)
    X = cut_blocks(parameter.detach(), blocks, rows)
    if init == "polar":
        try:
            X.copy_(polar(X))
        except ValueError as error:
            raise ValueError(f"constrain: {name!r}: {error}; init='random' starts from scratch") from error
    elif init == "random":
        X.copy_(random_stiefel(*X.shape, dtype=X.dtype, device=X.device))
    _watch_optimizers()
    parameter.__class__ = StiefelParameter
    parameter = cast(StiefelParameter, parameter)
    parameter.blocks, parameter.rows = blocks, rows
    return module


def stiefel_parameters(model: nn.Module) -> Iterator[tuple[str, StiefelParameter]]:
    """Every constrained parameter of a model, with its name."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, StiefelParameter):
            require_effective(name)
            yield name, parameter


# ------------------------------------------------------------------------------------------- optimizers of other kinds

_watching = False
_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _watch_optimizers() -> None:
    """From the first StiefelParameter on, warn once for each optimizer that would step one as a plain parameter."""
    global _watching
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_warn_of_ignored_constraints)


def _warn_of_ignored_constraints(optimizer: Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or optimizer in _seen:
        return
    _seen.add(optimizer)
    if getattr(optimizer, "keeps_stiefel", False):
        return
    for group in optimizer.param_groups:
        names = group.get("param_names", [f"number {i}" for i in range(len(group["params"]))])
        ignored = [n for n, p in zip(names, group["params"], strict=False) if isinstance(p, StiefelParameter)]
        if ignored:
            warnings.warn(
                f"{type(optimizer).__name__} steps the constrained parameter {ignored[0]} ({len(ignored)} such) as a free "
                "one, so it leaves the manifold; use an optimizer of ortho_vit.optim, or project_(model) after each step",
                stacklevel=3,
            )
            return


@torch.no_grad()
def project_(model: nn.Module) -> nn.Module:
    """Replace every constrained block of a model by its polar factor, in place, and return the model.

    For weights that were averaged: the mean of orthonormal matrices is not orthonormal.

        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        project_(average)
    """
    for name, parameter in stiefel_parameters(model):
        X = parameter.matrices()
        try:
            X.copy_(polar(X))
        except ValueError as error:
            raise ValueError(f"project_: {name!r}: {error}") from error
    return model
