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
from typing import Any, Literal, get_args

import timm.layers
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from ortho_vit.models.attention import Attention, Model, Projection, find_attention, join_path
from ortho_vit.parameter import StiefelParameter, check_blocks, constrain, stiefel_parameters
from ortho_vit.stiefel import polar, random_stiefel

__all__ = ["Constraint", "CoredLinear", "Init", "Projections", "orthogonalize", "release"]

Constraint = Literal["within", "across"] | int | None
Projections = Literal["q", "qk", "qkv", "qk+mlp"]
Init = Literal["polar", "random", "keep"]


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
        scale: give each head a learned scalar, 1 at the start, that multiplies its queries, and so its logits.
        verbose: print how far the blocks of each weight moved and how well conditioned they were.

    Names and shapes in the state dict stay the same; `preserve` and `scale` add a `core` beside a `weight`.  The dictionary
    `model.orthogonal` records the options and, under "blocks", how far each block of each weight moved (relative to its
    Frobenius norm) and its condition number before.  If an error is raised, the model is unchanged.
    """
    check_constraint(constraint, projections, "orthogonalize")
    _check_options(projections, init, preserve, scale)
    if constraint is None:
        return model
    options: dict[str, Any] = {"constraint": constraint, "projections": projections}
    options |= {"preserve": preserve, "scale": scale}
    tasks = [task for attention in find_attention(model) for task in _tasks(attention, **options)]
    if not tasks:
        what = f"no attention of {type(model).__name__} projects any of {projections!r}"
        raise ValueError(f"orthogonalize: {what}")
    if projections == "qk+mlp":
        tasks += _mlp_tasks(model)
    with torch.no_grad():
        values = [_new_values(task, init) for task in tasks]  # nothing is written until all are there
        pairs = list(zip(tasks, values, strict=True))
        moved = [_moved(task, matrices) for task, (matrices, _, _) in pairs if init != "keep"]
        for task, new in pairs:
            _apply(task, *new)
    _free_others(model, tasks)
    model.orthogonal = {**options, "blocks": moved}  # type: ignore[assignment]
    if verbose:
        print(_describe(moved, preserve))
    return model


def _free_others(model: nn.Module, tasks: list["Task"]) -> None:
    """Make free what an earlier call has constrained and this one has not."""
    earlier = getattr(model, "orthogonal", None)
    if earlier is None:
        return
    projections = [p for attention in find_attention(model) for p in attention.projections]
    if earlier["projections"] == "qk+mlp":
        projections += [task.projection for task in _mlp_tasks(model)]
    chosen = {id(task.projection.weight) for task in tasks}
    for projection in projections:
        if isinstance(projection.weight, StiefelParameter) and id(projection.weight) not in chosen:
            _make_free(projection.weight)


def _make_free(parameter: StiefelParameter) -> None:
    del parameter.blocks, parameter.rows
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def release(model: Model) -> Model:
    """Make every constrained parameter free, with its values and cores multiplied into weights; return the model."""
    for module in model.modules():
        if isinstance(module, CoredLinear):
            module.fold()
    for _, parameter in list(stiefel_parameters(model)):
        _make_free(parameter)
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


def _check_choice(name: str, value: object, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise ValueError(f"{what}: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _check_options(projections: str, init: str, preserve: bool, scale: bool) -> None:
    _check_choice("init", init, get_args(Init), "orthogonalize")
    if not preserve:
        return
    if init == "random":
        rule = "preserve=True keeps the weights' function, so init must be 'polar', not 'random'"
        raise ValueError(f"orthogonalize: {rule}")
    if projections == "qk+mlp":
        rule = "preserve=True has no core for an MLP, so projections must be 'q', 'qk' or 'qkv', not 'qk+mlp'"
        raise ValueError(f"orthogonalize: {rule}")
    if scale:
        raise ValueError("orthogonalize: the cores of preserve=True include a scale; use scale=False with it")


# -------------------------------------------------------------------------------------------------------- cores


class CoredLinear(nn.Linear):
    """x ↦ C O x + b, where `weight` holds O and `core` the diagonal blocks of C.

    `core` is (n, r, r), or (n,) for multiples of the identity, which multiply b as well: they scale the output.  It acts on
    the first `cored_rows` = n·r rows; the rows after them are used as they are.  It is multiplied into the weight and not
    applied to the output, which costs less as soon as there are d_model tokens in a batch.
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

    def cored_bias(self) -> Tensor | None:
        if self.bias is None or self.core.ndim == 3:
            return self.bias
        scaled, rest = self.bias[: self.cored_rows], self.bias[self.cored_rows :]
        scaled = rearrange(
            self.core[:, None] * rearrange(scaled, "(n r) -> n r", n=len(self.core)), "n r -> (n r)"
        )
        return torch.cat([scaled, rest])

    @torch.no_grad()
    def fold(self) -> None:
        """Turn it into the plain linear layer that computes the same, in place."""
        if (bias := self.cored_bias()) is not None:
            self.bias.copy_(bias)
        self.weight.copy_(self.cored_weight())
        del self.core, self.cored_rows
        self.__class__ = nn.Linear  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.cored_weight(), self.cored_bias())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, core={tuple(self.core.shape)}"


