"""Where a model's attention keeps its projections, found by structure and not by class.

An attention is a module that owns linear maps called q, k and v, apart or fused, and knows how many heads it has:

    qkv                       timm's ViT, DeiT, DINOv2, SigLIP, BEiT, Swin; torchvision's Swin
    q_proj, k_proj, v_proj    timm's EVA, DINOv3
    q, kv                     timm's attention pool, PVT v2
    qk, v                     ConViT, TNT
    q, k, v / wq, wk, wv      CaiT, MViT v2, CrossViT
    query, key, value         transformers' BERT, DeiT, BEiT
    q_proj, k_proj, v_proj    transformers' ViT, DINOv2, CLIP, and Llama, Qwen2, ... with fewer heads for k and v
    c_attn (q_attn)           GPT-2: q, k, v (or k, v beside q_attn), after `conv1d_to_linear`
    in_proj_weight            nn.MultiheadAttention, so torchvision's ViT

The rows of a fused weight are ordered (part, head, d_k): all of q, then all of k, then all of v.  A module that looks
like attention but has another layout, such as gate, q, k and v in one weight, raises an error that names it: skipping it
would leave a part of the model unconstrained.
"""

import re
from dataclasses import dataclass
from typing import Any, TypeVar

from einops import rearrange
from torch import Tensor, nn

__all__ = ["Attention", "Projection", "conv1d_to_linear", "find_attention", "join_path"]

Model = TypeVar("Model", bound=nn.Module)

PARTS = {"qkv": "qkv", "qk": "qk", "kv": "kv", "q": "q", "k": "k", "v": "v"}
PARTS |= {"q_proj": "q", "k_proj": "k", "v_proj": "v", "wq": "q", "wk": "k", "wv": "v"}
PARTS |= {"query": "q", "key": "k", "value": "v", "c_attn": "qkv", "q_attn": "q"}
HEAD_COUNTS = ("num_heads", "heads", "num_attention_heads", "n_head", "n_heads")
FUSED = re.compile("q.?k|query.?key", re.IGNORECASE)  # in the name of a layer: it holds both, in some order


@dataclass(frozen=True)
class Projection:
    """A weight whose rows are the projections named by `parts`, one after the other, each of `heads` equal heads."""

    path: str  # of the parameter, as in the state dict
    owner: Any  # an nn.Linear, or the nn.MultiheadAttention itself
    name: str  # of the parameter in its owner
    parts: str  # "qkv", "kv", "q", ...
    heads: int

    @property
    def weight(self) -> Tensor:
        return getattr(self.owner, self.name)

    @property
    def dim(self) -> int:
        """The rows of each part: heads · d_k."""
        return self.weight.shape[0] // len(self.parts)

    @property
    def d_k(self) -> int:
        return self.dim // self.heads

    def heads_of(self, part: str) -> Tensor:
        """The rows of "q", "k" or "v", one block for each head: a view (heads, d_k, d_model) of the weight."""
        W = rearrange(self.weight, "(part head d_k) n -> part head d_k n", d_k=self.d_k, head=self.heads)
        return W[self.parts.index(part)]


@dataclass(frozen=True)
class Attention:
    path: str
    module: nn.Module
    projections: tuple[Projection, ...]


def join_path(*names: str) -> str:
    """The path of a parameter or module; the path of the model itself is empty."""
    return ".".join(filter(None, names))


def find_attention(model: nn.Module) -> list[Attention]:
    """Every attention of the model, in the order of its modules."""
    found = [attention for path, module in model.named_modules() if (attention := _attention(path, module))]
    _refuse_unknown(model, found)
    if not found:
        raise ValueError(
            f"orthogonalize: no attention found in {type(model).__name__}; looked for nn.MultiheadAttention and for "
            f"modules with num_heads and nn.Linear children named {', '.join(PARTS)}"
        )
    return found


def _attention(path: str, module: nn.Module) -> Attention | None:
    if isinstance(module, nn.MultiheadAttention):
        names = {"in_proj_weight": "qkv", "q_proj_weight": "q", "k_proj_weight": "k", "v_proj_weight": "v"}
        weights = [name for name in names if getattr(module, name) is not None]
        found = [Projection(join_path(path, x), module, x, names[x], module.num_heads) for x in weights]
        return Attention(path, module, tuple(found))
    children = [(name, child) for name, child in module.named_children() if name in PARTS]
    children = [(name, child) for name, child in children if not isinstance(child, nn.Identity)]
    held = "".join(_parts(module, name) for name, _ in children)
    if "k" not in held or ("q" not in held and _head_count(module) is None):
        return None
    return Attention(path, module, tuple(_projection(path, module, *child) for child in children))


def _parts(module: nn.Module, name: str) -> str:
    """Which projections a child holds.  The cross-attention of GPT-2 has q_attn for q, and c_attn for k and v."""
    return "kv" if name == "c_attn" and hasattr(module, "q_attn") else PARTS[name]


