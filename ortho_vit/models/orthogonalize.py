"""Put the attention projections of any Vision Transformer on the Stiefel manifold.

    constraint   each head's W^Q, W^K ∈ ℝ^(d_k × d_model) ...                 blocks of a fused (3d, d) weight, h heads
    "within"     ... has orthonormal rows                                     2h
    "across"     ... is a slice of one matrix with orthonormal rows           2

With `preserve=True` the network computes what it did before.  Every block is split as W = P O (polar: P = (W Wᵀ)^½);
O becomes the constrained block and P a free core after it.  Attention that is a plain dot product only sees
qᵀk = (P_q O_q x)ᵀ(P_k O_k y) = (P_k P_q O_q x)ᵀ(O_k y), so there one core C = P_k P_q a head is enough, on q, and the
biases become P_k b_q and P_k⁻¹ b_k.  Where something else may happen to q or k first (a norm, a rotation), and
"across", where P mixes heads, each keeps a core of its own, and the biases stay.

`projections="qk+mlp"` constrains the MLPs as well: fc1 ∈ ℝ^(hidden × d_model) has orthonormal columns and fc2 orthonormal
rows, or the other way round where the hidden layer is the narrower one.
"""

from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import timm.layers
import torch
from torch import Tensor, nn

from ortho_vit.models.attention import Attention, Projection, find_attention
from ortho_vit.models.core import CoredLinear
from ortho_vit.parameter import StiefelParameter, check_blocks, constrain
from ortho_vit.stiefel import polar, random_stiefel

__all__ = ["Choice", "Constraint", "Init", "Projections", "orthogonalize", "resolve"]

Constraint = Literal["within", "across"] | None
Choice = (
    Constraint | Literal["none", "default"]
)  # "none" is None, for `timm.create_model` drops keywords that are None
Projections = Literal["q", "qk", "qkv", "qk+mlp"]
Init = Literal["polar", "random", "keep"]
Model = TypeVar("Model", bound=nn.Module)


def orthogonalize(
    model: Model,
    constraint: Constraint,
    *,
    projections: Projections = "qk",
    init: Init = "polar",
    preserve: bool = False,
) -> Model:
    """Constrain the attention projections of `model` in place, and return it.

    Args:
        constraint: "within" (each head's projection is orthonormal), "across" (all heads of a projection together), or
            None, which leaves the model as it is.
        projections: which of W^Q, W^K, W^V; "qk+mlp" adds both layers of every MLP, each as one block.
        init: "polar" takes the nearest orthonormal blocks, "random" uniform ones, "keep" the values as they are (for
            weights that are about to be loaded).
        preserve: keep the network's function, with a free core after each constrained projection (see above).  With
            init="keep" the cores are identities.

    Names and shapes in the state dict stay the same; `preserve` adds a `core` beside a `weight`.  What was done is
    noted in `model.orthogonal`.  If it raises, nothing was changed.
    """
    _check_arguments(constraint, projections, init, preserve)
    if constraint is None:
        return model
    attentions = find_attention(model)
    tasks = [task for a in attentions for task in _tasks(a, constraint, projections, preserve)]
    if not tasks:
        raise ValueError(
            f"orthogonalize: no attention of {type(model).__name__} projects any of {projections!r}"
        )
    if projections.endswith("+mlp"):
        tasks += _mlp_tasks(model)
    with torch.no_grad():
        if init != "keep":
            _check_values(tasks)
        changes = [_split(task, init) if preserve else _place(task, init) for task in tasks]
        for task, change in zip(tasks, changes, strict=True):
            _apply(task, change)
    model.orthogonal = {"constraint": constraint, "projections": projections, "preserve": preserve}  # type: ignore[assignment]
    return model


def resolve(choice: Choice, default: Constraint) -> Constraint:
    """The constraint that a keyword asks for."""
    if choice == "default":
        return default
    return None if choice == "none" else choice


