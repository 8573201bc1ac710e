"""`python train.py export`: turn a run into an entry of the zoo, weights and card, and measure its accuracy again.

    python train.py export --ckpt_path RUN --name TAG

RUN is the folder of a run or one of its checkpoints; `best` stands for the newest run below runs/.
The weights are those that `test` would use, averaged ones where the run averaged them.  The data set is that of the run's
`config.yaml`; its test set gives the accuracy and, if asked for, the images on the card.
"""

import argparse
import inspect
import shlex
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from torch import Tensor

from ortho_vit.cli.changes import FREE, TRAINER, changed, read_changes
from ortho_vit.cli.entry import program
from ortho_vit.cli.messages import Parser
from ortho_vit.cli.run_folder import ROOT, locate_checkpoint, read_config, read_run
from ortho_vit.errors import UsageError
from ortho_vit.models import ModelSpec, save_checkpoint
from ortho_vit.models.card import NAME
from ortho_vit.models.weights import check_types, check_weights, export_folder, project_rounded
from ortho_vit.pixels import to_pixels
from ortho_vit.resources import checkpoints_folder
from ortho_vit.training.classifier import Classifier
from ortho_vit.training.optimizer import class_at
from ortho_vit.training.reporting import StartLines, labelled, named_for, summary
from ortho_vit.training.same_data import check_classes, stored_classes

IMAGES = 8  # on a card
PLACES = (*FREE, "class_names")  # options of a data module that are not part of the recipe
RECIPE = (*TRAINER, "max_time", "devices", "num_nodes", "callbacks")  # options of the trainer that are

