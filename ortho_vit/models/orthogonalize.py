"""Put the attention projections of any Vision Transformer on the Stiefel manifold.

    constraint   each head's W^Q, W^K ∈ ℝ^(d_k × d_model) ...                 blocks of a fused (3d, d) weight, h heads
    "within"     ... has orthonormal rows                                     2h
    g            ... is a slice of a matrix with orthonormal rows that        2h / g
                 holds g neighbouring heads
    "across"     ... is a slice of one matrix with orthonormal rows           2

With `preserve=True` the network computes what it did before.  Every block is split as W = P O (polar: P = (W Wᵀ)^½);
O becomes the constrained block and P a free core after it.  Attention that is a plain dot product only sees
qᵀk = (P_q O_q x)ᵀ(P_k O_k y) = (P_k P_q O_q x)ᵀ(O_k y), so there one core C = P_k P_q per head is enough, on q, and the
biases become P_k b_q and P_k⁻¹ b_k.  Where something else may happen to q or k first (a norm, a rotation), and where P
mixes heads, each keeps a core of its own, and the biases stay.

With `scale=True` each head has a learned scalar in place of a core, on q, so that it scales the head's logits.

`projections="qk+mlp"` constrains the MLPs as well: fc1 ∈ ℝ^(hidden × d_model) has orthonormal columns and fc2 orthonormal
rows, or the other way round where the hidden layer is the narrower one.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import timm.layers
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from ortho_vit.models.attention import Attention, Projection, find_attention
from ortho_vit.parameter import StiefelParameter, check_blocks, constrain, stiefel_parameters
from ortho_vit.stiefel import polar, random_stiefel

__all__ = ["Constraint", "CoredLinear", "Init", "Projections", "orthogonalize", "release"]

Constraint = Literal["within", "across"] | int | None
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
    scale: bool = False,
    verbose: bool = False,
) -> Model:
    """Constrain the attention projections of `model` in place, and return it.

    Args:
        constraint: "within" (each head's projection is orthonormal), "across" (all heads of a projection together), the
            number of neighbouring heads that share a block (1 is "within", all heads are "across"), or None, which
            leaves the model as it is.
        projections: which of W^Q, W^K, W^V; "qk+mlp" adds both layers of every MLP, each as one block.
        init: "polar" takes the nearest orthonormal blocks, "random" uniform ones, "keep" the values as they are (for
            weights that are about to be loaded).
        preserve: keep the network's function, with a free core after each constrained projection.  With
            init="keep" the cores are identities.
        scale: give each head a learned scalar, 1 at the start, that multiplies its logits.
        verbose: print how far the blocks of each weight moved and how well conditioned they were.

    Names and shapes in the state dict stay the same; `preserve` and `scale` add a `core` beside a `weight`.  The dictionary
    `model.orthogonal` records the options and, under "blocks", how far each block of each weight moved (relative to its
    Frobenius norm) and its condition number before.  If an error is raised, the model is unchanged.
    """
    check_constraint(constraint, projections, "orthogonalize")
    _check_options(projections, init, preserve, scale)
    if constraint is None:
        return model
    attentions = find_attention(model)
    options: dict[str, Any] = {"constraint": constraint, "projections": projections}
    options |= {"preserve": preserve, "scale": scale}
    tasks = [task for attention in attentions for task in _tasks(attention, **options)]
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
        blocks = [_moved(task, change) for task, change in zip(tasks, changes, strict=True) if init != "keep"]
        for task, change in zip(tasks, changes, strict=True):
            _apply(task, change)
    model.orthogonal = {**options, "blocks": blocks}  # type: ignore[assignment]
    if verbose:
        print(_describe(model.orthogonal))  # type: ignore[arg-type]
    return model


def release(model: Model) -> Model:
    """Make every constrained parameter free, with its values and cores multiplied into weights; return the model."""
    for module in model.modules():
        if isinstance(module, CoredLinear):
            module.fold()
    for _, parameter in list(stiefel_parameters(model)):
        del parameter.blocks, parameter.rows
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    model.__dict__.pop("orthogonal", None)
    return model


def check_constraint(constraint: Any, projections: Any, what: str) -> None:
    """Raise ValueError where `constraint` or `projections` is not one of the allowed values."""
    is_count = isinstance(constraint, int) and not isinstance(constraint, bool) and constraint >= 1
    if not is_count and constraint not in ("within", "across", None):
        raise ValueError(
            f"{what}: constraint must be 'within', 'across', None or the number of heads that share a block, "
            f"got {constraint!r}"
        )
    _check_choice("projections", projections, get_args(Projections), what)


def _check_choice(name: str, value: object, allowed: tuple[str, ...], what: str = "orthogonalize") -> None:
    if value not in allowed:
        raise ValueError(f"{what}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _check_options(projections: str, init: str, preserve: bool, scale: bool) -> None:
    _check_choice("init", init, get_args(Init))
    if preserve and init == "random":
        raise ValueError(
            "orthogonalize: preserve=True keeps the weights' function, so init must be 'polar', not 'random'"
        )
    if preserve and projections == "qk+mlp":
        raise ValueError(
            "orthogonalize: preserve=True has no core for an MLP, so projections must be 'q', 'qk' or 'qkv', "
            "not 'qk+mlp'"
        )
    if preserve and scale:
        raise ValueError("orthogonalize: the cores of preserve=True include a scale; use scale=False with it")


# -------------------------------------------------------------------------------------------------------- cores


class CoredLinear(nn.Linear):
    """x ↦ C O x + b, where `weight` holds O and `core` the diagonal blocks of C.

    `core` is (n, r, r), or (n,) for multiples of the identity.  It acts on the first `cored_rows` = n·r rows; the rows
    after them are used as they are.  It is multiplied into the weight and not applied to the output, which costs less as
    soon as there are d_model tokens in a batch.
    """

    core: nn.Parameter
    cored_rows: int

    @classmethod
    def convert(cls, linear: nn.Linear, core: Tensor, rows: int) -> None:
        """Turn `linear` into one, in place: it stays the same object, so hooks and references remain."""
        linear.__class__ = cls
        linear.register_parameter("core", nn.Parameter(core, requires_grad=linear.weight.requires_grad))
        linear.cored_rows = rows  # type: ignore[assignment]

    def cored_weight(self) -> Tensor:
        """The weight of the plain linear layer that computes the same."""
        core, rest = self.core, self.weight[self.cored_rows :]
        O = rearrange(self.weight[: self.cored_rows], "(n r) d -> n r d", n=core.shape[0])
        W = core @ O if core.ndim == 3 else core[:, None, None] * O
        return torch.cat([rearrange(W, "n r d -> (n r) d"), rest])

    @torch.no_grad()
    def fold(self) -> None:
        """Turn it into the plain linear layer that computes the same, in place."""
        self.weight.copy_(self.cored_weight())
        del self.core, self.cored_rows
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.cored_weight(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, core={tuple(self.core.shape)}"


# -------------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    """Constrain the first `rows` rows of one weight as `blocks` blocks."""

    attention: Attention  # or an MLP, with the same fields
    projection: Projection
    blocks: int
    rows: int
    merged: bool = False  # preserve: the cores of q and k become one, on q
    scaled: bool = False  # the first part is q, and each of its heads gets a scalar

    @property
    def linear(self) -> nn.Linear:
        assert isinstance(self.projection.owner, nn.Linear)  # `_check_core` has refused anything else
        return self.projection.owner

    @property
    def matrices(self) -> Tensor:
        """A writable view (blocks, r, d_model) of the constrained part of the weight."""
        return rearrange(self.projection.weight.detach()[: self.rows], "(b r) d -> b r d", b=self.blocks)


def _tasks(
    attention: Attention, *, constraint: Constraint, projections: Projections, preserve: bool, scale: bool
) -> list[Task]:
    merged = preserve and constraint in ("within", 1) and projections == "qk" and _is_plain(attention.module)
    wanted, tasks = projections.partition("+")[0], []
    for projection in attention.projections:
        parts = projection.parts
        count = next((i for i, part in enumerate(parts) if part not in wanted), len(parts))
        if count:
            blocks = count * projection.heads // _heads_per_block(projection, constraint)
            scaled = scale and parts[0] == "q"
            task = Task(attention, projection, blocks, count * projection.dim, merged, scaled)
            _check_weight(task)
            _check_fit(task, constraint)
            if scaled:
                _check_scale(task)
            if preserve or scaled:
                _check_core(task, "preserve" if preserve else "scale")
            tasks.append(task)
    return tasks


def _heads_per_block(projection: Projection, constraint: Constraint) -> int:
    heads = projection.heads
    if isinstance(constraint, str):
        return 1 if constraint == "within" else heads
    assert constraint is not None
    if heads % constraint:
        raise ValueError(
            f"orthogonalize: {projection.path} has {heads} heads, so the number of heads that share a block must divide "
            f"{heads}, got constraint={constraint}"
        )
    return constraint


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
            tasks.append(Task(owner, projection, blocks=1, rows=layer.out_features))
            _check_weight(tasks[-1])
    if not tasks:
        raise ValueError(
            f"orthogonalize: no MLP found in {type(model).__name__}; looked for modules with nn.Linear children "
            "named fc1 and fc2; use projections='qk'"
        )
    return tasks


def _check_fit(task: Task, constraint: Constraint) -> None:
    """Raise where a block has more rows than there are dimensions for them to be orthonormal in."""
    height, d_model = task.rows // task.blocks, task.projection.weight.shape[1]
    if height > d_model:
        d_k = task.projection.dim // task.projection.heads
        size = "d_k" if height == d_k else f"heads·d_k = {height // d_k}·{d_k}"
        remedy = "; use constraint='within'" if d_k <= d_model else ""
        how = f"in blocks of {constraint} heads" if isinstance(constraint, int) else f"{constraint} heads"
        raise ValueError(
            f"orthogonalize: {task.projection.path} cannot be orthonormal {how}: {size} = {height} rows do not fit in "
            f"d_model = {d_model} dimensions{remedy}"
        )


def _check_weight(task: Task) -> None:
    weight, path = task.projection.weight, task.projection.path
    if type(weight) not in (nn.Parameter, StiefelParameter):
        raise ValueError(f"orthogonalize: {path} is a {type(weight).__name__}, not a plain nn.Parameter")
    if isinstance(task.projection.owner, CoredLinear):
        raise ValueError(
            f"orthogonalize: {path} already has a core, from preserve=True or scale=True; start from the original model"
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


def _check_core(task: Task, option: str) -> None:
    """Raise where a core would have no effect: where the forward reads the weight instead of calling the layer."""
    owner, module, path = task.projection.owner, task.attention.module, task.projection.path
    if not isinstance(owner, nn.Linear):
        raise ValueError(
            f"orthogonalize: {option}=True needs a place for a core after the projection, and {type(owner).__name__} "
            f"({task.attention.path}) has none; use {option}=False"
        )
    if type(owner) is not nn.Linear or _reads_weight(module):
        raise ValueError(
            f"orthogonalize: {option}=True needs {path} to belong to an nn.Linear that is called, but "
            f"{type(module).__name__} reads the weight of its {type(owner).__name__}; use {option}=False"
        )


def _check_scale(task: Task) -> None:
    """Raise where each head of q is normalised after the projection, which would cancel its scale."""
    module, d_k = task.attention.module, task.projection.dim // task.projection.heads
    norm = getattr(module, "q_norm", None)
    weight = getattr(norm, "weight", None)
    if isinstance(weight, Tensor) and weight.numel() == d_k:
        raise ValueError(
            f"orthogonalize: scale=True would have no effect on {task.projection.path}: {type(module).__name__} "
            f"normalises each head of q after it ({type(norm).__name__}); use scale=False"
        )


def _reads_weight(module: nn.Module) -> bool:
    """Whether the module's forward uses `layer.weight` itself, which would bypass a core.

    A bypassed core would silently change the network's function.  The names in the bytecode show it without running the
    model, whose inputs are not known here.  timm's modules with `qkv_bias_separate` read the weight too, but call the layer
    where that attribute is set (see `_apply`).
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)  # past any decorator
    return code is not None and "weight" in code.co_names and not hasattr(module, "qkv_bias_separate")