def _check_arguments(constraint: object, projections: object, init: object, preserve: bool) -> None:
    rules = {
        "constraint": (constraint, ("within", "across", None)),
        "projections": (projections, get_args(Projections)),
        "init": (init, get_args(Init)),
    }
    for name, (value, allowed) in rules.items():
        if value not in allowed:
            raise ValueError(
                f"orthogonalize: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
            )
    if preserve and init == "random":
        raise ValueError(
            "orthogonalize: preserve=True keeps the weights' function, so init must be 'polar', not 'random'"
        )
    if preserve and projections == "qk+mlp":
        raise ValueError(
            "orthogonalize: preserve=True has no core for an MLP, so projections must be 'q', 'qk' or 'qkv', "
            "not 'qk+mlp'"
        )


# ------------------------------------------------------------------------------------------ what is to be done


@dataclass(frozen=True)
class Task:
    """Constrain the first `rows` rows of one weight as `blocks` blocks."""

    attention: Attention  # or an MLP, with the same fields
    projection: Projection
    blocks: int
    rows: int
    merged: bool  # preserve: the cores of q and k become one, on q

    @property
    def linear(self) -> nn.Linear:
        assert isinstance(self.projection.owner, nn.Linear)  # `_check_core` has seen to it
        return self.projection.owner

    @property
    def matrices(self) -> Tensor:
        """The constrained part of the weight, (blocks, r, d_model)."""
        return self.projection.weight.detach()[: self.rows].unflatten(0, (self.blocks, -1))


def _tasks(
    attention: Attention, constraint: Constraint, projections: Projections, preserve: bool
) -> list[Task]:
    merged = preserve and constraint == "within" and projections == "qk" and _is_plain(attention.module)
    tasks = []
    for projection in attention.projections:
        count = next(
            (i for i, part in enumerate(projection.parts) if part not in projections.partition("+")[0]),
            len(projection.parts),
        )
        if count:
            blocks = count * projection.heads if constraint == "within" else count
            task = Task(attention, projection, blocks, count * projection.dim, merged)
            _check(task, constraint)
            if preserve:
                _check_core(task)
            tasks.append(task)
    return tasks


def _mlp_tasks(model: nn.Module) -> list[Task]:
    """Both layers of every module with an fc1 and an fc2, each as a single block."""
    tasks = []
    for path, module in model.named_modules():
        layers = {name: getattr(module, name, None) for name in ("fc1", "fc2")}
        if not all(isinstance(layer, nn.Linear) for layer in layers.values()):
            continue
        prefix = f"{path}." if path else ""
        for name, layer in layers.items():
            assert isinstance(layer, nn.Linear)
            projection = Projection(f"{prefix}{name}.weight", layer, "weight", name, heads=1)
            owner = Attention(path, module, (projection,))
            tasks.append(Task(owner, projection, blocks=1, rows=layer.out_features, merged=False))
            _check_weight(tasks[-1])
    if not tasks:
        raise ValueError(
            f"orthogonalize: no MLP found in {type(model).__name__}; looked for modules with nn.Linear children "
            "named fc1 and fc2; use projections='qk'"
        )
    return tasks


def _check(task: Task, constraint: Constraint) -> None:
    _check_weight(task)
    weight, path = task.projection.weight, task.projection.path
    height, d_model, heads = task.rows // task.blocks, weight.shape[1], task.projection.heads
    if height > d_model:
        size = f"heads·d_k = {heads}·{height // heads}" if constraint == "across" else "d_k"
        remedy = "; use constraint='within'" if constraint == "across" and height // heads <= d_model else ""
        raise ValueError(
            f"orthogonalize: {path} cannot be orthonormal {constraint} heads: {size} = {height} rows do not fit in "
            f"d_model = {d_model} dimensions{remedy}"
        )


def _check_weight(task: Task) -> None:
    weight, path = task.projection.weight, task.projection.path
    if type(weight) not in (nn.Parameter, StiefelParameter):
        raise ValueError(f"orthogonalize: {path} is a {type(weight).__name__}, not a plain nn.Parameter")
    if isinstance(task.projection.owner, CoredLinear):
        raise ValueError(
            f"orthogonalize: {path} already has a core, from preserve=True; start from the original model"
        )
    check_blocks(weight, task.blocks, task.rows)


def _check_values(tasks: list[Task]) -> None:
    for task in tasks:
        weight, path = task.projection.weight, task.projection.path
        if weight.is_meta:
            raise ValueError(
                f"orthogonalize: {path} is on the meta device and has no values; use init='keep'"
            )
        if not weight.isfinite().all():
            raise ValueError(f"orthogonalize: {path} has entries that are not finite")