# -------------------------------------------------------------------------------------------------------- tasks

# A scalar for each head of q; with preserve=True a matrix for each block, or one for q and k of each head, on q
Core = Literal["scale", "own", "merged"] | None


@dataclass(frozen=True)
class Task:
    """Constrain the first `rows` rows of one weight as `blocks` blocks."""

    module: nn.Module  # the attention or the MLP
    projection: Projection
    blocks: int
    rows: int
    core: Core = None

    @property
    def matrices(self) -> Tensor:
        """A writable view (blocks, r, d_model) of the constrained part of the weight."""
        return rearrange(self.projection.weight.detach()[: self.rows], "(b r) d -> b r d", b=self.blocks)


def _tasks(
    attention: Attention, *, constraint: Constraint, projections: Projections, preserve: bool, scale: bool
) -> list[Task]:
    wanted, tasks = projections.removesuffix("+mlp"), []
    merged = constraint in ("within", 1) and wanted == "qk" and _is_plain(attention.module)
    for projection in attention.projections:
        count = sum(part in wanted for part in projection.parts)  # the first ones, as parts are ordered
        if not count:
            continue
        blocks = count * projection.heads // _heads_per_block(projection, constraint)
        core: Core = None
        if preserve:
            core = "merged" if merged else "own"
        elif scale and "q" in projection.parts:
            core = "scale"
        task = Task(attention.module, projection, blocks, count * projection.dim, core)
        _check_weight(task)
        _check_fit(task, constraint)
        _check_core(task)
        tasks.append(task)
    return tasks


def _is_plain(module: nn.Module) -> bool:
    """Whether q and k meet in a dot product and nowhere else, so that only qᵀk matters."""
    same_forward = type(module).forward is timm.layers.Attention.forward
    return same_forward and isinstance(module.q_norm, nn.Identity) and isinstance(module.k_norm, nn.Identity)


def _heads_per_block(projection: Projection, constraint: Constraint) -> int:
    heads: Any = {"within": 1, "across": projection.heads}.get(str(constraint), constraint)
    if projection.heads % heads:
        raise ValueError(
            f"orthogonalize: {projection.path} has {projection.heads} heads, so the number of heads that share a block "
            f"must divide {projection.heads}, got constraint={constraint}"
        )
    return heads