def _is_plain(module: nn.Module) -> bool:
    """Whether q and k meet in a dot product and nowhere else, so that only qᵀk matters."""
    same_forward = type(module).forward is timm.layers.Attention.forward
    return same_forward and isinstance(module.q_norm, nn.Identity) and isinstance(module.k_norm, nn.Identity)


# ------------------------------------------------------------------------------------------------------ changes


@dataclass(frozen=True)
class Change:
    matrices: Tensor | None = None  # new values of the constrained blocks; None keeps them
    core: Tensor | None = None
    cored_rows: int = 0
    bias: Tensor | None = None


def _place(task: Task, init: Init) -> Change:
    W, heads, matrices = task.matrices, task.projection.heads, None
    if init == "random":
        matrices = random_stiefel(*W.shape, dtype=W.dtype, device=W.device)
    elif init == "polar":
        try:
            matrices = polar(W)
        except ValueError as error:
            raise ValueError(
                f"orthogonalize: {task.projection.path}: {error}; init='random' starts from scratch"
            ) from error
    if not task.scaled:
        return Change(matrices)
    return Change(matrices, torch.ones(heads, dtype=W.dtype, device=W.device), task.projection.dim)


def _split(task: Task, init: Init) -> Change:
    """W = P O, in float64; P becomes the core.  P may be singular: O is then one of many."""
    W, heads = task.matrices, task.projection.heads
    rows = task.projection.dim if task.merged else task.rows
    if init == "keep":
        I = torch.eye(W.shape[1], dtype=W.dtype, device=W.device)
        return Change(core=I.repeat(heads if task.merged else task.blocks, 1, 1), cored_rows=rows)
    A, sigma, Bh = torch.linalg.svd(W.double(), full_matrices=False)
    O, P = A @ Bh, (A * sigma.unsqueeze(-2)) @ A.mT
    bias = None
    if task.merged:
        P_q, P_k = rearrange(P, "(part head) i j -> part head i j", part=2)
        P, bias = P_k @ P_q, _merge_bias(task, P_k)
    return Change(O.to(W.dtype), P.to(W.dtype), rows, bias)