def _check_core(task: Task) -> None:
    """Refuse what has no place for a core: a forward that reads the weight and does not call the layer."""
    owner, module, path = task.projection.owner, task.attention.module, task.projection.path
    if not isinstance(owner, nn.Linear):
        raise ValueError(
            f"orthogonalize: preserve=True needs a place for a core after the projection, and {type(owner).__name__} "
            f"({task.attention.path}) has none; use preserve=False"
        )
    reads_weight = "weight" in getattr(type(module).forward, "__code__", _check_core.__code__).co_names
    if type(owner) is not nn.Linear or (reads_weight and not hasattr(module, "qkv_bias_separate")):
        raise ValueError(
            f"orthogonalize: preserve=True needs {path} to belong to an nn.Linear that is called, but "
            f"{type(module).__name__} reads the weight of its {type(owner).__name__}; use preserve=False"
        )


def _is_plain(module: nn.Module) -> bool:
    """Whether q and k meet in a dot product and nowhere else, so that only qᵀk matters."""
    same_forward = type(module).forward is timm.layers.Attention.forward
    return same_forward and isinstance(module.q_norm, nn.Identity) and isinstance(module.k_norm, nn.Identity)


# --------------------------------------------------------------------------------------------------- doing it


@dataclass(frozen=True)
class Change:
    matrices: Tensor | None = None  # new values of the constrained blocks; None keeps them
    core: Tensor | None = None
    bias: Tensor | None = None


def _place(task: Task, init: Init) -> Change:
    if init == "keep":
        return Change()
    W = task.matrices
    if init == "random":
        return Change(random_stiefel(*W.shape, dtype=W.dtype, device=W.device))
    try:
        return Change(polar(W))
    except ValueError as error:
        raise ValueError(
            f"orthogonalize: {task.projection.path}: {error}; init='random' starts afresh"
        ) from error


def _split(task: Task, init: Init) -> Change:
    """W = P O, in float64; P becomes the core.  A singular P is no obstacle: O is then one of many."""
    W, heads = task.matrices, task.projection.heads
    if init == "keep":
        I = torch.eye(W.shape[1], dtype=W.dtype, device=W.device)
        return Change(core=I.repeat(heads if task.merged else task.blocks, 1, 1))
    A, sigma, Bh = torch.linalg.svd(W.double(), full_matrices=False)
    O, P = A @ Bh, (A * sigma.unsqueeze(-2)) @ A.mT
    bias = None
    if task.merged:
        P_q, P_k = P[:heads], P[heads:]
        P, bias = P_k @ P_q, _merge_bias(task, P_k)
    return Change(O.to(W.dtype), P.to(W.dtype), bias)


def _merge_bias(task: Task, P_k: Tensor) -> Tensor | None:
    """(b_q, b_k) ↦ (P_k b_q, P_k⁻¹ b_k).

    The pseudo-inverse will do: b_k adds the same to a whole row of attention, which softmax drops.
    """
    bias = task.linear.bias
    if bias is None:
        return None
    new = bias.detach().to(torch.float64, copy=True)
    b_q, b_k = new[: task.rows].view(2, task.projection.heads, -1, 1)
    new[: task.rows] = torch.stack(
        [P_k @ b_q, torch.linalg.pinv(P_k, rtol=1e-6, hermitian=True) @ b_k]
    ).flatten()
    return new.to(bias.dtype)


def _apply(task: Task, change: Change) -> None:
    projection, module = task.projection, task.attention.module
    if change.matrices is not None:
        task.matrices.copy_(change.matrices)
    constrain(projection.owner, projection.name, blocks=task.blocks, rows=task.rows, init="keep")
    if change.bias is not None:
        task.linear.bias.copy_(change.bias)
    if change.core is not None:
        CoredLinear.convert(task.linear, change.core)
        if hasattr(module, "qkv_bias_separate"):
            # Its forward then calls the layer and adds the biases; it would read the weight past the core otherwise.
            module.qkv_bias_separate = True  # type: ignore[assignment]
