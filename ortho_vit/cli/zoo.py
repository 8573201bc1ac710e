"""The trained weights of the zoo on the command line: list them, show a card, check them, export them to ONNX.

    ortho-vit models                   the weights, as a table
    ortho-vit info NAME                the card of some weights
    ortho-vit verify NAME              load them, and check hash, orthogonality and the card's logits
    ortho-vit onnx NAME OUT.onnx       write them as an ONNX model that takes batches of any size

NAME is what `--weights` takes: a name with its tag, a file, a folder or an https address.
"""

import argparse
import importlib.util
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ortho_vit.cli.entry import program
from ortho_vit.cli.messages import Parser
from ortho_vit.errors import CheckpointError, UsageError
from ortho_vit.files import replacing
from ortho_vit.models import Checkpoint, find_checkpoint, list_models, load_checkpoint, verify_checkpoint
from ortho_vit.training.reporting import as_table, summary


class Zoo:
    """One of the commands of this file, parsed; `run` runs it."""

    def __init__(self, arguments: list[str]) -> None:
        name, *rest = arguments
        self.command = COMMANDS[name]
        parser = Parser(f"{program()} {name}", description=self.command.__doc__, allow_abbrev=False)
        if name == "models":
            parser.add_argument("pattern", nargs="?", default="*", help='which to show, such as "*cifar10*"')
        else:
            parser.add_argument("name", help="a name with its tag, a file, a folder or an https address")
        if name == "onnx":
            parser.add_argument("out", help="the file to write, which ends in .onnx")
            parser.add_argument(
                "--overwrite", choices=("true", "false"), default="false", help="replace the file"
            )
        self.options = parser.parse_args(rest)

    def run(self) -> None:
        self.command(self.options)


def models(options: argparse.Namespace) -> None:
    """List the trained weights as a table: their name, constraint, data, accuracy and number of parameters."""
    names = list_models(options.pattern, pretrained=True)
    if not names:
        raise UsageError(f"no weights match {options.pattern!r}; `{program()} models` lists them all")
    rows = []
    for card in (find_checkpoint(name).card for name in names):
        accuracy = next((f"{value:.2%}" for value in card.accuracy.values()), "")
        rows.append([card.name, str(card.constraint or "none"), card.data, accuracy, f"{card.parameters:,}"])
    print(as_table(("name", "constraint", "data", "accuracy", "parameters"), rows))


def info(options: argparse.Namespace) -> None:
    """Show the card of trained weights."""
    checkpoint = find_checkpoint(options.name)
    card = checkpoint.card
    n, channels, height, width = card.golden.shape
    classes = ", ".join(card.classes[:12]) + (", …" if len(card.classes) > 12 else "")
    rows = {
        "name": card.name,
        "weights": str(checkpoint.weights),
        "constraint": str(card.constraint or "none"),
        "projections": card.projections if card.constraint else "",
        "parameters": f"{card.parameters:,}",
        "orthogonality error": f"{card.orthogonality_error:.1e}" if card.constraint else "",
        "data": card.data,
        "classes": f"{len(card.classes)}: {classes}",
        "images": f"{channels}×{height}×{width}, mean {card.mean}, std {card.std}, crop_pct {card.crop_pct:g}",
        "optimizer": _one_line(card.optimizer),
        "accuracy": ", ".join(f"{key} {value:.2%}" for key, value in card.accuracy.items()),
        "measured by": card.command,
        "golden logits": f"of {n} images",
        "sha256": card.sha256,
        "versions": _one_line(card.versions),
        "licence": card.licence,
    }
    print(summary({name: value for name, value in rows.items() if value}))


def _one_line(values: dict[str, Any]) -> str:
    flat = {"class": values["class_path"]} | values.get("init_args", {}) if "class_path" in values else values
    return ", ".join(f"{key} {value}" for key, value in flat.items())


def verify(options: argparse.Namespace) -> None:
    """Load trained weights, and check their hash, their orthogonality and the logits on their card."""
    checkpoint = find_checkpoint(options.name)
    error = verify_checkpoint(checkpoint)
    print(
        f"{checkpoint.card.name}: hash, architecture and orthogonality are the card's; its logits differ by {error:.1e}"
    )


# ------------------------------------------------------------------------------------------------- ONNX


def onnx(options: argparse.Namespace) -> None:
    """Write trained weights as an ONNX model for batches of any size; onnxruntime, if installed, checks it first."""
    target = Path(options.out)
    if target.suffix != ".onnx":
        raise UsageError(f"the file must end in .onnx, got {options.out!r}")
    if target.exists() and options.overwrite == "false":
        raise UsageError(f"{target} is there already; choose another name, or add --overwrite true")
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    checkpoint = find_checkpoint(options.name)
    tell = partial(print, file=sys.stderr, flush=True)  # the standard output has the result
    with replacing(target) as unfinished:
        tell("1/3 loading the weights")
        model = load_checkpoint(checkpoint)
        tell(f"2/3 exporting {checkpoint.card.parameters:,} parameters: 5 to 20 seconds on a CPU")
        _export(model, checkpoint.card.golden.shape, unfinished)
        tell("3/3 comparing its logits with the card's")
        line = _check(checkpoint, unfinished)
    print(f"{checkpoint.card.name} in {target}; {line}")


def _export(model: nn.Module, shape: list[int], path: Path) -> None:
    """Write a model that takes `images` (batch, channels, height, width), normalised, and returns `logits`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        torch.onnx.export(
            model.eval(),
            (torch.zeros(2, *shape[1:]),),
            path,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def _check(checkpoint: Checkpoint, path: Path) -> str:
    """Say how much the logits of a file differ from the card's; CheckpointError if they are not the same."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "not checked: onnxruntime is not installed"
    session = _Session(path)
    try:
        error = checkpoint.card.check_golden(session)
    except CheckpointError as problem:
        raise CheckpointError(f"{path.name}: {problem}; nothing was written") from None
    session(torch.zeros(1, *checkpoint.card.golden.shape[1:]))  # a batch of another size, too
    return f"onnxruntime computes the card's logits, up to {error:.1e}"


class _Session(nn.Module):
    """An ONNX file, run by onnxruntime on the CPU."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        import onnxruntime  # optional

        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.device_and_type = nn.Parameter(torch.zeros(()))  # what the images are converted to

    def forward(self, images: Tensor) -> Tensor:
        (logits,) = self.session.run(None, {"images": images.numpy()})
        return torch.from_numpy(logits)


COMMANDS = {"models": models, "info": info, "verify": verify, "onnx": onnx}