def _merge_bias(task: Task, P_k: Tensor) -> Tensor | None:
    """(b_q, b_k) ↦ (P_k b_q, P_k⁻¹ b_k).

    The pseudo-inverse is enough: b_k adds the same number to a whole row of logits, which softmax removes.
    """
    bias = task.linear.bias
    if bias is None:
        return None
    new = bias.detach().to(torch.float64, copy=True)
    heads = task.projection.heads
    b_q, b_k = rearrange(new[: task.rows], "(part head r) -> part head r 1", part=2, head=heads)
    merged = torch.stack([P_k @ b_q, torch.linalg.pinv(P_k, rtol=1e-6, hermitian=True) @ b_k])
    new[: task.rows] = rearrange(merged, "part head r 1 -> (part head r)")
    return new.to(bias.dtype)


def _apply(task: Task, change: Change) -> None:
    projection, module = task.projection, task.attention.module
    if change.matrices is not None:
        task.matrices.copy_(change.matrices)
    constrain(projection.owner, projection.name, blocks=task.blocks, rows=task.rows, init="keep")
    if change.bias is not None:
        task.linear.bias.copy_(change.bias)
    if change.core is not None:
        CoredLinear.convert(task.linear, change.core, change.cored_rows)
        if hasattr(module, "qkv_bias_separate"):
            # Its forward then calls the layer and adds the biases; it would read the weight past the core otherwise.
            module.qkv_bias_separate = True  # type: ignore[assignment]


# ----------------------------------------------------------------------------------------------------- report


def _moved(task: Task, change: Change) -> dict[str, Any]:
    """For each block of a weight |O − W| / |W| (Frobenius), and the condition number of W."""
    W, O = task.matrices.double(), change.matrices
    assert O is not None
    moved = torch.linalg.matrix_norm(O.double() - W) / torch.linalg.matrix_norm(W)
    gram = W @ W.mT if W.shape[-2] <= W.shape[-1] else W.mT @ W
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0)  # float64: right for condition numbers up to 1e7
    condition = (eigenvalues[..., -1] / eigenvalues[..., 0]).sqrt()
    return {"name": task.projection.path, "moved": moved.tolist(), "condition": condition.tolist()}


def _describe(done: dict[str, Any]) -> str:
    rows = [
        f"{block['name']}: {len(block['moved'])} blocks moved by {max(block['moved']):.2f} of their norm at most, "
        f"condition numbers up to {max(block['condition']):.3g}"
        for block in done["blocks"]
    ]
    if rows and done["preserve"]:
        rows.append("preserve=True: the network computes what it did before")
    elif rows:
        rows.append("the network's function has changed; preserve=True would keep it")
    return "\n".join(rows) or "constrained with the values as they are"
