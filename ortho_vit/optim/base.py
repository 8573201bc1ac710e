"""What the optimizers share: one `torch.optim.Optimizer` for constrained and free parameters alike.

A family (one file each) composes two things: a rule for free parameters (`ortho_vit.optim.free`: torch's own step) and a
function that moves a batch of constrained blocks.  This file sorts parameters into those two, lays blocks out as batches
X (B, m, n) with m ≤ n, and checks everything that can be checked before anything is written.

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
from ortho_vit.optim.free import FreeRule, Group, Part, State, new_count
from ortho_vit.optim.sharding import Sharding
from ortho_vit.parameter import StiefelParameter, cut_blocks, cut_free
from ortho_vit.stiefel import full_precision, orthogonality_error, polar, working_dtype

Params = Iterable[Any]
Layout = tuple[int, int, int]  # blocks and constrained rows of a parameter, and the batch it is stepped in

LARGEST_SQUARE = 1e16  # a float32 gradient below this can be squared, with room for momentum and sums


def hyper_parameters(arguments: dict[str, Any]) -> Group:
    """The hyper-parameters among a constructor's `locals()`."""
    return {k: v for k, v in arguments.items() if k not in ("self", "params", "__class__")}


def is_count(k: Any) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k >= 1


class StiefelOptimizer(Optimizer):
    """The base of every optimizer here.  A family sets `free_rule` and defines `new_state` and `move`."""

    keeps_stiefel = True  # it knows constrained parameters: see `ortho_vit.parameter`
    free_rule: ClassVar[FreeRule]
    exact: ClassVar[bool] = True  # it stays on the manifold
    starts_on_manifold: ClassVar[bool] = True
    squares_gradients: ClassVar[bool] = True  # so that a gradient must not be too large

    def __init__(self, params: Params, defaults: Group) -> None:
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """Start without anything derived from parameters and their state."""
        self._sharding = Sharding()
        self._cuts: dict[Tensor, tuple[Any, Tensor, Tensor | None]] = {}
        self.known_norms: dict[Tensor, float] = {}  # see `_gradient_norms`

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"stale": self._sharding.stale}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()
        self._sharding.stale = state.pop("stale", False)
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("capturable", None)  # which version 0.1 did not have

    # ------------------------------------------------------------------------------------------ what a family defines

    def check(self, group: Group) -> None:
        """Raise ValueError for a hyper-parameter out of range."""

        def require(name: str, holds: Callable[[Any], bool], rule: str) -> None:
            self.require(group, name, holds, rule)

        require("lr", lambda lr: 0 <= lr < math.inf, "must be finite and >= 0")
        require("stiefel_lr", lambda lr: lr is None or 0 <= lr < math.inf, "must be finite and >= 0")
        require("weight_decay", lambda x: 0 <= x < math.inf, "must be finite and >= 0")
        require("capturable", lambda c: c in (None, False, True), "must be true, false or None")
        if "shard_stiefel" in group:
            rule = "must be true, false or a number of ranks"
            require("shard_stiefel", lambda n: isinstance(n, int) and n >= 0, rule)
        self.free_rule.check(require, group)
        if reason := self.reads_device(group):
            require("capturable", lambda c: not c, f"is not possible with {reason}")

    def reads_device(self, group: Group) -> str | None:
        """The option that makes a step read the device from the host, if there is one."""
        return None

    def new_state(self, X: Tensor, group: Group) -> State:
        """The state of blocks X (B, m, n) before the first step: tensors with one entry per block."""
        raise NotImplementedError

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

    def require(self, group: Group, name: str, holds: Callable[[Any], bool], rule: str) -> None:
        try:
            good = bool(holds(group[name]))
        except (TypeError, RuntimeError):  # of another type, or a tensor of several numbers
            good = False
        if not good:
            raise ValueError(f"{type(self).__name__}: {name} {rule}, got {group[name]!r}")

    def is_capturable(self, group: Group, device: torch.device) -> bool:
        """Whether the host must not look at the device: always while compiled, by default on an accelerator."""
        if torch.compiler.is_compiling():
            return True
        chosen = group["capturable"]
        if chosen is None:
            return device.type != "cpu" and self.reads_device(group) is None
        return bool(chosen)

    # ------------------------------------------------------------------------------------------ parameters come in

    def add_param_group(self, param_group: Group) -> None:
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_parameters(group)
            group.setdefault("reference_lr", float(group["lr"]))
            if self.starts_on_manifold:
                self._put_on_manifold(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

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
        for parameter in group["params"]:
            if not isinstance(parameter, StiefelParameter) or parameter.is_meta:
                continue
            X, name = parameter.matrices(), self.name_of(parameter)
            error = orthogonality_error(X)
            if error <= self._tolerance(X.dtype, group):
                continue
            try:
                replaced.append((X, polar(X), f"{name} was off the manifold by {error:.2g}"))
            except ValueError as problem:
                raise ValueError(
                    f"{type(self).__name__}: {name} cannot be made orthonormal; {problem}"
                ) from None
        for X, nearest, what in replaced:
            X.copy_(nearest)
            warnings.warn(f"{what}: replaced by its polar factor", stacklevel=5)

    def _tolerance(self, dtype: torch.dtype, group: Group) -> float:
        """The error that a first step removes, or that narrow numbers cannot avoid; for a method that drifts, its drift."""
        if not self.exact or group.get("inner_steps") is not None:
            return 0.2  # a run that is resumed must find its weights as it left them
        return max(math.sqrt(torch.finfo(working_dtype(dtype)).eps), 2 * torch.finfo(dtype).eps)

    def name_of(self, parameter: Tensor) -> str:
        """How messages call a parameter: by name where the optimizer was given `named_parameters()`."""
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
        kept = [{k: group[k] for k in group if k == "shard_stiefel"} for group in self.param_groups]
        loaded = _of_this_version(state_dict, self.defaults)
        # torch adds "differentiable" to the defaults, not to the groups, of an optimizer that has loaded a state.
        needed = self.defaults.keys() - {"shard_stiefel", "differentiable"}
        for group in loaded["param_groups"]:
            if missing := sorted(needed - group.keys()):
                raise ValueError(
                    f"{type(self).__name__}: the state is of another optimizer: it has no {missing[0]!r}"
                )
        saved = [i for group in loaded["param_groups"] for i in group["params"]]
        ours = [(p, group) for group in self.param_groups for p in group["params"]]
        if len(saved) == len(ours):  # otherwise torch says so
            for i, (p, group) in zip(saved, ours, strict=True):
                if not self._fits(p, loaded["state"].get(i, {}), group):
                    raise ValueError(
                        f"{type(self).__name__}: the state of {self.name_of(p)} is of other blocks, or of "
                        "another optimizer"
                    )
        super().load_state_dict(loaded)
        self._cuts.clear()
        for group, here in zip(self.param_groups, kept, strict=True):
            group.update(here)
        for i, (p, _) in zip(saved, ours, strict=True):
            if i in loaded["state"] and p.dtype != working_dtype(p.dtype):  # which torch has cast
                self.state[p] = {k: _copied(v, p.device) for k, v in loaded["state"][i].items()}

    def _fits(self, p: Tensor, state: State, group: Group) -> bool:
        """Whether the state is this family's, for p as it is constrained and cut now."""
        if not state:
            return True
        if not isinstance(p, StiefelParameter):
            return not any(key.startswith("free_") for key in state) and not ("Z" in state or "M" in state)
        X = as_rows(p.matrices())
        expected = {key: (len(X), *x.shape[1:]) for key, x in self.new_state(X[:0], group).items()}
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
            if params:
                with full_precision(params[0].device):
                    self._step_group(group, params, grads, layouts, norms)
        if not compiling and (bad := self._sharding.exchange()) is not None:
            raise self._overflow(bad)
        return loss

    def _gradient_norms(self) -> dict[Tensor, float]:
        """‖G‖ of every parameter whose step may look at the device; raises, before anything is written, where one is bad.

        One synchronisation for all of them, and none where the caller has computed them for this step, in `known_norms`:
        they may be larger than the norms now, as gradients are clipped in between.
        """
        if torch.compiler.is_compiling():
            return {}
        parameters = [
            p
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and not self.is_capturable(group, p.device)
        ]
        grads = [p.grad for p in parameters if p.grad is not None]
        if any(g.is_sparse for g in grads):
            raise RuntimeError(f"{type(self).__name__}: sparse gradients are not supported")
        known, self.known_norms = self.known_norms, {}
        norms = [known.get(p, math.inf) for p in parameters]
        if not sum(norms) < LARGEST_SQUARE:
            norms = norms_of(grads)
        if not sum(norms) < LARGEST_SQUARE:
            for p, g, norm in zip(parameters, grads, norms, strict=True):
                self._check_gradient(p, g, norm)
        return dict(zip(parameters, norms, strict=True))

    def _check_gradient(self, p: Tensor, g: Tensor, norm: float) -> None:
        problem = None if g.isfinite().all() else "not finite"
        if self.squares_gradients and isinstance(p, StiefelParameter) and not problem:
            largest = torch.finfo(working_dtype(g.dtype)).max ** 0.5 / 1000
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
        if traced and torch.get_float32_matmul_precision() != "highest":
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
            if not isinstance(p, StiefelParameter):
                layouts.append(None)
                continue
            stacked = p.device.type != "cpu" if group["foreach"] is None else group["foreach"]
            key = (p.shape, p.blocks, p.rows, p.dtype, p.device) if stacked else id(p)
            layouts.append((p.blocks, p.rows, batches.setdefault(key, len(batches))))

    def _init_state(self, p: Tensor, group: Group) -> None:
        """Create or correct the state of a parameter; most steps find it as they left it."""
        state, dtype = self.state[p], working_dtype(p.dtype)
        capturable = group["capturable"] or self.is_capturable(group, p.device)
        if p.dtype == dtype:
            state.pop("master", None)
        elif "master" not in state:
            state["master"] = p.detach().to(dtype)
        tensor = state.get("master", p)
        if not isinstance(p, StiefelParameter):
            self.free_rule.init(Part(tensor, tensor, state), bool(capturable))
            return
        layout = (
            tensor.data_ptr() if not tensor.is_meta else 0,
            tensor.stride(),
            tensor.dtype,
            p.blocks,
            p.rows,
        )
        if "step" in state and p in self._cuts and self._cuts[p][0] == layout:
            return
        blocks, free = cut_blocks(tensor.detach(), p.blocks, p.rows), cut_free(tensor.detach(), p.rows)
        self._cuts[p] = layout, blocks, free
        X = as_rows(blocks)
        if "step" not in state or not self._fits(p, state, group):
            master = {key: state[key] for key in state if key == "master"}
            state.clear()
            state.update(master, **self.new_state(X, group), step=new_count(p, bool(capturable)))
            if self.starts_on_manifold and not capturable:
                self._begin_on_manifold(p, X)
                p.copy_(tensor)
        state["step"] = state["step"].to(p.device if capturable else "cpu")  # it may have been loaded
        for key, x in state.items():
            if x.ndim and key != "master" and x.dtype != tensor.dtype:
                state[key] = x.to(tensor.dtype)
        if free is not None:
            self.free_rule.init(Part(free, free, state, "free_"), bool(capturable))

    def _begin_on_manifold(self, p: Tensor, X: Tensor) -> None:
        """Before the first step: weights may have been loaded since the optimizer was made."""
        if not orthogonality_error(X) <= self._first_step_tolerance(p.dtype):
            try:
                X.copy_(polar(X))
            except ValueError as problem:
                raise ValueError(
                    f"{type(self).__name__}: {self.name_of(p)} cannot be made orthonormal; {problem}"
                ) from None

    def _first_step_tolerance(self, dtype: torch.dtype) -> float:
        """What is left to the step itself; a method that does not measure X Xᵀ begins as exactly as it can."""
        return (
            math.sqrt(torch.finfo(working_dtype(dtype)).eps)
            if self.exact
            else 4 * torch.finfo(working_dtype(dtype)).eps
        )

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
                master = state["master"]  # what somebody else has written to p counts
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
        free.clear()  # and with it the gradients of free rows
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
                self.move(X, G, state, lr, group, norm, scratch)
            # Nothing finite, or of full rank, is left
            except (FloatingPointError, ValueError, torch.linalg.LinAlgError):
                if not shared:
                    raise self._overflow(batch.parameters[0]) from None
                X.fill_(math.nan)  # which all ranks will see
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
        self.move(X, G, state, lr, group, None, None)
        for x, old in zip((X, *states), before, strict=True):
            keep = finite & (lr != 0) if x is X else finite
            torch.where(keep, x, old, out=x)

    def _overflow(self, parameter: Tensor) -> DivergedError:
        return DivergedError(
            f"{type(self).__name__}: {self.name_of(parameter)}: the step overflowed; lower the learning rate"
        )


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
    together = len({n.device for n in norms}) == 1 and len({n.dtype for n in norms}) == 1
    return torch.stack([n if together else n.double().cpu() for n in norms]).tolist()


def all_finite(tensors: list[Tensor], norms: list[float] | None = None) -> bool:
    """Whether every entry is finite; `norms` are those of the tensors, where they are known already."""
    norms = norms_of(tensors) if norms is None else norms
    return math.isfinite(sum(norms)) or all(t.isfinite().all() for t in tensors)


def _copied(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, copy=True) if value.ndim else value.clone()  # counters stay where they are


def _of_this_version(state_dict: dict[str, Any], defaults: Group) -> dict[str, Any]:
    """A state dict of this version or of 0.1: there counters were integers, and the state of free rows a dictionary."""

    def upgraded(state: State) -> State:
        if "free" in state:
            state = {**state, **{f"free_{key}": value for key, value in state["free"].items()}}
            del state["free"]
        if isinstance(state.get("step"), int):
            state = {**state, "step": torch.tensor(float(state["step"]))}
        return state

    groups = [
        {key: defaults[key] for key in ("capturable",) if key in defaults} | group
        for group in state_dict["param_groups"]
    ]
    return state_dict | {
        "state": {i: upgraded(state) for i, state in state_dict["state"].items()},
        "param_groups": groups,
    }
