"""What the optimizers share: one `torch.optim.Optimizer` for constrained and free parameters alike.

A family (one file each) says two things: how free parameters move (torch's own functional SGD or Adam, called here and so
equal to torch to the bit), and how a batch of constrained blocks moves (a function of X, its gradient and its state).
This file sorts what it is given into those two, lays the blocks out as one batch X (B, m, n) with m ≤ n, and checks
everything that can be checked before anything is written.

State of a constrained parameter: the family's tensors, a batch of blocks each; the integer `step`; and under `free` what
torch's optimizer would keep for its free rows.  A parameter narrower than float32 is stepped through a float32 copy,
kept under `master`.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ortho_vit.optim.batching import Part, Stack, State, blocks_of, wide
from ortho_vit.optim.sharding import Sharded
from ortho_vit.parameter import StiefelParameter
from ortho_vit.stiefel import orthogonality_error, polar, working_dtype

Group = dict[str, Any]
Params = Iterable[Any]

HUGE = 1e16  # a gradient below can be squared in float32, with room for momentum and sums
REFRESH = 16  # steps between two measurements of X Xᵀ; in between, rounding adds some 3e-8 a step in float32


def given(arguments: dict[str, Any]) -> Group:
    """The hyper-parameters among a constructor's `locals()`."""
    return {k: v for k, v in arguments.items() if k not in ("self", "params", "__class__")}


def is_count(k: Any) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and k >= 1