def _mlp_tasks(model: nn.Module) -> list[Task]:
    """Both layers of every module with an fc1 and an fc2, each as a single block."""
    tasks = []
    for path, module in model.named_modules():
        layers = {name: getattr(module, name, None) for name in ("fc1", "fc2")}
        if not all(isinstance(layer, nn.Linear) for layer in layers.values()):
            continue
        for name, layer in layers.items():
            projection = Projection(join_path(path, name, "weight"), layer, "weight", parts="m", heads=1)
            tasks.append(Task(module, projection, blocks=1, rows=projection.dim))
            _check_weight(tasks[-1])
    if not tasks:
        raise ValueError(
            f"orthogonalize: no MLP found in {type(model).__name__}; looked for modules with nn.Linear children "
            "named fc1 and fc2; use projections='qk'"
        )
    return tasks


def _check_weight(task: Task) -> None:
    weight, path = task.projection.weight, task.projection.path
    if type(weight) not in (nn.Parameter, StiefelParameter):
        raise ValueError(f"orthogonalize: {path} is a {type(weight).__name__}, not a plain nn.Parameter")
    if isinstance(task.projection.owner, CoredLinear):
        raise ValueError(
            f"orthogonalize: {path} already has a core, from preserve=True or scale=True; start from the original model"
        )
    check_blocks(weight, task.blocks, task.rows)


def _check_fit(task: Task, constraint: Constraint) -> None:
    """Raise where a block has more rows than there are dimensions for them to be orthonormal in."""
    height, d_model, d_k = task.rows // task.blocks, task.projection.weight.shape[1], task.projection.d_k
    if height > d_model:
        size = "d_k" if height == d_k else f"heads·d_k = {height // d_k}·{d_k}"
        remedy = "; use constraint='within'" if d_k <= d_model else ""
        how = f"in blocks of {constraint} heads" if isinstance(constraint, int) else f"{constraint} heads"
        raise ValueError(
            f"orthogonalize: {task.projection.path} cannot be orthonormal {how}: {size} = {height} rows do not fit in "
            f"d_model = {d_model} dimensions{remedy}"
        )


def _check_core(task: Task) -> None:
    """Raise where a core would have no effect.

    A norm of each head cancels its scale.  A forward that reads the weight instead of calling the layer bypasses a core:
    its bytecode names the attributes that it reads; to run it would need inputs, which are not known here.  timm's modules
    with `qkv_bias_separate` read the weight only where that is False, and `_apply` sets it.
    """
    if task.core is None:
        return
    owner, module, path = task.projection.owner, task.module, task.projection.path
    option = "scale" if task.core == "scale" else "preserve"
    norm = getattr(module, "q_norm", None)
    norm_weight = getattr(norm, "weight", None)
    if option == "scale" and isinstance(norm_weight, Tensor) and norm_weight.numel() == task.projection.d_k:
        raise ValueError(
            f"orthogonalize: scale=True would have no effect on {path}: {type(module).__name__} "
            f"normalises each head of q after it ({type(norm).__name__}); use scale=False"
        )
    if not isinstance(owner, nn.Linear):
        raise ValueError(
            f"orthogonalize: {option}=True needs a place for a core after the projection, and {type(owner).__name__} "
            f"({path.rpartition('.')[0]}) has none; use {option}=False"
        )
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)  # past any decorator
    reads = code is not None and "weight" in code.co_names and not hasattr(module, "qkv_bias_separate")
    if type(owner) is not nn.Linear or reads:
        raise ValueError(
            f"orthogonalize: {option}=True needs {path} to belong to an nn.Linear that is called, but "
            f"{type(module).__name__} reads the weight of its {type(owner).__name__}; use {option}=False"
        )


# ------------------------------------------------------------------------------------------------------ values

# Of the blocks, the core and, where it changes, the bias
Values = tuple[Tensor, Tensor | None, Tensor | None]


