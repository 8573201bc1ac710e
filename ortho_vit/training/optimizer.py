"""The optimizer of a run: its class and arguments as a file describes them, and its groups of parameters."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from timm.models import group_parameters
from torch import nn
from torch.optim import Optimizer

from ortho_vit import optim
from ortho_vit.optim.base import StiefelOptimizer
from ortho_vit.parameter import StiefelParameter

OptimizerFactory = Callable[[Iterable], Optimizer]  # parsed from `class_path` and `init_args` in YAML
Kind = type | tuple[type, ...]
Group = tuple[list[str], dict[str, Any]]  # patterns of parameters' names, options of the optimizer for them


# ------------------------------------------------------------------------------------- `class_path` and `init_args`


def class_at(path: Any, kind: Kind, what: str) -> type:
    """The class at a dotted path.  A file may name anything, so a class of another kind is refused, not called."""
    module, _, name = str(path).rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"there is no {path}: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise ValueError(f"{path} is not {what}")
    return cls


def as_factory(value: Any, kind: Kind, what: str) -> Any:
    """A function that builds an optimizer or a scheduler, also from `class_path` and `init_args`."""
    if not isinstance(value, dict):
        return value
    return partial(class_at(value["class_path"], kind, what), **value.get("init_args", {}))


def as_plain(value: Any, kind: Kind) -> dict[str, Any] | None:
    """`class_path` and `init_args` of a class or `functools.partial`; None where only the parser knows them."""
    if isinstance(value, dict):
        return value
    cls, arguments = (value.func, value.keywords) if isinstance(value, partial) else (value, {})
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        return None
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": dict(arguments)}


def keeps_manifold(run: Any) -> bool:
    """Whether a run of these hyper-parameters claims that its constrained weights are orthonormal."""
    recipe = run.get("optimizer") if isinstance(run, Mapping) and run.get("constraint") else None
    if not isinstance(recipe, dict):
        return False
    cls = getattr(optim, str(recipe.get("class_path")).rpartition(".")[2], None)  # of this package only
    exact = isinstance(cls, type) and issubclass(cls, StiefelOptimizer) and cls.block_rule.exact
    return exact and (recipe.get("init_args") or {}).get("inner_steps") is None


# ------------------------------------------------------------------------------------------------ groups of parameters


def matching(model: nn.Module, pattern: str, option: str) -> list[nn.Parameter]:
    """The parameters whose names match a pattern in an option of the classifier.  Raises ValueError where there are none."""
    found = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"Classifier: {option}: no parameter is called {pattern!r}")
    return found


def parse_groups(model: nn.Module, param_groups: list[dict[str, Any]]) -> list[Group]:
    """The patterns and the options of each of `param_groups`; the last, without options, has all other parameters."""
    parsed: list[Group] = []
    for group in param_groups:
        match = group.get("match")
        patterns = [match] if isinstance(match, str) else match
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(
                f"Classifier: param_groups: {group} needs `match`, a name of parameters with wildcards or a list of them"
            )
        for pattern in patterns:
            matching(model, pattern, "param_groups")
        parsed.append((patterns, {key: value for key, value in group.items() if key != "match"}))
    return [*parsed, (["*"], {})]


def make_optimizer(
    model: nn.Module, factory: OptimizerFactory, choices: list[Group], layer_decay: float
) -> Optimizer:
    """Build the optimizer of the parameters that are trainable now, in groups by learning rate and options."""
    groups: dict[tuple[float, int], list[tuple[str, nn.Parameter]]] = {}
    scales = _lr_scales(model, layer_decay) if layer_decay < 1 else {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            number = next(
                i for i, (found, _) in enumerate(choices) if any(fnmatchcase(name, p) for p in found)
            )
            groups.setdefault((scales.get(name, 1.0), number), []).append((name, parameter))
    optimizer = factory([{"params": named} | choices[i][1] for (_, i), named in groups.items()])
    unknown = {key for _, options in choices for key in options} - optimizer.defaults.keys()
    if unknown:
        raise ValueError(
            f"Classifier: param_groups: {type(optimizer).__name__} has no option "
            f"{', '.join(map(repr, sorted(unknown)))}; it has {', '.join(optimizer.defaults)}"
        )
    for group, (scale, _) in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] *= scale
    constrained = any(isinstance(p, StiefelParameter) for named in groups.values() for _, p in named)
    if constrained and not isinstance(optimizer, StiefelOptimizer):
        raise ValueError(
            f"Classifier: {type(optimizer).__name__} would ignore the constraint; "
            "use an optimizer of ortho_vit.optim, or set model.constraint to null"
        )
    return optimizer


def _lr_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """For each parameter layer_decay to the power of the number of layers above it, by timm's order of layers.

    The last norm learns as fast as the head; timm counts it with the last block.
    """
    if not hasattr(model, "group_matcher"):
        raise ValueError(
            f"Classifier: layer_decay needs a model whose layers timm orders, and {type(model).__name__} has no "
            "group_matcher; set layer_decay to 1"
        )
    layers = group_parameters(model, model.group_matcher(), reverse=True)  # type: ignore[operator]
    last = max(layers.values())
    return {
        name: layer_decay ** (0 if name.startswith("norm.") else last - layer)
        for name, layer in layers.items()
    }