class StiefelOptimizer(Sharded):
    """The base of every optimizer here.  A family defines the four methods that come first."""

    exact = True  # the family claims to stay on the manifold, so rounding is taken out
    starts_on_manifold = True

    def __init__(self, params: Params, defaults: Group) -> None:
        self.__setstate__({})
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._stacks: dict[Any, Stack] = {}
        self._fitted: dict[Tensor, Any] = {}  # what a state was last found to fit
        super().__setstate__(state)

    def check(self, group: Group) -> None:
        """Raise ValueError for a hyper-parameter out of range."""
        self.require(group, "lr", lambda lr: 0 <= lr < math.inf, "must be finite and >= 0")
        self.require(
            group, "stiefel_lr", lambda lr: lr is None or 0 <= lr < math.inf, "must be finite and >= 0"
        )
        if "shard_stiefel" in group:
            self.require(
                group,
                "shard_stiefel",
                lambda n: isinstance(n, int) and n >= 0,
                "must be true, false or a number of ranks",
            )
        self.require(group, "weight_decay", lambda x: 0 <= x < math.inf, "must be finite and >= 0")

    def new_state(self, X: Tensor, group: Group) -> State:
        """The state of blocks X (B, m, n) before the first step: a batch of B each."""
        raise NotImplementedError

    def stiefel_step(
        self, X: Tensor, G: Tensor, state: State, lr: float, group: Group, scratch: Tensor | None
    ) -> None:
        """Move the blocks X (B, m, n), m ≤ n, and their state in place; `state["step"]` counts from 1.

        `scratch` is memory like X to work in, or None.  It may be G, which is then lost; G itself is not to be written.
        """
        raise NotImplementedError

    def refresh(self, X: Tensor, state: State) -> None:
        """Take out what rounding has added."""
        X.copy_(polar(X))

    def free_step(self, parts: list[Part], group: Group) -> None:
        """Move free parameters in place by torch's own step."""
        raise NotImplementedError

    def require(self, group: Group, name: str, holds: Callable[[Any], bool], rule: str) -> None:
        try:
            good = bool(holds(group[name]))
        except (TypeError, RuntimeError):  # of another type, or a tensor of several numbers
            good = False
        if not good:
            raise ValueError(f"{type(self).__name__}: {name} {rule}, got {group[name]!r}")

    # ------------------------------------------------------------------------------------------ parameters come in

    def add_param_group(self, param_group: Group) -> None:
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(hasattr(p, "device_mesh") for p in group["params"]):  # a DTensor
            self.param_groups.pop()
            raise TypeError(
                f"{type(self).__name__}: parameters are sharded, which cuts blocks apart; use "
                "DistributedDataParallel, with shard_stiefel=True"
            )
        group.setdefault("reference_lr", float(group["lr"]))
        if self.starts_on_manifold:
            try:
                self._put_on_manifold(group)
            except ValueError:
                self.param_groups.pop()
                raise

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
        """What the first step takes out, or narrow numbers cannot say; where a method drifts, what that may have done."""
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the float32 state of narrower parameters stays float32, and `shard_stiefel` as it is here."""
        sharded = [{k: group[k] for k in group if k == "shard_stiefel"} for group in self.param_groups]
        for group in state_dict["param_groups"]:
            if missing := sorted(self.defaults.keys() - group.keys() - {"shard_stiefel"}):
                raise ValueError(
                    f"{type(self).__name__}: the state is of another optimizer: it has no {missing[0]!r}"
                )
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        ours = [(p, group) for group in self.param_groups for p in group["params"]]
        if len(saved) == len(ours):  # otherwise torch says so
            for i, (p, group) in zip(saved, ours, strict=True):
                state = state_dict["state"].get(i)
                constrained = isinstance(p, StiefelParameter)
                if state and not (self._fits(p, p, state, group) if constrained else "free" not in state):
                    raise ValueError(
                        f"{type(self).__name__}: the state of {self.name_of(p)} is of other blocks, or of "
                        "another optimizer"
                    )
        super().load_state_dict(state_dict)
        for group, here in zip(self.param_groups, sharded, strict=True):
            group.update(here)
        for i, (p, _) in zip(saved, ours, strict=True):
            if i in state_dict["state"] and p.dtype != working_dtype(p.dtype):
                self.state[p] = _to_device(state_dict["state"][i], p.device)

    def _fits(self, p: StiefelParameter, tensor: Tensor, state: State, group: Group) -> bool:
        """Whether the state is this family's, for blocks as p has them now."""
        X = wide(blocks_of(p, tensor.detach()))
        shapes = {key: (len(X), *x.shape[1:]) for key, x in self.new_state(X[:0], group).items()}
        own = {key: x for key, x in state.items() if isinstance(x, Tensor) and key != "master"}
        return (
            "free" in state
            and shapes.keys() <= own.keys()
            and all(x.shape == shapes.get(key, X.shape) for key, x in own.items())
        )

    # ------------------------------------------------------------------------------------------------------ a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.  A closure recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients(
            [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        )
        self.deal_blocks()
        used: set[Any] = set()
        for group in self.param_groups:
            used.update(self._step_group(group))
        self._forget_stacks(used)
        if (spoilt := self.exchange_blocks()) is not None:
            raise self._overflow(spoilt)
        return loss

    def _check_gradients(self, parameters: list[Tensor]) -> None:
        """Raise before anything is written.  One synchronisation for all of them."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if any(g.is_sparse for g in grads):
            raise RuntimeError(f"{type(self).__name__}: sparse gradients are not supported")
        if not grads or total_norm(grads) < HUGE:
            return
        for p, g in zip(parameters, grads, strict=True):
            problem = None if g.isfinite().all() else "not finite"
            if isinstance(p, StiefelParameter) and not problem:
                norm = float(torch.linalg.vector_norm(g.to(working_dtype(g.dtype))))
                too_large = not norm < torch.finfo(working_dtype(g.dtype)).max ** 0.5 / 1000
                problem = f"too large to be squared (its norm is {norm:.1g})" if too_large else None
            if problem:
                raise RuntimeError(
                    f"{type(self).__name__}: the gradient of {self.name_of(p)} is {problem}; nothing was changed"
                )

    def _forget_stacks(self, used: set[Any]) -> None:
        """Those with a member that was stepped in another stack: they would keep a copy of its state."""
        stepped = {member for key in used for member in key}
        self._stacks = {k: s for k, s in self._stacks.items() if k in used or stepped.isdisjoint(k)}

    def _step_group(self, group: Group) -> list[Any]:
        """Returns the keys of the stacks it used."""
        free: list[Part] = []
        alike: dict[Any, list[tuple[StiefelParameter, Part]]] = {}
        narrow: list[tuple[Tensor, Tensor]] = []
        for p in group["params"]:
            if p.grad is None:
                continue
            part = self._part(p)
            if part.tensor is not p:
                narrow.append((p, part.tensor))
            if isinstance(p, StiefelParameter):
                alike.setdefault(self._stack_key(p, part, group), []).append((p, part))
            else:
                free.append(Part(part.tensor, part.grad.to(part.tensor.dtype), part.state))
        stacks = [self._stack(members) for members in alike.values()]
        self._step_free(free, stacks, group)
        for stack in stacks:
            self._step_stack(stack, group)
        if narrow:
            torch._foreach_copy_([p for p, _ in narrow], [master for _, master in narrow])
        return [tuple(map(id, stack.parameters)) for stack in stacks]

    def _step_free(self, free: list[Part], stacks: list[Stack], group: Group) -> None:
        rows = [stack.free_parts() for stack in stacks]
        if free or any(rows):
            self.free_step([*free, *(part for parts in rows for part in parts)], group)
        for stack, parts in zip(stacks, rows, strict=True):
            for part in parts:
                stack.put_free(part)

    def _part(self, p: Tensor) -> Part:
        """The tensor to step: p itself, or its float32 master."""
        state, dtype = self.state[p], working_dtype(p.dtype)
        assert p.grad is not None
        if p.dtype == dtype:
            state.pop("master", None)
            return Part(p, p.grad, state)
        if "master" not in state:
            state["master"] = p.to(dtype)
        master = state["master"]
        master.copy_(torch.where(master.to(p.dtype) == p, master, p))  # what somebody else has written counts
        return Part(master, p.grad, state)

    def _stack_key(self, p: StiefelParameter, part: Part, group: Group) -> Any:
        """Parameters of one key are stepped as one batch: all alike under `foreach`, each by itself otherwise."""
        layout = (id(part.state), p.blocks, p.rows, part.tensor.shape, part.tensor.dtype)
        if self._fitted.get(p) != layout:
            self._fit_state(p, part, group)
            self._fitted[p] = layout
        part.state["step"] += 1
        if not (part.tensor.is_cuda if group["foreach"] is None else group["foreach"]):
            return id(p)
        return p.shape, p.blocks, p.rows, part.tensor.dtype, part.tensor.device, part.state["step"]

    def _fit_state(self, p: StiefelParameter, part: Part, group: Group) -> None:
        """Begin a state where there is none for these blocks; follow the parameter to another precision."""
        tensor, state = part.tensor, part.state
        if not self._fits(p, tensor, state, group):
            master = {key: x for key, x in state.items() if key == "master"}
            state.clear()
            state.update(master, **self.new_state(wide(blocks_of(p, tensor)), group), step=0, free={})
        for key, x in state.items():
            if isinstance(x, Tensor) and key != "master" and x.dtype != tensor.dtype:
                state[key] = x.to(tensor.dtype)

    def _stack(self, members: list[tuple[StiefelParameter, Part]]) -> Stack:
        """These members as a stack: the one of the last step, if it still holds them."""
        parameters, parts = [p for p, _ in members], [part for _, part in members]
        key = tuple(map(id, parameters))
        stack = self._stacks.get(key)
        if stack is None or not stack.hold(parts):
            stack = self._stacks[key] = Stack(parameters, parts)
        return stack

    def _step_stack(self, stack: Stack, group: Group) -> None:
        start, stop = self.share_of(stack)
        if start == stop:
            stack.grads = None
            return
        X, G, state = stack.open(start, stop)
        scratch = None if stack.alone else G
        if group["maximize"]:
            G = scratch = torch.neg(G, out=scratch)
        try:
            kept = self.exact and group.get("inner_steps") is None
            if (kept and state["step"] % REFRESH == 1) or (self.starts_on_manifold and state["step"] == 1):
                self.refresh(X, state)
            self.stiefel_step(X, G, state, stiefel_lr(group), group, scratch)
        except (
            FloatingPointError,
            ValueError,
            torch.linalg.LinAlgError,
        ):  # nothing finite, or of full rank, is left
            if not self.is_shared(stack):
                raise self._overflow(stack.parameters[0]) from None
            X.fill_(math.nan)  # which all ranks will see
        stack.close()

    def _overflow(self, parameter: Tensor) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__}: {self.name_of(parameter)}: the step overflowed; lower the learning rate"
        )


def stiefel_lr(group: Group) -> float:
    """The learning rate of constrained blocks: `lr`, or `stiefel_lr` following the schedule that `lr` has gone through."""
    if group["stiefel_lr"] is None:
        return float(group["lr"])
    scheduled = float(group["lr"]) / group["reference_lr"] if group["reference_lr"] else 1.0
    return float(group["stiefel_lr"]) * scheduled


def all_finite(tensors: list[Tensor]) -> bool:
    return math.isfinite(total_norm(tensors)) or all(t.isfinite().all() for t in tensors)


def total_norm(tensors: list[Tensor]) -> float:
    """The sum of their norms: not finite where an entry is not, or where a norm overflows."""
    norms = torch._foreach_norm(tensors)
    together = len({n.device for n in norms}) == 1
    return torch.stack([n if together else n.cpu() for n in norms]).sum().item()


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {k: _to_device(v, device) for k, v in value.items()}
    if isinstance(value, Tensor):  # counters stay where torch keeps them
        return value.to(device, copy=True) if value.ndim else value.clone()
    return value


# ------------------------------------------------------------------------------- torch's own steps, for the free parts


class FreeSGD(StiefelOptimizer):
    """Free parameters by `torch.optim.SGD`."""

    def check(self, group: Group) -> None:
        super().check(group)
        self.require(group, "momentum", lambda x: 0 <= x < 1, "must be in [0, 1)")
        self.require(group, "dampening", lambda x: 0 <= x < 1, "must be in [0, 1)")

    def free_step(self, parts: list[Part], group: Group) -> None:
        buffers = [part.state.get("momentum_buffer") for part in parts]
        sgd(
            [part.tensor for part in parts],
            [part.grad for part in parts],
            buffers,
            foreach=group["foreach"],
            has_sparse_grad=False,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=False,
            maximize=group["maximize"],
        )
        if group["momentum"] != 0:
            for part, buffer in zip(parts, buffers, strict=True):
                part.state["momentum_buffer"] = buffer


class FreeAdam(StiefelOptimizer):
    """Free parameters by `torch.optim.Adam`."""

    def check(self, group: Group) -> None:
        super().check(group)
        self.require(
            group,
            "betas",
            lambda b: len(b) == 2 and all(0 <= x < 1 for x in b),
            "must be two numbers in [0, 1)",
        )
        self.require(group, "eps", lambda x: 0 < x < math.inf, "must be finite and > 0")
        if group["foreach"]:
            self.require(group, "lr", lambda lr: not isinstance(lr, Tensor), "must be a number under foreach")

    def free_step(self, parts: list[Part], group: Group) -> None:
        for part in parts:
            if "exp_avg" not in part.state:
                part.state["step"] = torch.tensor(0.0, dtype=torch.float32)
                part.state["exp_avg"] = torch.zeros_like(part.tensor, memory_format=torch.preserve_format)
                part.state["exp_avg_sq"] = torch.zeros_like(part.tensor, memory_format=torch.preserve_format)
        adam(
            [part.tensor for part in parts],
            [part.grad for part in parts],
            [part.state["exp_avg"] for part in parts],
            [part.state["exp_avg_sq"] for part in parts],
            [],
            [part.state["step"] for part in parts],
            foreach=group["foreach"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
