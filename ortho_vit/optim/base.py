"""What the optimizers share: one `torch.optim.Optimizer` for constrained and free parameters alike.

An optimizer is its constructor and two rules: how free parameters move (`ortho_vit.optim.free`: torch's own step), and how
a batch of constrained blocks does (one file per family).  This file sorts parameters into those two, lays blocks out as
batches X (B, m, n) with m ≤ n, and checks everything that can be checked before anything is written.

State of a constrained parameter: the family's tensors, one entry per block; the counter `step`; under names that begin
with `free_` what torch's optimizer would keep for its free rows.  A parameter narrower than float32 is stepped through a
float32 copy, kept under `master`.

`torch.compile` traces `step`.  What it must not trace, whether a parameter is constrained and what its state looks like,
is decided in `_init_group`, which it runs as Python.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ortho_vit.errors import DivergedError
from ortho_vit.optim.batching import Batch, as_rows, block_keys
from ortho_vit.optim.free import Checks, FreeRule, Group, Part, State, new_count
from ortho_vit.optim.sharding import Sharding
from ortho_vit.parameter import StiefelParameter, cut_blocks, cut_free
from ortho_vit.stiefel import float32_precision, full_precision, orthogonality_error, polar, working_dtype

Params = Iterable[Any]
Layout = tuple[int, int, int]  # blocks and constrained rows of a parameter, and the batch it is stepped in

LARGEST_SQUARE = 1e16  # a float32 gradient below this can be squared, with room for momentum and sums


def is_count(k: Any) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k >= 1


class BlockRule:
    """How constrained blocks move."""

    checks: ClassVar[Checks] = {}  # of hyper-parameters of its own
    exact: ClassVar[bool] = True  # it stays on the manifold
    starts_on_manifold: ClassVar[bool] = True
    squares_gradients: ClassVar[bool] = True  # so that a gradient must not be too large
    stacks: ClassVar[bool] = True  # the blocks of several parameters may be stepped as one batch

    def reads_device(self, group: Group) -> str | None:
        """The option that makes a step read the device from the host, if there is one."""
        return None

    def new_state(self, X: Tensor) -> State:
        """The state of blocks X (B, m, n) before the first step: tensors with one entry per block."""
        return {}

    def move(
        self,
        X: Tensor,
        G: Tensor,
        state: State,
        lr: float | Tensor,
        group: Group,
        norm: float | None,
        scratch: Tensor | None,
    ) -> None:
        """Move the blocks X (B, m, n), m ≤ n, and their state in place; `state["step"]` counts from 1.

        `norm` is at least ‖G‖ of each block; None: unknown, and the host must not look at the device.  `scratch` is memory
        like X to work in, or None.  It may be G, which is then overwritten; otherwise G is not to be written.
        """
        raise NotImplementedError


class StiefelOptimizer(Optimizer):
    """The base of every optimizer here, which sets the two rules and whose constructor's arguments are its options."""

    keeps_stiefel = True  # it knows constrained parameters: see `ortho_vit.parameter`
    free_rule: ClassVar[FreeRule]
    block_rule: ClassVar[BlockRule]

    def __init__(self, params: Params, arguments: dict[str, Any]) -> None:
        """`arguments` are the `locals()` of the optimizer's constructor."""
        self._forget()
        super().__init__(
            params, {k: v for k, v in arguments.items() if k not in ("self", "params", "__class__")}
        )

    def _forget(self) -> None:
        """Start without anything derived from parameters and their state."""
        self._sharding = Sharding()
        self._cuts: dict[Tensor, tuple[Any, Tensor, Tensor | None]] = {}  # layout, blocks and free rows
        self.known_norms: dict[Tensor, float] = {}  # see `_gradient_norms`

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"stale": self._sharding.stale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        self._sharding.stale = state.pop("stale", False)
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("capturable", None)  # which version 0.1 did not have

    # ---------------------------------------------------------------------------------------------- parameters come in

    def add_param_group(self, param_group: Group) -> None:
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_parameters(group)
            group.setdefault("reference_lr", float(group["lr"]))
            if self.block_rule.starts_on_manifold:
                self._put_on_manifold(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check(self, group: Group) -> None:
        """Raise ValueError for a hyper-parameter out of range."""
        for name, (holds, words) in {**CHECKS, **self.free_rule.checks, **self.block_rule.checks}.items():
            try:
                good = name not in group or bool(holds(group[name], group))
            except (TypeError, RuntimeError):  # of another type, or a tensor of several numbers
                good = False
            if not good:
                raise ValueError(f"{type(self).__name__}: {name} {words}, got {group[name]!r}")
        if group["capturable"] and (reason := self.block_rule.reads_device(group)):
            raise ValueError(f"{type(self).__name__}: capturable is not possible with {reason}")

    def _check_parameters(self, group: Group) -> None:
        for p in group["params"]:
            if hasattr(p, "device_mesh"):  # a DTensor
                raise TypeError(
                    f"{type(self).__name__}: parameters are sharded, which cuts blocks apart; use "
                    "DistributedDataParallel, with shard_stiefel=True"
                )
            if p.is_complex():
                raise ValueError(
                    f"{type(self).__name__}: {self.name_of(p)} is complex; only real parameters are supported"
                )

    @torch.no_grad()
    def _put_on_manifold(self, group: Group) -> None:
        """Replace blocks that are off the manifold by their polar factors: all of them, or none and an error."""
        replaced: list[tuple[Tensor, Tensor, str]] = []
        for p in group["params"]:
            if isinstance(p, StiefelParameter) and not p.is_meta:
                X, error = p.matrices(), orthogonality_error(p)
                if not error <= self._tolerance(X.dtype, group):
                    what = f"{self.name_of(p)} was off the manifold by {error:.2g}"
                    replaced.append((X, self._nearest(p, X), what))
        for X, nearest, what in replaced:
            X.copy_(nearest)
            warnings.warn(f"{what}: replaced by its polar factor", stacklevel=5)

    def _tolerance(self, dtype: torch.dtype, group: Group) -> float:
        """The error that a first step removes, or that narrow numbers cannot avoid; for a method that drifts, its drift."""
        if not self.block_rule.exact or group.get("inner_steps") is not None:
            return 0.2  # a run that is resumed must find its weights as it left them
        return max(math.sqrt(torch.finfo(working_dtype(dtype)).eps), 2 * torch.finfo(dtype).eps)

    def _nearest(self, p: Tensor, X: Tensor) -> Tensor:
        try:
            return polar(X)
        except ValueError as problem:
            raise ValueError(
                f"{type(self).__name__}: {self.name_of(p)} cannot be made orthonormal; {problem}"
            ) from None

    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter in messages: its own where the optimizer was given `named_parameters()`."""
        for i, group in enumerate(self.param_groups):
            for j, p in enumerate(group["params"]):
                if p is parameter:
                    name = repr(group["param_names"][j]) if "param_names" in group else f"{j} of group {i}"
                    return f"parameter {name} of shape {tuple(p.shape)}"
        raise KeyError("not a parameter of this optimizer")

    # ------------------------------------------------------------------------------------------------------- the state

    def state_dict(self) -> dict[str, Any]:
        """As torch's.  Under `shard_stiefel` every rank calls `consolidate_state_dict` first."""
        if self._sharding.stale:
            raise RuntimeError(
                f"{type(self).__name__}: each rank has the state of its own share only; call "
                "consolidate_state_dict() on every rank before state_dict()"
            )
        return super().state_dict()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Exchange the state of shared blocks, on every rank, so that `state_dict` is whole.  Lightning calls this."""
        self._sharding.consolidate(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the float32 state of narrower parameters stays float32, and `shard_stiefel` as it is here."""
        loaded = _of_this_version(state_dict, self.defaults.get("capturable"))
        # torch adds "differentiable" to the defaults, not to the groups, of an optimizer that has loaded a state.
        needed = self.defaults.keys() - {"shard_stiefel", "differentiable"}
        for group in loaded["param_groups"]:
            if missing := sorted(needed - group.keys()):
                raise ValueError(
                    f"{type(self).__name__}: the state is of another optimizer: it has no {missing[0]!r}"
                )
        saved = [i for group in loaded["param_groups"] for i in group["params"]]
        ours = [(p, group) for group in self.param_groups for p in group["params"]]
        pairs = list(zip(saved, ours, strict=False))  # where their numbers differ, torch says so
        for i, (p, group) in pairs:
            if len(saved) == len(ours) and not self._fits(p, loaded["state"].get(i, {}), group):
                raise ValueError(
                    f"{type(self).__name__}: the state of {self.name_of(p)} is of other blocks, or of another optimizer"
                )
        sharded = [group.get("shard_stiefel", False) for group in self.param_groups]
        super().load_state_dict(loaded)
        for group, here in zip(self.param_groups, sharded, strict=True):
            if "shard_stiefel" in self.defaults:
                group["shard_stiefel"] = here
        for i, (p, _) in pairs:
            if i in loaded["state"] and p.dtype != working_dtype(p.dtype):  # which torch has cast
                self.state[p] = {
                    k: v.to(p.device if v.ndim else "cpu", copy=True) for k, v in loaded["state"][i].items()
                }

    def _fits(self, p: Tensor, state: State, group: Group) -> bool:
        """Whether the state is this family's, for p as it is constrained and cut now."""
        if not state:
            return True
        if not isinstance(p, StiefelParameter):
            return not any(key.startswith("free_") for key in state) and not ("Z" in state or "M" in state)
        X = as_rows(p.matrices())
        expected = {key: (len(X), *x.shape[1:]) for key, x in self.block_rule.new_state(X[:0]).items()}
        own = {key: state[key].shape for key in block_keys(state)}
        return (
            "step" in state
            and expected.keys() <= own.keys()
            and all(shape == expected.get(key, X.shape) for key, shape in own.items())
        )

    # ---------------------------------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.  A closure recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        norms = self._gradient_norms()
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._sharding.assign(self.param_groups, self.state)
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            layouts: list[Layout | None] = []
            self._init_group(group, params, grads, layouts)
            for device in dict.fromkeys(p.device for p in (params[:1] if compiling else params)):
                own = [i for i, p in enumerate(params) if compiling or p.device == device]
                with full_precision(device):
                    self._step_group(
                        group,
                        [params[i] for i in own],
                        [grads[i] for i in own],
                        [layouts[i] for i in own],
                        norms,
                    )
        if not compiling and (bad := self._sharding.exchange()) is not None:
            raise self._overflow(bad)
        return loss

    def is_capturable(self, group: Group, device: torch.device) -> bool:
        """Whether the host must not look at the device: always while compiled, by default on an accelerator."""
        if torch.compiler.is_compiling():
            return True
        if group["capturable"] is None:
            return device.type != "cpu" and self.block_rule.reads_device(group) is None
        return bool(group["capturable"])

    def _gradient_norms(self) -> dict[Tensor, float]:
        """‖G‖ of every parameter whose step may look at the device; raises, before anything is written, where one is bad.

        One synchronisation for all of them, and none where the caller has computed them for this step, in `known_norms`:
        they may be larger than the norms now, as gradients are clipped in between.
        """
        if torch.compiler.is_compiling():
            return {}
        grads = {
            p: p.grad
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and not self.is_capturable(group, p.device)
        }
        if any(g.is_sparse for g in grads.values()):
            raise RuntimeError(f"{type(self).__name__}: sparse gradients are not supported")
        known, self.known_norms = self.known_norms, {}
        norms = [known.get(p, math.inf) for p in grads]
        if not sum(norms) < LARGEST_SQUARE:
            norms = norms_of(list(grads.values()))
        if not sum(norms) < LARGEST_SQUARE:
            for (p, g), norm in zip(grads.items(), norms, strict=True):
                self._check_gradient(p, g, norm)
        return dict(zip(grads, norms, strict=True))

    def _check_gradient(self, p: Tensor, g: Tensor, norm: float) -> None:
        problem = None if g.isfinite().all() else "not finite"
        if self.block_rule.squares_gradients and isinstance(p, StiefelParameter) and not problem:
            dtype = working_dtype(g.dtype)
            largest = torch.finfo(dtype).max ** 0.5 / 1000
            norm = norm if math.isfinite(norm) else float(torch.linalg.vector_norm(g, dtype=dtype))
            problem = None if norm < largest else f"too large to be squared (its norm is {norm:.1g})"
        if problem:
            raise DivergedError(
                f"{type(self).__name__}: the gradient of {self.name_of(p)} is {problem}; nothing was changed"
            )

    def _init_group(
        self, group: Group, params: list[Tensor], grads: list[Tensor], layouts: list[Layout | None]
    ) -> None:
        """Fill the lists with what a step of the group moves, and create the state that is missing.

        A layout is None for a free parameter.  Not traced by `torch.compile`, which runs this as Python.
        """
        traced = torch._guards.TracingContext.try_get() is not None
        if traced and float32_precision() != "highest":
            raise RuntimeError(
                f"{type(self).__name__}: a compiled step cannot change the precision of its products; compile it under "
                "torch.set_float32_matmul_precision('highest'), or compile the model and leave the step outside"
            )
        batches: dict[Any, int] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            self._init_state(p, group)
            params.append(p)
            grads.append(p.grad)
            layout: Layout | None = None
            if isinstance(p, StiefelParameter):
                stacked = p.device.type != "cpu" if group["foreach"] is None else group["foreach"]
                together = stacked and self.block_rule.stacks
                key = (p.shape, p.blocks, p.rows, p.dtype, p.device) if together else id(p)
                layout = p.blocks, p.rows, batches.setdefault(key, len(batches))
            layouts.append(layout)

    def _init_state(self, p: Tensor, group: Group) -> None:
        """Create or correct the state of a parameter; most steps find it as they left it."""
        state, dtype = self.state[p], working_dtype(p.dtype)
        if isinstance(p, StiefelParameter):
            p.restore_layout()
        elif self._cuts.pop(p, None) is not None:  # it was constrained before
            for key in state.keys() - {"master"}:
                del state[key]
        capturable = self.is_capturable(group, p.device)
        if p.dtype == dtype:
            state.pop("master", None)
        elif "master" not in state:
            state["master"] = p.detach().to(dtype)
        tensor = state.get("master", p)
        if not isinstance(p, StiefelParameter):
            self.free_rule.init(Part(tensor, tensor, state), group, capturable)
            return
        address = 0 if tensor.is_meta else tensor.data_ptr()
        layout = address, tensor.stride(), dtype, p.blocks, p.rows
        if "step" in state and p in self._cuts and self._cuts[p][0] == layout:
            return
        blocks, free = cut_blocks(tensor.detach(), p.blocks, p.rows), cut_free(tensor.detach(), p.rows)
        self._cuts[p] = layout, blocks, free
        if "step" not in state or not self._fits(p, state, group):
            for key in state.keys() - {"master"}:
                del state[key]
            state |= self.block_rule.new_state(as_rows(blocks)) | {"step": new_count(p, capturable)}
            if self.block_rule.starts_on_manifold and not capturable:
                self._begin_on_manifold(p, blocks)
                p.copy_(tensor)
        state["step"] = state["step"].to(p.device if capturable else "cpu")  # it may have been loaded
        for key, x in state.items():
            if x.ndim and key != "master":
                state[key] = x.to(dtype)
        if free is not None:
            self.free_rule.init(Part(free, free, state, "free_"), group, capturable)

    def _begin_on_manifold(self, p: Tensor, X: Tensor) -> None:
        """Before the first step: weights may have been loaded since the optimizer was made.

        A small error is left to the step itself; a method that does not measure X Xᵀ begins as exactly as it can.
        """
        eps = torch.finfo(X.dtype).eps
        if not orthogonality_error(X) <= (math.sqrt(eps) if self.block_rule.exact else 4 * eps):
            X.copy_(self._nearest(p, X))

    def _step_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        layouts: list[Layout | None],
        norms: dict[Tensor, float],
    ) -> None:
        capturable = self.is_capturable(group, params[0].device)
        free: list[Part] = []
        members: dict[int, list[int]] = {}
        narrow: list[tuple[Tensor, Tensor]] = []
        for i, (p, layout) in enumerate(zip(params, layouts, strict=True)):
            state = self.state[p]
            if "master" in state:
                master = state["master"]  # values that other code has written to p are kept
                master.copy_(torch.where(master.to(p.dtype) == p, master, p))
                narrow.append((p, master))
            if layout is None:
                tensor = state.get("master", p)
                free.append(Part(tensor, grads[i].to(tensor.dtype), state))
            else:
                members.setdefault(layout[2], []).append(i)
        batches = [
            self._batch([params[i] for i in own], [grads[i] for i in own], layouts[own[0]])
            for own in members.values()
        ]
        for batch in batches:
            free += batch.free_parts()
        if free:
            self.free_rule.step(free, group, capturable)
        free.clear()  # releases the gradients of free rows
        for batch in batches:
            norm = None if capturable else max(norms[p] for p in batch.parameters)
            self._step_batch(batch, group, norm)
        if narrow:
            torch._foreach_copy_([p for p, _ in narrow], [master for _, master in narrow])

    def _batch(self, params: list[Any], grads: list[Tensor], layout: Any) -> Batch:
        blocks, rows, _ = layout
        states = [self.state[p] for p in params]
        if torch.compiler.is_compiling():
            tensors = [state.get("master", p) for p, state in zip(params, states, strict=True)]
            cuts = [(cut_blocks(x, blocks, rows), cut_free(x, rows)) for x in tensors]
        else:
            cuts = [self._cuts[p][1:] for p in params]
        grad = (grads[0] if len(grads) == 1 else torch.stack(grads)).to(cuts[0][0].dtype)
        free = [part for _, part in cuts if part is not None]
        return Batch(params, (blocks, rows), [part for part, _ in cuts], free, grad, states)

    def _step_batch(self, batch: Batch, group: Group, norm: float | None) -> None:
        lr = stiefel_lr(group, host=norm is not None)
        shared = batch.parameters[0] in self._sharding.bounds if self._sharding.bounds else False

        def move(X: Tensor, G: Tensor, state: State, scratch: Tensor | None) -> None:
            if group["maximize"]:
                G = scratch = torch.neg(G, out=scratch)
            if norm is None:
                self._move_finite(X, G, state, lr, group)
                return
            before = X.clone() if lr == 0 else None
            try:
                self.block_rule.move(X, G, state, lr, group, norm, scratch)
            except (ValueError, torch.linalg.LinAlgError):  # the result is not finite or has lost its rank
                if not shared:
                    raise self._overflow(batch.parameters[0]) from None
                X.fill_(math.nan)  # all ranks will see it
            if before is not None:
                X.copy_(before)  # to the bit

        torch._foreach_add_([state["step"] for state in batch.states], 1)
        total = len(batch.blocks) * len(batch.blocks[0])
        start, stop = self._sharding.share(batch.parameters, total) if shared else (0, total)
        if start < stop:
            batch.step(move, start, stop)

    def _move_finite(self, X: Tensor, G: Tensor, state: State, lr: float | Tensor, group: Group) -> None:
        """Move the blocks whose gradient is finite, without looking at the device: a mask leaves the others as they were."""
        largest = torch.linalg.vector_norm(G, math.inf, dim=(-2, -1), keepdim=True)
        finite = largest <= torch.finfo(G.dtype).max
        states = [state[key] for key in block_keys(state)]
        before = torch._foreach_clone([X, *states])
        self.block_rule.move(X, G, state, lr, group, None, None)
        for x, old in zip((X, *states), before, strict=True):
            keep = finite & (lr != 0) if x is X else finite
            torch.where(keep, x, old, out=x)
        for key in block_keys(state)[len(states) :]:  # which a first step has added
            state[key] = torch.where(finite, state[key], 0)

    def _overflow(self, parameter: Tensor) -> DivergedError:
        return DivergedError(
            f"{type(self).__name__}: {self.name_of(parameter)}: the step overflowed; lower the learning rate"
        )


