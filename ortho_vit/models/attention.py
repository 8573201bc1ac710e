"""Where a model's attention keeps its projections, found by structure and not by class.

An attention is a module that owns linear maps called q, k and v, apart or fused, and knows how many heads it has:

    qkv                       timm's ViT, DeiT, DINOv2, SigLIP, BEiT, Swin; torchvision's Swin
    q_proj, k_proj, v_proj    timm's EVA, DINOv3
    q, kv                     timm's attention pool, PVT v2
    qk, v                     ConViT, TNT
    q, k, v / wq, wk, wv      CaiT, MViT v2, CrossViT
    query, key, value         Hugging Face's ViT, DeiT, BEiT
    in_proj_weight            nn.MultiheadAttention, so torchvision's ViT

The rows of a fused weight are ordered (part, head, d_k): all of q, then all of k, then all of v.  A module that looks
like attention and has another layout, such as gate, q, k and v in one weight, is refused by name: skipping it would
leave a part of the model unconstrained.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

__all__ = ["Attention", "Projection", "find_attention"]

PARTS = {"qkv": "qkv", "qk": "qk", "kv": "kv", "q": "q", "k": "k", "v": "v"}
PARTS |= {"q_proj": "q", "k_proj": "k", "v_proj": "v", "wq": "q", "wk": "k", "wv": "v"}
PARTS |= {"query": "q", "key": "k", "value": "v"}
HEAD_COUNTS = ("num_heads", "heads", "num_attention_heads")
FUSED = re.compile("q.?k", re.IGNORECASE)  # in the name of a layer: it holds both, in some order


@dataclass(frozen=True)
class Projection:
    """A weight whose rows are the projections named by `parts`, one after the other, each of `heads` equal heads."""

    path: str  # of the parameter, as in the state dict
    owner: nn.Module  # an nn.Linear, or the nn.MultiheadAttention itself
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


@dataclass(frozen=True)
class Attention:
    path: str
    module: nn.Module
    projections: tuple[Projection, ...]


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
        return Attention(path, module, tuple(_multihead_projections(path, module)))
    children = {name: child for name, child in module.named_children() if name in PARTS}
    children = {name: child for name, child in children.items() if not isinstance(child, nn.Identity)}
    held = "".join(PARTS[name] for name in children)
    if "k" not in held or ("q" not in held and _head_count(module) is None):
        return None
    projections = (_projection(path, module, name, child) for name, child in children.items())
    return Attention(path, module, tuple(projections))


def _multihead_projections(path: str, module: nn.MultiheadAttention) -> Iterator[Projection]:
    if module.in_proj_weight is not None:
        yield Projection(_join(path, "in_proj_weight"), module, "in_proj_weight", "qkv", module.num_heads)
        return
    for part in "qkv":
        name = f"{part}_proj_weight"
        yield Projection(_join(path, name), module, name, part, module.num_heads)


def _projection(path: str, module: nn.Module, name: str, child: nn.Module) -> Projection:
    """The child as a projection, if its rows are ordered (part, head, d_k)."""
    what, parts = f"orthogonalize: {_join(path, name)} of {type(module).__name__}", PARTS[name]
    num_heads = _head_count(module)
    if not isinstance(child, nn.Linear):
        raise ValueError(f"{what} is a {type(child).__name__}; only an nn.Linear can be constrained")
    if num_heads is None:
        raise ValueError(f"{what}: the module does not say its number of heads (num_heads or heads)")
    if len(parts) > 1 and (getattr(module, "head_first", False) or hasattr(module, "key_dim")):
        raise ValueError(
            f"{what} is ordered head by head (q, k and v interleaved); only (q, k, v), each by heads, is known"
        )
    dim, remainder = divmod(child.out_features, len(parts))
    head_dim = getattr(module, "head_dim", None)
    heads = (
        dim // head_dim if isinstance(head_dim, int) else num_heads
    )  # grouped queries: fewer for k than for q
    divides = not remainder and heads and not dim % heads and not (heads % num_heads and num_heads % heads)
    if not divides or (len(parts) > 1 and dim not in _widths(module, num_heads, head_dim)):
        raise ValueError(
            f"{what} has {child.out_features} rows, which are not {len(parts)} × heads × d_k for {num_heads} heads"
        )
    return Projection(_join(path, name, "weight"), child, "weight", parts, heads)


def _widths(module: nn.Module, num_heads: int, head_dim: int | None) -> set[int]:
    """What heads · d_k can be: as the module says, or what one of its layers takes (the output projection takes v)."""
    widths = {child.in_features for child in module.children() if isinstance(child, nn.Linear)}
    return widths | ({num_heads * head_dim} if isinstance(head_dim, int) else set())


def _head_count(module: nn.Module) -> int | None:
    counts = (getattr(module, name, None) for name in HEAD_COUNTS)
    return next((n for n in counts if isinstance(n, int) and n > 0), None)


def _refuse_unknown(model: nn.Module, found: list[Attention]) -> None:
    """Raise for a module with heads and either a fused layer of an unknown name, or a scale and no known projections."""
    for path, module in model.named_modules():
        if _head_count(module) is None or isinstance(module, nn.MultiheadAttention):
            continue
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and FUSED.search(name) and name not in PARTS:
                raise ValueError(
                    f"orthogonalize: {_join(path, name)} of {type(module).__name__} holds q and k in an order that is not "
                    "known; call constrain(module, blocks=..., rows=...) on it, or name it qkv if that is its order"
                )
        inside = any(a.path == path or a.path.startswith(path + ".") or not path for a in found)
        if hasattr(module, "scale") and not inside and any(p.ndim > 1 for p in module.parameters()):
            raise ValueError(
                f"orthogonalize: {path} ({type(module).__name__}) has heads but no nn.Linear named "
                f"{', '.join(PARTS)}, so its layout is not known"
            )


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)