DEFAULTS = inspect.signature(L.Trainer).parameters


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        f"{program()} export", description=__doc__.replace("python train.py", program()), allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--ckpt_path", metavar="FILE", help="checkpoint of the run, its folder, or `best` of the newest run")
    add("--name", help="architecture.tag, or the tag alone")
    add(
        "--folder",
        help="the folder to write to (default: ORTHO_VIT_CHECKPOINTS, the repository's checkpoints/ or ./checkpoints)",
    )
    add("--overwrite", choices=("true", "false"), default="false", help="replace weights of that name")
    add("--config", metavar="FILE", help="the run's config.yaml, where it is not beside the checkpoint")
    add("--data.root", dest="root", metavar="FOLDER", help="where the data is, if it has moved since the run")
    add(
        "--data.class_names", dest="class_names", metavar="MAPPING", type=_mapping,
        help="the names of classes by their folders, if they differ from those of the run: '{red_apple: apple}'",
    )  # fmt: skip
    add("--licence", default="unknown", help="of the weights, such as MIT or CC-BY-4.0 (default: unknown)")
    add(
        "--golden_images", choices=("true", "false"), default="false",
        help="publish eight images of the test set on the card, with their logits (default: synthetic images)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if not options.ckpt_path or not options.name:
        raise UsageError("export needs --ckpt_path RUN, the folder of a run, and --name TAG")
    return options


def _mapping(text: str) -> dict[str, str]:
    value = yaml.load(text, yaml.BaseLoader)  # which reads everything as text
    if not isinstance(value, dict) or not all(
        isinstance(name, str) for pair in value.items() for name in pair
    ):
        raise argparse.ArgumentTypeError(f"expected a mapping such as '{{red_apple: apple}}', got {text}")
    return value


class Export:
    """The constructor parses and checks; `run` measures the accuracy and writes the weights."""

    def __init__(self, arguments: list[str]) -> None:
        self.options = options = parse(arguments)
        options.ckpt_path = str(locate_checkpoint(options.ckpt_path, Path(ROOT), "export", runs="**"))
        self.checkpoint = read_run(options.ckpt_path)
        self.hparams = self.checkpoint["hyper_parameters"]
        self.name = _full_name(options.name, self.hparams["name"].partition(".")[0])
        self.spec = ModelSpec.from_options(self.hparams)
        self.folder = Path(options.folder) if options.folder else export_folder()
        self.target = self.folder / f"{self.name}.safetensors"
        if self.target.exists() and options.overwrite == "false":
            raise UsageError(f"{self.target} exists already; --overwrite true replaces it")
        self.config_path = Path(options.config) if options.config else _config_beside(options.ckpt_path)
        step = self.checkpoint["global_step"]
        self.changes = [line for line in read_changes(self.config_path.parent) if line["step"] < step]
        self.config = changed(read_config(self.config_path), self.changes)
        self.model = _model(self.checkpoint, options.ckpt_path)
        check_weights(self.model.model, self.name)
        self.data = self._data()
        self.model.check_data(self.data)
        check_classes(stored_classes(self.checkpoint), self.data, options.ckpt_path)

    def _data(self) -> Any:
        described = self.config["data"]
        arguments = dict(described.get("init_args") or {})
        moved = {"root": self.options.root, "class_names": self.options.class_names}
        arguments |= {name: value for name, value in moved.items() if value}
        try:
            data = class_at(described["class_path"], L.LightningDataModule, "a data module")(**arguments)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{self.config_path}: data: {error}") from error
        for attribute in ("classes", "mean", "std"):
            if not hasattr(data, attribute):
                raise UsageError(f"{type(data).__name__} has no {attribute}, which a card must give")
        return data

    def run(self) -> None:
        trainer = L.Trainer(
            devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
            enable_progress_bar=False, callbacks=[StartLines()],
        )  # fmt: skip
        results = dict(trainer.test(self.model, datamodule=self.data, verbose=False)[0])
        accuracy = {k: v for k, v in named_for(self.data, results).items() if "accuracy" in k}
        pixels, labels = sample(self.data, IMAGES) if self.options.golden_images == "true" else (None, [])
        written = save_checkpoint(
            self.model.model,
            self.name,
            pixels=pixels,
            labels=labels,
            classes=self.data.classes,
            data=type(self.data).__name__,
            mean=self.data.mean,
            std=self.data.std,
            crop_pct=getattr(self.data, "crop_pct", None),
            accuracy=accuracy,
            command=self._command(),
            optimizer=self.hparams["optimizer"],
            recipe=self._recipe(),
            arguments=self.spec.arguments,
            licence=self.options.licence,
            folder=self.folder,
            overwrite=True,  # asked for, or nothing was there
        )
        command = self._command(shlex.quote(str(self._root)))
        rows = {"checkpoint": self.options.ckpt_path, "weights": str(written), "measure it": command}
        print(summary(labelled(accuracy) | rows), flush=True)

    @property
    def _root(self) -> Path | None:
        """The folder of the data, if it is absolute: a place on this machine, which the recipe leaves out."""
        root = self.options.root or (self.config["data"].get("init_args") or {}).get("root", "")
        return Path(root) if Path(str(root)).is_absolute() else None

    def _command(self, root: str = "FOLDER") -> str:
        """The command that measures the accuracy again: by name in the repository's folder, otherwise by path."""
        own = self.target.parent.resolve() == checkpoints_folder().resolve()
        command = f"{program()} test --weights {self.name if own else shlex.quote(str(self.target))}"
        return f"{command} --data.root {root}" if self._root else command

    def _recipe(self) -> dict[str, Any]:
        """The options, besides those of model and optimizer, with which to train it again, as in a configuration.

        If options were changed during the run, these are the last values, and `changes` has the earlier ones, by step.
        """
        data, trainer = self.config["data"], self.config.get("trainer") or {}
        arguments = {k: v for k, v in (data.get("init_args") or {}).items() if k not in PLACES}
        if Path(str(arguments.get("root", ""))).is_absolute():
            del arguments["root"]  # a place on one machine
        on_the_card = {"optimizer", *self.spec.options()}
        model = {k: v for k, v in self.hparams.items() if k not in on_the_card and v is not None}
        # the hyper-parameters of a resumed run have no weights
        if start := (self.config.get("model") or {}).get("weights"):
            model["weights"] = Path(start).name
        recipe: dict[str, Any] = {
            "seed_everything": self.config.get("seed_everything"),
            "model": model,
            "data": {"class_path": data["class_path"], "init_args": arguments},
            "trainer": {k: trainer[k] for k in RECIPE if k in trainer and trainer[k] != DEFAULTS[k].default},
            "steps": self.checkpoint["global_step"],
        }
        if self.changes:
            places = {"data.root", *(f"data.{name}" for name in PLACES)}
            recipe["changes"] = [
                line | {"changes": {k: v for k, v in line["changes"].items() if k not in places}}
                for line in self.changes
            ]
        return recipe


def _config_beside(path: str) -> Path:
    """The `config.yaml` of a checkpoint: in its folder, or in the one above, where a run keeps it."""
    for folder in Path(path).absolute().parents[:2]:
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    raise UsageError(f"no config.yaml in {folder}, beside {path}: give the run's with --config")


def _full_name(name: str, architecture: str) -> str:
    if "." not in name:
        name = f"{architecture}.{name}"
    if not NAME.fullmatch(name):
        raise UsageError(f"name must be architecture.tag, of letters, digits, '_', '-' and '.', got {name!r}")
    if name.partition(".")[0] != architecture:
        raise UsageError(
            f"name is {name!r}, but the run is of {architecture}: give --name {architecture}.TAG"
        )
    return name


def _model(checkpoint: dict[str, Any], path: str) -> Classifier:
    """The classifier of a run, in float32 also where the run was in bfloat16 or float16."""
    model, stored = Classifier(**checkpoint["hyper_parameters"] | {"weights": None}), checkpoint["state_dict"]
    check_types(model.state_dict(), stored, path)
    try:
        model.load_state_dict(stored)
        project_rounded(model, stored)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"{path}: its weights do not fit the model it describes: {reason}") from error
    return model


def sample(data: Any, count: int) -> tuple[Tensor, list[int]]:
    """The test set's first image of each class, at most `count` of them, as pixels, and their labels."""
    found: dict[int, Tensor] = {}
    for images, labels in data.test_dataloader():
        for image, label in zip(images, labels.tolist(), strict=True):
            found.setdefault(label, image)
        if len(found) >= min(count, len(data.classes)):
            break
    shown = list(found)[:count]
    return to_pixels(torch.stack([found[label] for label in shown]), data.mean, data.std), shown