def _projection(path: str, module: nn.Module, name: str, child: nn.Module) -> Projection:
    """The child as a projection, if its rows are ordered (part, head, d_k)."""
    what, parts = f"orthogonalize: {join_path(path, name)} of {type(module).__name__}", _parts(module, name)
    num_heads = _head_count(module)
    if _is_conv1d(child):
        raise ValueError(
            f"{what} is a {type(child).__name__}, whose weight is stored as (in, out): its heads are columns, and only "
            "blocks of rows can be constrained; call ortho_vit.models.conv1d_to_linear(model) first"
        )
    if not isinstance(child, nn.Linear):
        raise ValueError(f"{what} is a {type(child).__name__}; only an nn.Linear can be constrained")
    if num_heads is None:
        raise ValueError(f"{what}: the module does not say its number of heads (num_heads or heads)")
    interleaved = hasattr(module, "key_dim") or hasattr(module, "multi_query")  # (head, part, d_k)
    if len(parts) > 1 and (interleaved or getattr(module, "head_first", False)):
        raise ValueError(
            f"{what} is ordered head by head (q, k and v interleaved); only (q, k, v), each by heads, is known"
        )
    dim, remainder = divmod(child.out_features, len(parts))
    # heads · d_k is num_heads · head_dim, or the number of inputs of a layer: the output projection takes v
    widths = {layer.in_features for layer in module.children() if isinstance(layer, nn.Linear)}
    head_dim, heads = getattr(module, "head_dim", None), num_heads
    if isinstance(head_dim, int):
        widths.add(num_heads * head_dim)
        heads = dim // head_dim  # grouped queries: fewer for k
    divides = not remainder and heads and not dim % heads and not (heads % num_heads and num_heads % heads)
    if parts == "q" and heads != num_heads:
        raise ValueError(
            f"{what} has {child.out_features} rows for {num_heads} heads of d_k = {head_dim}: it holds more than q"
        )
    if not divides or (len(parts) > 1 and dim not in widths):
        raise ValueError(
            f"{what} has {child.out_features} rows, which are not {len(parts)} × heads × d_k for {num_heads} heads"
        )
    return Projection(join_path(path, name, "weight"), child, "weight", parts, heads)


def _head_count(module: nn.Module) -> int | None:
    """The number of heads (of q, where k has fewer) in the module, or in its configuration if it has a head_dim."""
    holders = [module, getattr(module, "config", None)] if hasattr(module, "head_dim") else [module]
    counts = (getattr(holder, name, None) for holder in holders for name in HEAD_COUNTS)
    return next((n for n in counts if isinstance(n, int) and n > 0), None)


def _refuse_unknown(model: nn.Module, found: list[Attention]) -> None:
    """Raise for a module with heads and either a fused layer of an unknown name, or a scale and no known projections."""
    for path, module in model.named_modules():
        has_heads = _head_count(module) is not None
        if isinstance(module, nn.MultiheadAttention) or not (has_heads or hasattr(module, "config")):
            continue
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and FUSED.search(name) and name not in PARTS:
                raise ValueError(
                    f"orthogonalize: {join_path(path, name)} of {type(module).__name__} holds q and k in an order that "
                    "is not known; call constrain(module, blocks=..., rows=...) on it, or name it qkv if that is its order"
                )
        known = any(a.path == path or a.path.startswith(path + ".") or not path for a in found)
        has_weights = any(p.ndim > 1 for p in module.parameters())
        if has_heads and hasattr(module, "scale") and has_weights and not known:
            raise ValueError(
                f"orthogonalize: {path} ({type(module).__name__}) has heads but no nn.Linear named "
                f"{', '.join(PARTS)}, so its layout is not known"
            )


# ------------------------------------------------------------------------------------------------ GPT-2's layers


def conv1d_to_linear(model: Model) -> Model:
    """Replace the Conv1D layers that hold q, k and v (GPT-2's c_attn) by nn.Linear, in place; return the model.

    The model computes the same function.  Its state dict has the original layout: weights are transposed to (in, out) when
    it is saved and back when it is loaded, so checkpoints also fit the original model.  Call it before an optimizer is
    given the parameters.
    """
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if name in PARTS and _is_conv1d(child):
                setattr(owner, name, _transposed(child))
    return model


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is a linear map with a weight (in, out), as `transformers.pytorch_utils.Conv1D`."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and getattr(module, "nf", None) == weight.shape[1]


def _transposed(layer: nn.Module) -> nn.Linear:
    weight: Any = layer.weight
    inputs, outputs = weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(weight.detach().T.contiguous(), requires_grad=weight.requires_grad)
    linear.bias = layer.bias  # type: ignore[assignment]
    linear.train(layer.training)
    linear.register_state_dict_post_hook(_transpose_weight)
    linear.register_load_state_dict_pre_hook(_transpose_weight)
    return linear


def _transpose_weight(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    key = f"{prefix}weight"
    if key in state:
        state[key] = state[key].T.contiguous()
