"""Whether data has the classes, and for a resumed run the images, that a model was trained on."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any


def stored(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `Classifier` has added to a run checkpoint; nothing in a checkpoint of something else."""
    saved = checkpoint.get("ortho_vit")
    return saved if isinstance(saved, Mapping) else {}


def class_names(data: Any) -> list[str] | None:
    """The names of a data module's classes in the order of their labels, or None where it has none."""
    names = getattr(data, "classes", None)
    return None if names is None else [str(name) for name in names]


def stored_classes(checkpoint: Mapping[str, Any]) -> list[str] | None:
    """The names of the classes in a run checkpoint, or None where it has none: those of version 0.1 have none."""
    names = stored(checkpoint).get("classes")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"the checkpoint is damaged: its class names are {names!r:.80}, not a list of names")
    return names


def check_classes(trained: Sequence[str] | None, data: Any, source: str) -> None:
    """Raise ValueError where the data's classes have other names than those trained on, or another order."""
    names = class_names(data)
    if trained is None or names is None or list(trained) == names:
        return
    theirs = type(data).__name__
    if len(trained) != len(names):
        difference = f"it was trained on {len(trained)} classes, and {theirs} has {len(names)}"
    else:
        label = next(i for i, (a, b) in enumerate(zip(trained, names, strict=True)) if a != b)
        difference = f"its class {label} is {trained[label]!r}, but that of {theirs} is {names[label]!r}"
    raise ValueError(
        f"{source} is of other classes: {difference}; give data whose classes have the same names in the same order"
        f"{_renaming(trained, names, data)}, or train a new run that starts from these weights"
    )


def _renaming(trained: Sequence[str], names: Sequence[str], data: Any) -> str:
    """The option that renames a class, where the data has it."""
    ours, theirs = [x for x in names if x not in trained], [x for x in trained if x not in names]
    if not (ours and theirs and hasattr(data, "class_names")):
        return ""
    folder = next((key for key, name in data.class_names.items() if name == ours[0]), ours[0])
    # Quotes, so that YAML reads neither numbers nor booleans
    mapping = json.dumps({folder: theirs[0]}, ensure_ascii=False)
    return f", rename some with --data.class_names {shlex.quote(mapping)}"


def images_of(data: Any) -> str | None:
    """A hash of a data module's training and validation images, or None where it gives none."""
    return data.digest() if hasattr(data, "digest") else None


def check_same_images(checkpoint: Mapping[str, Any], data: Any, source: str) -> None:
    """Raise ValueError where a run that is resumed would train or validate on other images than before."""
    trained, found = stored(checkpoint).get("images"), images_of(data)  # earlier versions stored none
    if trained is not None and found is not None and found != trained:
        raise ValueError(
            f"{source} was trained on other images than {type(data).__name__} has now: some were added, removed or renamed, "
            "so training images may become validation images.  Give it those it had, start a new run from its weights "
            f"with --model.weights {source}, or ask for it with --allow_changes data.root"
        )