CHECKS: Checks = {
    "lr": (lambda lr, _: 0 <= lr < math.inf, "must be finite and >= 0"),
    "stiefel_lr": (lambda lr, _: lr is None or 0 <= lr < math.inf, "must be finite and >= 0"),
    "weight_decay": (lambda x, _: 0 <= x < math.inf, "must be finite and >= 0"),
    "capturable": (lambda c, _: c in (None, False, True), "must be true, false or None"),
    "shard_stiefel": (
        lambda n, _: isinstance(n, int) and n >= 0,
        "must be true, false or a number of ranks",
    ),
}


def stiefel_lr(group: Group, host: bool) -> float | Tensor:
    """The learning rate of constrained blocks: `lr`, or `stiefel_lr` following the schedule that `lr` has gone through."""
    lr = float(group["lr"]) if host else group["lr"]
    if group["stiefel_lr"] is None:
        return lr
    own, reference = float(group["stiefel_lr"]), group["reference_lr"]
    return lr * (own / reference) if reference else own


def norms_of(tensors: list[Tensor]) -> list[float]:
    """The norm of each; not finite where an entry is not, or where its square overflows.  One synchronisation."""
    if not tensors:
        return []
    norms = torch._foreach_norm(tensors)
    together = len({(n.device, n.dtype) for n in norms}) == 1
    return torch.stack([n if together else n.double().cpu() for n in norms]).tolist()


def all_finite(tensors: list[Tensor], norms: list[float] | None = None) -> bool:
    """Whether every entry is finite; `norms` are those of the tensors, where they are known already."""
    norms = norms_of(tensors) if norms is None else norms
    return math.isfinite(sum(norms)) or all(t.isfinite().all() for t in tensors)


def _of_this_version(state_dict: dict[str, Any], capturable: bool | None) -> dict[str, Any]:
    """A state dict of this version or of 0.1: there counters were integers, the state of free rows was a dictionary, and
    groups had no `capturable`.
    """

    def upgraded(state: State) -> State:
        free = {f"free_{key}": value for key, value in state.get("free", {}).items()}
        state = {key: value for key, value in state.items() if key != "free"} | free
        if isinstance(state.get("step"), int):
            state["step"] = torch.tensor(float(state["step"]))
        return state

    return state_dict | {
        "state": {i: upgraded(state) for i, state in state_dict["state"].items()},
        "param_groups": [{"capturable": capturable} | group for group in state_dict["param_groups"]],
    }