def _new_values(task: Task, init: Init) -> Values:
    W, projection, core = task.matrices, task.projection, None
    if task.core == "scale":
        core = W.new_ones(projection.heads)
    elif task.core:
        count = projection.heads if task.core == "merged" else task.blocks
        core = torch.eye(W.shape[1], dtype=W.dtype, device=W.device).repeat(count, 1, 1)
    if init == "keep":
        return W, core, None
    what = f"orthogonalize: {projection.path}"
    if W.is_meta:
        raise ValueError(f"{what} is on the meta device and has no values; use init='keep'")
    if not projection.weight.isfinite().all():
        raise ValueError(f"{what} has entries that are not finite")
    if task.core in ("own", "merged"):
        return _split(task)
    if init == "random":
        return random_stiefel(*W.shape, dtype=W.dtype, device=W.device), core, None
    try:
        return polar(W), core, None
    except ValueError as error:
        raise ValueError(f"{what}: {error}; init='random' starts from scratch") from error


def _split(task: Task) -> Values:
    """W = P O, in float64; P becomes the core.  P may be singular: O is then one of many.

    With a merged core, b_q and b_k become P_k b_q and P_k⁻¹ b_k.  The pseudo-inverse is enough: b_k adds the same number
    to a whole row of logits, which softmax removes.
    """
    W, bias = task.matrices, task.projection.owner.bias
    A, sigma, Bh = torch.linalg.svd(W.double(), full_matrices=False)
    O, P = (A @ Bh).to(W.dtype), (A * sigma.unsqueeze(-2)) @ A.mT
    if task.core == "own":
        return O, P.to(W.dtype), None
    P_q, P_k = rearrange(P, "(part head) i j -> part head i j", part=2)
    core = (P_k @ P_q).to(W.dtype)
    if bias is None:
        return O, core, None
    new = bias.detach().to(torch.float64, copy=True)
    b_q, b_k = rearrange(new[: task.rows], "(part head r) -> part head r 1", part=2, head=len(core))
    merged = torch.stack([P_k @ b_q, torch.linalg.pinv(P_k, rtol=1e-6, hermitian=True) @ b_k])
    new[: task.rows] = rearrange(merged, "part head r 1 -> (part head r)")
    return O, core, new.to(bias.dtype)


def _apply(task: Task, matrices: Tensor, core: Tensor | None, bias: Tensor | None) -> None:
    projection, module = task.projection, task.module
    task.matrices.copy_(matrices)
    constrain(projection.owner, projection.name, blocks=task.blocks, rows=task.rows, init="keep")
    if bias is not None:
        projection.owner.bias.copy_(bias)
    if core is not None:
        CoredLinear.convert(projection.owner, core, task.rows if task.core == "own" else projection.dim)
        if hasattr(module, "qkv_bias_separate"):
            # Its forward then calls the layer and adds the biases; it would read the weight past the core otherwise.
            module.qkv_bias_separate = True  # type: ignore[assignment]


def _moved(task: Task, matrices: Tensor) -> dict[str, Any]:
    """For each block of a weight |O − W| / |W| (Frobenius), and the condition number of W."""
    W, O = task.matrices.double(), matrices.double()
    moved = torch.linalg.matrix_norm(O - W) / torch.linalg.matrix_norm(W)
    gram = W @ W.mT if W.shape[-2] <= W.shape[-1] else W.mT @ W
    eigenvalues = torch.linalg.eigvalsh(gram).clamp_min(0)  # float64: right for condition numbers up to 1e7
    condition = (eigenvalues[..., -1] / eigenvalues[..., 0]).sqrt()
    return {"name": task.projection.path, "moved": moved.tolist(), "condition": condition.tolist()}


def _describe(weights: list[dict[str, Any]], preserve: bool) -> str:
    if not weights:
        return "constrained with the values as they are"
    rows = [
        f"{weight['name']}: {len(weight['moved'])} blocks moved by {max(weight['moved']):.2f} of their norm at most, "
        f"condition numbers up to {max(weight['condition']):.3g}"
        for weight in weights
    ]
    changed = "the network's function has changed; preserve=True would keep it"
    same = "preserve=True: the network computes what it did before"
    return "\n".join([*rows, same if preserve else changed])
