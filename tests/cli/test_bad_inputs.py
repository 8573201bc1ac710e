"""Bad inputs, in one table: each ends in one readable line, runs nothing, and leaves every file as it was.

A row is a name, a scene and a pattern.  The scene is a function that puts files into an empty folder and returns what goes
wrong there: a command line (a list), or a call.  The folder also holds `digits.yaml`, a configuration that works.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
import shlex
import struct
import subprocess
import sys
import tarfile
import tempfile
import traceback
import zipfile
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from ortho_vit import StiefelParameter, constrain, create_model, optim, orthogonalize
from ortho_vit.cli.main import main
from ortho_vit.data import CIFAR10, CIFAR100, ImageFolder
from ortho_vit.models import save_checkpoint
from ortho_vit.optim import ProjectedStiefelSGD, RegularizedSGD, StiefelAdam, StiefelSGD
from ortho_vit.stiefel import cayley, orthogonality_error, polar, random_stiefel
from ortho_vit.transport import RAGAS, RGAS, projection_robust_wasserstein, sinkhorn
from tests.helpers.cifar_files import Payload, contents, pack, place
from tests.helpers.command_line import DIGITS, REPOSITORY, refused, snapshot, work_in
from tests.helpers.image_files import class_folders, huge_png, image_file, image_folder
from tests.helpers.zoo_weights import ABOUT, NAME, build

DOCUMENTED = (ValueError, TypeError, OSError, FloatingPointError)
NAN, INF = float("nan"), float("inf")


# --------------------------------------------------------------------------------------------------------- the law


def line_of_call(call):
    with pytest.raises((*DOCUMENTED, RuntimeError)) as caught:
        call()
    if not isinstance(caught.value, DOCUMENTED):  # then one that we raise, and none from within torch
        assert type(caught.value) is RuntimeError
        assert f"{os.sep}ortho_vit{os.sep}" in traceback.extract_tb(caught.tb)[-1].filename
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def scenery(tmp_path, monkeypatch):
    """The folder that a scene is set in, which is also the current one."""
    return work_in(tmp_path, monkeypatch, "digits.yaml", DIGITS)


def fit(options=""):
    return ["fit", "--config", "digits.yaml", *shlex.split(options)]


# --------------------------------------------------------------------------------------------------- command lines


def command(line):
    return lambda folder: shlex.split(line)


def options(line):
    return lambda folder: fit(line)


def kwargs(text):
    return lambda folder: [*fit(), "--model.model_kwargs", text]


COMMANDS = {
    "an unknown sub-command": (command("tset --config digits.yaml"), "unknown sub-command 'tset'; there are fit, "),
    "a stray word": (options("extra"), "unknown argument extra"),
    "an unknown option": (options("--model.nme x"), "unknown argument --model.nme; did you mean '--model.name'"),
    "an option of no group": (options("--modle.name x"), "unknown argument --modle.name; did you mean '--model"),
    "no option at all for --config": (command("fit --config"), "--config needs a value"),
    "a configuration that is not there": (command("--config nothing.yaml"), "no configuration file nothing.yaml"),
    "a folder for a configuration": (command("--config ."), r"no configuration file \.: it is a folder"),
    "no optimizer": (command("--model.name ortho_vit_digits"), "missing: model.optimizer"),
    "a misspelt model": (options("--model.name ortho_vit_dgits"), "did you mean 'ortho_vit_digits'"),
    "a model without attention": (options("--model.name resnet18"), "no attention found in ResNet"),
    "a model for other images": (options("--model.name ortho_vit_pico"), "not take images of 1×8×8 .*in_chans: 1"),
    "other channels": (kwargs("{in_chans: 3}"), "not take images of 1×8×8 .*in_chans: 1, img_size: 8"),
    "a patch that does not divide": (kwargs("{patch_size: 3}"), "patch_size must divide img_size = 8, got 3"),
    "a patch larger than the image": (kwargs("{patch_size: 16}"), "patch_size must divide img_size = 8, got 16"),
    "heads that do not divide": (kwargs("{num_heads: 5}"), "cannot be built with .*'num_heads': 5.*divisible"),
    "no heads": (kwargs("{num_heads: 0}"), "cannot be built with .*'num_heads': 0"),
    "a misspelt keyword of the model": (kwargs("{depht: 3}"), "cannot be built with .*depht"),
    "a keyword that has an option": (kwargs("{constraint: within}"), "must be the architecture's own, got constraint"),
    "weights by the back door": (kwargs("{checkpoint_path: x.pt}"), "must be the architecture's own, got checkpoint_path"),
    "unknown projections": (kwargs("{projections: qq}"), "projections must be one of .* got 'qq'"),
    "a constraint typo": (options("--model.constraint inside"), "expected int or null or 'within' or 'across', got inside"),
    "the constraint a": (options("--model.constraint a"), "expected int or null or 'within' or 'across', got a"),
    "an optimizer without constraint": (options("--model.optimizer torch.optim.AdamW"), "AdamW would ignore the constr"),
    "a misspelt class": (options("--model.optimizer StiefelSGG"), "'StiefelSGG' is not a known class"),
    "a misspelt class with its path": (options("--model.optimizer ortho_vit.optim.StiefelSGG"), "mean 'StiefelSGD'"),
    "a misspelt hyper-parameter": (options("--model.optimizer.momentun 1"), "no option 'momentun'; did you mean 'mom"),
    "a negative learning rate": (options("--model.optimizer.lr -1"), "StiefelSGD: lr must be finite and >= 0, got -1"),
    "a word for a learning rate": (options("--model.optimizer.lr fast"), "lr: expected float, got fast"),
    "a momentum above one": (options("--model.optimizer.momentum 1.2"), r"momentum must be in \[0, 1\), got 1.2"),
    "a metric of one": (options("--model.optimizer.metric 1.0"), "metric must be .* a number < 1, got 1.0"),
    "an unknown metric": (options("--model.optimizer.metric canonicl"), "metric: expected .*'canonical'.*got canonicl"),
    "an unknown integrator": (options("--model.optimizer.integrator x"), "expected 'isometric' or 'paper', got x"),
    "other classes than the data": (options("--model.num_classes 7"), "num_classes is 7, but Digits has 10 classes"),
    "one class": (options("--model.num_classes 1"), "num_classes must be at least 2, got 1"),
    "a number that is a word": (options("--model.num_classes many"), "num_classes: expected int or null, got many"),
    "a layer decay of zero": (options("--model.layer_decay 0"), r"layer_decay must be in \(0, 1\], got 0"),
    "a freeze that matches nothing": (options("--model.freeze [nothing.*]"), r"no parameter is called 'nothing\.\*'"),
    "a freeze of everything": (options("--model.freeze \"['*']\""), "freeze leaves nothing to train"),
    "a label smoothing of one": (options("--model.label_smoothing 1"), r"label_smoothing must be in \[0, 1\), got 1"),
    "a negative warm-up": (options("--model.warmup_epochs -1"), "warmup_epochs must be at least 0, got -1"),
    "unknown data": (options("--data Digit"), "data: 'Digit' is not a known class"),
    "a misspelt option of the data": (options("--data.batch_siz 3"), "no option 'batch_siz'; did you mean 'batch_size'"),
    "an empty batch": (options("--data.batch_size 0"), "batch_size must be at least 1, got 0"),
    "negative workers": (options("--data.num_workers -1"), "num_workers must be at least 0, got -1"),
    "a validation set of everything": (options("--data.val_size 5000"), r"val_size must be in \[0, 1438\) .* got 5000"),
    "data that are not there": (
        options("--data CIFAR10 --model.name ortho_vit_pico"), "CIFAR10: nothing found in .*--data.download true"),
    "a list for an optimizer": (options("--model.optimizer [1]"), r"optimizer: expected a class, .*StiefelSGD, got \[1\]"),
    "a list for a class": (options("--model.optimizer.class_path [1]"), "class_path must be the path of a class, a word"),
    "a list for the class of a callback": (
        options("--trainer.callbacks '[{class_path: [1]}]'"), "such as lightning.pytorch.callbacks.EarlyStopping"
    ),
    "an option of the second logger": (
        options("--trainer.logger '[{class_path: CSVLogger, init_args: {save_dir: x}}, "
                "{class_path: TensorBoardLogger, init_args: {save_dir: x, vrsion: 3}}]'"),
        "trainer.logger: TensorBoardLogger has no option 'vrsion'; did you mean 'version'",
    ),
    "a second callback that is a layer": (
        options("--trainer.callbacks '[{class_path: ModelSummary}, {class_path: torch.nn.Linear}]'"),
        "trainer.callbacks: 'torch.nn.Linear' cannot be used here: not a subclass of Callback",
    ),
    "a list among the names of a group": (
        options("--model.param_groups '[{match: [[1]]}]'"), "needs `match`, a name of parameters with wildcards"
    ),
    "a list for data": (options("--data [1]"), r"data: expected a class, such as ortho_vit.data.CIFAR10, got \[1\]"),
    "an unknown scheduler": (options("--model.scheduler StepLRR"), "whole path, such as torch.optim.lr_scheduler.StepLR"),
    "a scheduler of two libraries": (
        options("--model.scheduler ReduceLROnPlateau"), "several ReduceLROnPlateau; .* torch.optim.lr_scheduler.Reduce"),
    "a scheduler without its length": (
        options("--model.scheduler StepLR"), "model.scheduler needs step_size: give --model.scheduler.step_size VALUE"
    ),
    "another name for the scheduler": (options("--lr_scheduler StepLR"), r"did you mean --model\.scheduler\?"),
    "another name for its option": (
        options("--lr_scheduler.step_size 3"), r"did you mean --model\.scheduler\.step_size\?"
    ),
    "another name for the rate": (options("--lr 0.1"), r"unknown argument --lr; did you mean --model\.optimizer\.lr\?"),
    "an optimizer of no module": (
        options("--model.optimizer foo.Bar"),
        "model.optimizer: 'foo.Bar' cannot be used here: No module named 'foo'; give a class such as ortho_vit",
    ),
    "an optimizer that is a layer": (
        options("--model.optimizer torch.nn.Linear"), "'torch.nn.Linear' cannot be used here: not a subclass of Optimizer"
    ),
    "data that is a layer": (options("--data torch.nn.Linear"), "data: .* not a subclass of LightningDataModule; give a"),
    "a folder of images for a group of options": (
        options("--images ."), "--images is a group of options.*given by --pictures FOLDER"
    ),
    "images to train on": (command("fit --pictures ."), "--pictures is for predict: fit needs images with labels"),
    "images for a run": (command("predict --ckpt_path last --pictures ."), "--data.predict_root FOLDER names images"),
    "a group that matches nothing": (
        options("--model.param_groups \"[{match: nothing}]\""), "param_groups: no parameter is called 'nothing'"),
    "no end of training": (options("--trainer.max_epochs null"), "needs to know its end: give --trainer.max_epochs"),
    "infinite training": (options("--trainer.max_epochs -1"), "needs to know its end: give --trainer.max_epochs"),
    "epochs below minus one": (options("--trainer.max_epochs -2"), "non-negative integer or -1. You passed in -2"),
    "no device": (options("--trainer.devices 0"), r"devices='0'.* not a valid input"),
    "an unknown accelerator": (options("--trainer.accelerator quantum"), "accelerator='quantum'.*Available names"),
    "an unknown strategy": (options("--trainer.strategy nothing"), "strategy='nothing'.*Example choices"),
    "an unknown precision": (options("--trainer.precision 7"), "precision: expected .* got 7"),
    "accumulation of no batch": (options("--trainer.accumulate_grad_batches 0"), "must be positive, got 0"),
    "validation every no epoch": (options("--trainer.check_val_every_n_epoch 0"), "must be positive, got 0"),
    "no batch of training": (options("--trainer.limit_train_batches 0"), "must be positive, got 0"),
    "a file for a folder of runs": (options("--trainer.default_root_dir digits.yaml"), "Not a directory: .*digits.yaml"),
    "a name that leads outside": (options("--name ../../up"), r"below default_root_dir, got '\.\./\.\./up'"),
    "a negative threshold": (options("--orthogonality.threshold -1"), "threshold must be positive or null, got -1"),
    "a checkpoint every no step": (options("--checkpoints.every_n_steps 0"), "every_n_steps must be at least 1"),
    "an unknown mode": (options("--checkpoints.mode best"), "expected 'max' or 'min', got best"),
    "a checkpoint that is not there": (options("--ckpt_path nothing.ckpt"), "ckpt_path: no checkpoint nothing.ckpt"),
    "a folder for a checkpoint": (options("--ckpt_path ."), r"\. holds no checkpoints/last.ckpt: it is not"),
    "weights that are not there": (options("--model.weights no.safetensors"), "no weights no.safetensors"),
    "weights of no known name": (options("--model.weights ortho_vit_nano.x"), "no checkpoint 'ortho_vit_nano.x' in "),
    "a test without weights": (command("test --config digits.yaml"), "test needs trained weights: give"),
    "a prediction without weights": (command("predict --config digits.yaml"), "predict needs trained weights: give"),
    "the best of no run": (command("test --config digits.yaml --ckpt_path best"), "no best.ckpt below runs/digits"),
    "images without weights": (command("predict --pictures ."), "--pictures needs --weights NAME"),
    "an export of nothing": (command("export --name x"), "export needs --ckpt_path"),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ YAML


def config(content, **others):
    """A file `bad.yaml`, and others beside it."""

    def scene(folder):
        for name, text in {"bad": content, **others}.items():
            (folder / f"{name}.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["--config", "bad.yaml"]

    return scene


def on_digits(text):
    return config(f"base: digits.yaml\n{text}")


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{p}'] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
)

YAML = {
    "a bracket left open": (config("model: ["), "bad.yaml, line 1 is not YAML: expected"),
    "an indentation by a tab": (config("model:\n\tname: x"), r"bad.yaml, line 2 is not YAML: found character '\\t'"),
    "a list": (config("- model"), "bad.yaml is not a configuration: it has no keys"),
    "an empty file": (config(""), "bad.yaml is empty: it has no keys"),
    "two documents": (on_digits("---\nmodel: {}"), "bad.yaml, line 2 is not YAML: but found another document"),
    "a base of itself": (config("base: bad.yaml"), "in a circle: bad.yaml → bad.yaml"),
    "bases in a circle": (config("base: up.yaml", up="base: bad.yaml"), "circle: bad.yaml → up.yaml → bad.yaml"),
    "a base that is not there": (config("base: [digits.yaml, gone.yaml]"), "no .* gone.yaml, named as a base by .*bad"),
    "a base that is a folder": (config("base: ."), "named as a base by .*bad.yaml: it is a folder"),
    "a base that is a mapping": (config("base: {digits: yaml}"), "base must be a file or a list of files"),
    "a base that is not YAML": (config("base: up.yaml", up="x: ["), "up.yaml, line 1 is not YAML"),
    "an unknown key": (on_digits("modle: {name: x}"), "unknown key 'modle.name'; did you mean 'model.name'"),
    "an unknown key below": (on_digits("model: {nme: x}"), "unknown key 'model.nme'; did you mean 'model.name'"),
    "an unknown key of the trainer": (
        on_digits("trainer: {max_epoch: 3}"), "unknown key 'trainer.max_epoch'; did you mean 'trainer.max_epochs'"),
    "an unknown option of a class": (
        on_digits("model: {optimizer: {init_args: {lrr: 1}}}"), "StiefelSGD has no option 'lrr'; did you mean 'lr'"),
    "a key given twice": (on_digits("data: {init_args: {limit: 9, limit: 10}}"), "line 2: the key 'limit' occurs tw"),
    "a list for a key": (on_digits("? [a, b]\n: c"), "line 2: a key must be a word"),
    "a value of another type": (on_digits("trainer: {max_epochs: many}"), "expected int or null, got many"),
    "a model without keys": (config("model:"), "line 1: model must have keys"),
    "a trainer without keys": (on_digits("trainer: null"), "line 2: trainer must have keys"),
    "no data": (on_digits("data: null"), "no data: give --data, such as ortho_vit.data.Digits"),
    "a call as a tag": (on_digits("name: !!python/object/apply:os.mkdir [ran]"), "line 2: the tag .*os.mkdir is refused"),
    "a name as a tag": (on_digits("name: !!python/name:os.mkdir"), "line 2: the tag .*os.mkdir is refused"),
    "a class that is not a data module": (
        on_digits("data: {class_path: subprocess.Popen, init_args: {args: [mkdir, ran]}}"),
        "data: 'subprocess.Popen' cannot be used here: not a subclass of Light"),
    "a class that is not an optimizer": (
        on_digits("model: {optimizer: {class_path: subprocess.Popen, init_args: {args: [mkdir, ran]}}}"),
        "model.optimizer: 'subprocess.Popen' cannot be used here: not a subclass of Optimizer"),
    "a billion laughs": (config(LAUGHS), "bad.yaml has more than 10000 values, with its aliases"),
    "a value that contains itself": (config("a: &a [*a]"), "bad.yaml has more than .* a value cannot contain itself"),
    "an alias of nothing": (config("a: *b"), "line 1 is not YAML: found undefined alias"),
    "a nest of five thousand lists": (config("a: " + "[" * 5000), "bad.yaml is not a configuration: it is nested too"),
    "bytes that are not UTF-8": (config(b"model: \xff\xfe\xfa"), "bad.yaml is not YAML: 'utf-8' codec can't decode"),
    "a NUL": (config(b"model: a\0b"), "bad.yaml is not YAML: .*not allowed"),
    "a name that leads outside": (on_digits("name: ../up"), r"below default_root_dir, got '\.\./up'"),
}  # fmt: skip


# ---------------------------------------------------------------------------------------- checkpoints and weights


@cache
def trained():
    """The bytes of a checkpoint of a run."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("digits.yaml").write_text(DIGITS)
        small = "--trainer.limit_train_batches 1 --trainer.max_epochs 1 --trainer.enable_progress_bar false"
        assert main(fit(small)) == 0
        return Path("runs/digits/version_0/checkpoints/last.ckpt").read_bytes()


def checkpoint():
    """Its content, to be altered."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(trained())
        return torch.load(file.name, weights_only=True)


def tensors():
    weights = checkpoint()["state_dict"].items()
    return {key.removeprefix("model."): x for key, x in weights if key.startswith("model.")}


def file_for(option, name, content, *more):
    """A command whose option names a file: of these bytes, or of those that `content` makes from its path."""

    def scene(folder):
        made = content(folder / name) if callable(content) else content
        if isinstance(made, bytes):
            (folder / name).write_bytes(made)
        subcommand, words = (more[0], more[1:]) if more and more[0] in ("test", "predict") else ("fit", more)
        return [subcommand, "--config", "digits.yaml", option, name, *words]

    return scene


resumed = partial(file_for, "--ckpt_path", "run.ckpt")
started = partial(file_for, "--model.weights", "run.ckpt")
weights = partial(file_for, "--model.weights", "w.safetensors")


def altered(change):
    """A checkpoint of a run after `change`."""

    def write(path):
        content = checkpoint()
        change(content)
        torch.save(content, path)

    return write


def with_weight(key, change):
    return altered(lambda content: content["state_dict"].update({key: change(content["state_dict"][key])}))


def with_tensor(key, value):
    """Safetensors of the trained model, with one tensor replaced, or left out for None."""

    def make(path):
        changed = tensors() | {key: value}
        return safetensors.torch.save({k: x for k, x in changed.items() if x is not None})

    return make


def seven_classes(path):
    head = {"head.weight": torch.zeros(7, 64), "head.bias": torch.zeros(7)}
    return safetensors.torch.save(tensors() | head)


def overwritten(path):
    content = trained()
    middle = len(content) // 2
    return content[:middle] + bytes(64) + content[middle + 64 :]


def pickled(path):
    return pickle.dumps({"state_dict": Payload(path.with_name("ran"))}, protocol=2)


def zipped(path):
    torch.save({"state_dict": {}, "hyper_parameters": Payload(path.with_name("ran"))}, path)


def zipped_text(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("text", "nothing")


def entry(change_files=lambda weights, card: None, **fields):
    """An entry of the zoo whose card has other fields, or whose files were changed; the call that loads it."""

    def scene(folder):
        path = save_checkpoint(build(), NAME, folder=folder, **ABOUT)
        card = path.with_suffix(".json")
        card.write_text(json.dumps({**json.loads(card.read_text()), **fields}))
        change_files(path, card)
        return lambda: create_model(NAME, pretrained=True, checkpoints=folder)

    return scene


def signed(change):
    """Change the tensors of an entry, and make the card's hash right again."""

    def change_files(path, card):
        values = safetensors.torch.load_file(path)
        change(values)
        safetensors.torch.save_file(values, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        card.write_text(json.dumps({**json.loads(card.read_text()), "sha256": digest}))

    return entry(change_files)


def card_for(subcommand, **fields):
    """A sub-command for an entry of the zoo whose card has other fields."""

    def scene(folder):
        entry(**fields)(folder)
        return [subcommand, "--weights", f"{NAME}.safetensors"]

    return scene


QKV, NORM = "blocks.0.attn.qkv.weight", "norm.weight"
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": ["mkdir", "ran"]}}

CHECKPOINTS = {
    "a truncated checkpoint": (resumed(lambda _: trained()[:-1000]), "run.ckpt is damaged or not a checkpoint"),
    "a truncated file of weights": (started(lambda _: trained()[:5000]), "run.ckpt is damaged or not a checkpoint"),
    "a checkpoint with bytes overwritten": (resumed(overwritten), "run.ckpt is damaged or not a checkpoint"),
    "an empty checkpoint": (resumed(b""), "run.ckpt is damaged or not a checkpoint; use another copy"),
    "a text": (resumed(b"hello world"), "run.ckpt is damaged or not a checkpoint"),
    "a head of other classes, to be tested": (
        weights(seven_classes, "test"), "w.safetensors has a head for other classes than the data's 10"),
    "a configuration": (file_for("--model.weights", "w.yaml", b"model: x"), "w.yaml is damaged or not a checkpoint"),
    "a pickle that runs code": (resumed(pickled), "run.ckpt is refused: .* it asks for posix.mkdir"),
    "weights that run code": (started(pickled), "run.ckpt is refused: .* it asks for posix.mkdir"),
    "a zip with a pickle that runs code": (resumed(zipped), "run.ckpt is refused: .* it asks for posix.mkdir"),
    "a zip of something else": (resumed(zipped_text), "run.ckpt is damaged or not a checkpoint"),
    "a list": (resumed(lambda path: torch.save([1], path)), "run.ckpt is not a checkpoint: it holds a list"),
    "weights to be resumed": (resumed(lambda path: torch.save(tensors(), path)), "is not a checkpoint of a run: if it hold"),
    "a run without its optimizer": (
        resumed(altered(lambda content: content.pop("optimizer_states"))), "holds weights but no optimizer, so"),
    "hyper-parameters that are a word": (
        resumed(altered(lambda c: c.update(hyper_parameters="name")), "test"), "run.ckpt is not a checkpoint of a run"),
    "an unknown hyper-parameter": (
        resumed(altered(lambda c: c["hyper_parameters"].update(evil=3)), "test"), "is not a checkpoint of ours: .*evil"),
    "a hyper-parameter that runs code": (
        resumed(altered(lambda c: c["hyper_parameters"].update(
            optimizer=POPEN)), "test"),
        "run.ckpt is not a checkpoint of ours: .*subprocess.Popen"),
    "a model's argument that runs code": (
        resumed(altered(lambda c: c["hyper_parameters"].update(model_kwargs={"act_layer": POPEN})), "test"),
        "run.ckpt is refused: among the model's arguments it names 'subprocess.Popen'"),
    "a card that runs code": (
        card_for("test", arguments={"depth": [{"deep": POPEN}]}),
        "the card of .* is refused: among the model's arguments it names 'subprocess.Popen'"),
    "a state that is none": (started(altered(lambda c: c.update(state_dict=None))), "has no weights of a classifier in"),
    "a run of another model": (
        resumed(lambda _: trained(), "--model.name", "ortho_vit_nano"), "name was ortho_vit_digits, now ortho_vit_nano"),
    "a run of another constraint": (
        resumed(lambda _: trained(), "--model.constraint", "across"), "constraint was within, now across"),
    "a run of another learning rate": (
        resumed(lambda _: trained(), "--model.optimizer.lr", "0.2"), "lr was 0.1, now 0.2.*--model.weights run.ckpt"),
    "weights of another model": (
        started(lambda _: trained(), "--model.name", "ortho_vit_nano"), "is of another architecture: it has no 'blocks.3"),
    "a NaN in a run to be tested": (
        resumed(with_weight(f"model.{NORM}", lambda x: x * NAN), "test"), f"run.ckpt is refused: 'model.{NORM}' has"),
    "a NaN in a run to be resumed": (
        resumed(with_weight(f"model.{NORM}", lambda x: x * NAN), "--trainer.max_epochs", "2"), "run.ckpt is refused: "),
    "a run without one of its weights": (
        resumed(altered(lambda c: c["state_dict"].pop(f"model.{NORM}")), "--trainer.max_epochs", "2"),
        f"run.ckpt is of another model: its 'model.{NORM}' is missing, or of another shape"),
    "a run off the manifold": (
        resumed(with_weight(f"model.{QKV}", lambda x: 2 * x), "test"), f"its 'model.{QKV}' is off the manifold by 3"),
    "a safetensors file to be resumed": (
        file_for("--ckpt_path", "w.safetensors", b""), "holds weights and no run to continue: give it as --model.weights"),
    "a header cut short": (weights(lambda path: with_tensor(NORM, None)(path)[:20]), "not a safetensors file .*header"),
    "a header of absurd length": (weights(struct.pack("<Q", 2**60) + b"{}"), "not a safetensors file .*header too large"),
    "a header that is not JSON": (weights(struct.pack("<Q", 8) + b"notjson!"), "not a safetensors file .*invalid JSON"),
    "a pickle called safetensors": (weights(pickled), "w.safetensors is damaged or not a safetensors file"),
    "a tensor that is missing": (weights(with_tensor(NORM, None)), f"of another architecture: it has no '{NORM}'"),
    "a tensor too many": (weights(with_tensor("extra", torch.ones(2))), "of another architecture: .* unknown 'extra'"),
    "a tensor of another shape": (weights(with_tensor(NORM, torch.ones(5))), rf"its '{NORM}' is \(5,\), not \(64,\)"),
    "a tensor of integers": (weights(with_tensor(NORM, torch.ones(64).int())), f"its '{NORM}' is torch.int32, not"),
    "a tensor that is not finite": (weights(with_tensor(NORM, torch.full((64,), NAN))), f"refused: '{NORM}' has entries"),
    "positions without a batch": (weights(with_tensor("pos_embed", torch.ones(7, 64))), "of another architecture: it c"),
    "projections of rank zero": (
        weights(with_tensor(QKV, torch.zeros(192, 64))), f"'{QKV}' .* cannot be made orthonormal; .*rank-deficient"),
    "a card of another hash": (entry(sha256="0" * 64), "sha256 is .*, but its card says 000"),
    "no card": (entry(lambda path, card: card.unlink()), f"no checkpoint '{NAME}' in .*; "),
    "no weights beside a card": (entry(lambda path, card: path.unlink()), f"no checkpoint '{NAME}' in .*; "),
    "a card that is not JSON": (entry(lambda path, card: card.write_text("{")), "json: not a checkpoint's card"),
    "a card without a field": (entry(lambda path, card: card.write_text('{"golden": {}}')), "json: the card lacks 'recipe'"),
    "a card of another entry": (entry(name="ortho_vit_nano.x"), f"{NAME}: its card is that of 'ortho_vit_nano.x'"),
    "a card that names a path": (entry(name="../../etc/passwd"), "name must be architecture.tag"),
    "an entry with a NaN": (signed(lambda x: x[NORM].fill_(NAN)), f"'{NORM}' has entries that are not finite"),
    "an entry off the manifold": (signed(lambda x: x[QKV].mul_(1.01)), f"{QKV}' is off the manifold by"),
    "an entry of another architecture": (signed(lambda x: x.pop(NORM)), f"of another architecture: it has no '{NORM}"),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ data


def cifar(damage, form="binary folder", dataset=CIFAR10):
    """A small data set that was damaged; the call that reads it."""

    def scene(folder):
        damage(place(folder / "data", dataset, form))
        return lambda: dataset(root=str(folder / "data")).setup()

    return scene


def rewritten(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def with_member(name, **attributes):
    """The archive with one more member: a file, or whatever its attributes say."""

    def damage(archive):
        layout = CIFAR10.layouts[0]
        pack(archive, {f"{layout.folder}/{file}": data for file, data in contents(CIFAR10, layout).items()})
        with tarfile.open(archive) as old:
            members = [(member, old.extractfile(member)) for member in old]
            with tarfile.open(archive.with_name("new"), "w:gz") as tar:
                extra = tarfile.TarInfo(name)
                for key, value in attributes.items():
                    setattr(extra, key, value)
                tar.addfile(extra)
                for member, file in members:
                    tar.addfile(member, file)
        archive.with_name("new").replace(archive)

    return cifar(damage, "binary archive")


def hostile_batch(folder):
    payload = Payload(folder.parent / "ran")
    (folder / "data_batch_3").write_bytes(pickle.dumps({"data": payload, "labels": [0]}))


def trains(damage):
    """Images of two classes, of which `damage` has changed some; the call that reads a whole epoch of them."""

    def scene(folder):
        root = class_folders(folder / "images", count=3)
        damage(root)
        return lambda: list(image_folder(root, val_size=0).train_dataloader())

    return scene


def damaged(content, name="cat/1.png"):
    """One image replaced by these bytes, or by what `content` makes of its own."""

    def damage(root):
        old = (root / name).read_bytes()
        (root / name).write_bytes(content(old) if callable(content) else content)

    return trains(damage)


def float_image(root):
    (root / "cat/1.png").unlink()
    Image.fromarray(np.ones((4, 4), np.float32)).save(root / "cat/1.tiff")


def emptied(root):
    for path in (root / "cat").iterdir():
        path.unlink()


def removed(root):
    for path in [*(root / "dog").iterdir(), root / "dog"]:
        path.rmdir() if path.is_dir() else path.unlink()


def predicts_nothing(folder):
    (folder / "new").mkdir()
    return lambda: image_folder(folder, "predict", predict_root=str(folder / "new"))


BINARY = "cifar-10-binary.tar.gz"
LEAVES = f"{BINARY} is damaged .*refused: its member .* could leave the folder"

DATA = {
    "no CIFAR": (lambda folder: lambda: CIFAR10(root=str(folder)).setup(), f"nothing found in .*; put {BINARY} or .*"),
    "no CIFAR-100": (lambda folder: lambda: CIFAR100(root=str(folder)).setup(), "CIFAR100: nothing found in .*"),
    "a truncated archive": (
        cifar(lambda path: path.write_bytes(path.read_bytes()[:-1000]), "binary archive"), f"{BINARY} is damaged .*again"),
    "an archive with bytes overwritten": (
        cifar(lambda path: path.write_bytes(path.read_bytes()[:5000] + bytes(200) + path.read_bytes()[5200:]),
              "binary archive"), f"{BINARY} is damaged .*download it again"),
    "a text called archive": (
        cifar(lambda path: path.write_text("no archive"), "python archive"), "cifar-10-python.tar.gz is damaged"),
    "an archive without a file": (
        cifar(lambda path: pack(path, {"x": b""}), "binary archive", CIFAR100), "has no cifar-100-binary/t"),
    "an archive with a path upwards": (with_member("../escaped"), LEAVES),
    "an archive with a path in and out": (with_member("cifar-10-batches-bin/../../escaped"), LEAVES),
    "an archive with an absolute path": (with_member("/tmp/escaped"), LEAVES),
    "an archive with a symbolic link": (with_member("x", type=tarfile.SYMTYPE, linkname="/etc/passwd"), LEAVES),
    "an archive with a hard link": (with_member("x", type=tarfile.LNKTYPE, linkname="../x"), LEAVES),
    "an archive with a device": (with_member("x", type=tarfile.CHRTYPE, devmajor=1, devminor=5), LEAVES),
    "an archive with a pipe": (with_member("x", type=tarfile.FIFOTYPE), LEAVES),
    "an archive with a file of a terabyte": (
        with_member("cifar-10-batches-bin/test_batch.bin", size=2**40), "refused: it unpacks to more than 268435456 bytes"),
    "a file of the wrong size": (
        cifar(rewritten("data_batch_2.bin", lambda old: old[:-100])), "data_batch_2.bin is damaged: .* whole records"),
    "an empty file": (cifar(rewritten("test_batch.bin", lambda _: b"")), "test_batch.bin is damaged: 0 bytes"),
    "a file that is missing": (cifar(lambda path: (path / "data_batch_2.bin").unlink()), "it has no data_batch_2.bin"),
    "a label out of range": (
        cifar(rewritten("test_batch.bin", lambda old: b"\n" + old[1:])), r"labels outside \[0, 10\); fetch it again"),
    "a batch that runs code": (cifar(hostile_batch, "python folder"), "data_batch_3 is damaged: .*asks for 'posix.mkdir'"),
    "a batch that is a text": (
        cifar(rewritten("data_batch_1", lambda _: b"text"), "python folder"), "data_batch_1 is damaged: it is not a batch"),
    "not an images": (lambda folder: lambda: image_folder(folder / "gone"), "gone does not exist; set data.root"),
    "no classes": (lambda folder: lambda: image_folder(folder), "no class folders in .*; put the images into one for each"),
    "nothing to predict": (predicts_nothing, "no images in .*new; put some there"),
    "a class without images": (trains(emptied), "the class .'cat'. has no images to train on; put some"),
    "one class of images": (trains(removed), "has one class only, 'cat'; put a second beside it"),
    "a text among the images": (
        trains(lambda root: (root / "cat/notes.txt").write_text("")), "notes.txt is not an image; repair or remove it"),
    "a class that training has not": (
        trains(lambda root: [image_file(root / part / "0.png") for part in ("train/a", "train/b", "val/c")]),
        "has the class .*'c'.*, which the training images do not have"),
    "a truncated image": (damaged(lambda old: old[: len(old) // 2]), "cannot read .*cat/1.png: .*; repair or remove it"),
    "an empty image": (damaged(b""), "cannot read .*cat/1.png: the file is empty; repair or remove it"),
    "a text called image": (damaged(b"not an image"), "cannot read .*cat/1.png: not an image in a known format"),
    "an image of 3.6 billion pixels": (damaged(huge_png()), "cannot read .*cat/1.png: too many pixels; repair or"),
    "an image of real numbers": (trains(float_image), "cannot read .*cat/1.tiff: floating-point pixels; save it with"),
    "a deviation of zero": (lambda folder: lambda: ImageFolder(std=(1, 0, 1)), r"std must be positive, got \(1, 0, 1\)"),
    "an image of no size": (lambda folder: lambda: ImageFolder(image_size=0), "image_size must be at least 1, got 0"),
}  # fmt: skip


# --------------------------------------------------------------------------------------------------------- tensors


def call(function, *arguments, **options):
    return lambda folder: lambda: function(*arguments, **options)


def frame(rows=2, columns=3):
    return StiefelParameter(random_stiefel(rows, columns))


def built(optimizer=StiefelSGD, **options):
    return lambda folder: lambda: optimizer([frame()], **options)


def steps(parameter, gradient, optimizer=StiefelSGD, **options):
    """One step of an optimizer that knows the parameter's name."""

    def step():
        made = optimizer([("q.weight", parameter)], **options)
        parameter.grad = gradient
        made.step()

    return lambda folder: step


def layer_of(values):
    layer = nn.Linear(3, 2)
    layer.weight.data.copy_(torch.as_tensor(values).expand(2, 3))
    return layer


def two_groups():
    p = frame()
    return StiefelSGD([{"params": [p]}, {"params": [p]}])


def state_of_another():
    return StiefelSGD([frame()]).load_state_dict(StiefelAdam([frame()]).state_dict())


def loaded_nan():
    p = frame()
    optimizer = StiefelSGD([("q.weight", p)])
    p.data.fill_(NAN)
    p.grad = torch.ones(2, 3)
    optimizer.step()


def baseline_step(make, shape, gradient):
    p = frame(*shape)
    p.grad = torch.full(shape, gradient)
    make([p], lr=0.1).step()


def transport(a=None, b=None, C=None, reg=0.1, **options):
    uniform = torch.full((4,), 0.25)
    a, b = uniform if a is None else a, uniform if b is None else b
    return call(sinkhorn, a, b, torch.eye(4) if C is None else C, reg, **options)


def projected(k=1, reg=0.1, x=None, y=None, **options):
    x = torch.arange(15.0).view(5, 3) if x is None else x
    return call(projection_robust_wasserstein, x, x + 1 if y is None else y, k=k, reg=reg, **options)


class Widening(nn.Module):
    """Two heads of three rows each, from four dimensions."""

    num_heads = 2

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 6) for _ in "qkv")


def filled_attention(value):
    model = build(constraint=None)
    model.blocks[0].attn.qkv.weight.data.fill_(value)
    return model


GRADIENT = r"the gradient of parameter 'q.weight' of shape \(2, 3\) is not finite; nothing was changed"
EMPTY, REAL = (
    "needs at least two dimensions, none of them empty",
    "needs a real floating-point dtype, got torch",
)
ONES = torch.ones(2, 3)

TENSORS = {
    **{
        f"a gradient of NaN to {name}": (steps(frame(), NAN * ONES, getattr(optim, name)), f"{name}: {GRADIENT}")
        for name in optim.__all__
    },
    "an infinite gradient": (steps(frame(), INF * ONES), GRADIENT),
    "a sparse gradient": (steps(nn.Parameter(torch.eye(3)), torch.eye(3).to_sparse()), "sparse gradients are not sup"),
    "a parameter of NaN to constrain": (call(constrain, layer_of(NAN)), "constrain: 'weight': .*finite; init='random'"),
    "a parameter of zeros to constrain": (call(constrain, layer_of(0.0)), "constrain: 'weight': .*rank-deficient"),
    "a parameter of NaN to an optimizer": (
        call(StiefelSGD, [("q", StiefelParameter(NAN * ONES))]), r"parameter 'q' of shape \(2, 3\) cannot be made orthon"),
    "a parameter of rank one": (
        call(StiefelSGD, [("q", StiefelParameter(ONES.clone()))]), "parameter 'q' .* cannot be made orthonormal; .*rank"),
    "weights of NaN loaded later": (call(loaded_nan), "StiefelSGD: parameter 'q.weight' of shape"),
    "a parameter that a module has not": (call(constrain, nn.Linear(3, 2), "wieght"), "no parameter 'wieght'; it has: we"),
    "a tensor to constrain": (call(constrain, ONES), "constrain: needs a module, got Tensor; use StiefelParameter"),
    "an unknown init": (call(constrain, nn.Linear(3, 2), init="svd"), "init must be 'polar', .*, got 'svd'"),
    "a parameter without values": (call(constrain, nn.Linear(3, 2, device="meta")), "on the meta device .*init='keep'"),
    "a list for a parameter": (call(StiefelParameter, [[1.0]]), "needs a tensor, got list; use torch.tensor"),
    "integers for a parameter": (call(StiefelParameter, ONES.long()), f"{REAL}.int64"),
    "complex numbers for a parameter": (call(StiefelParameter, ONES.cfloat()), f"{REAL}.complex64"),
    "a vector for a parameter": (call(StiefelParameter, torch.ones(3)), r"of shape \(3,\): needs at least two dimensions"),
    "an empty parameter": (call(StiefelParameter, torch.ones(0, 3)), EMPTY),
    "blocks that do not divide": (call(StiefelParameter, torch.ones(5, 3), blocks=2), "divide the 5 .* rows, got 2"),
    "blocks that are not integers": (call(StiefelParameter, ONES, blocks=2.0), "must be integers, got 2 and 2.0"),
    "more rows than there are": (call(StiefelParameter, ONES, rows=3), r"rows must be in \[1, 2\], got 3"),
    "no parameters": (call(StiefelSGD, []), "empty parameter list"),
    "a parameter in two groups": (call(two_groups), "parameters appear in more than one parameter group"),
    "the state of another optimizer": (call(state_of_another), "the state is of another optimizer: it has no 'dampening'"),
    "a negative rate": (built(lr=torch.tensor(-1.0)), r"lr must be finite and >= 0, got tensor\(-1.\)"),
    "two rates": (built(lr=torch.ones(2)), r"lr must be finite and >= 0, got tensor\(\[1., 1.\]\)"),
    "a rate in words": (built(lr="0.1"), "lr must be finite and >= 0, got '0.1'"),
    "an infinite rate": (built(stiefel_lr=INF), "stiefel_lr must be finite and >= 0, got inf"),
    "a momentum in words": (built(momentum="0.9"), r"momentum must be in \[0, 1\), got '0.9'"),
    "a decay of NaN": (built(weight_decay=NAN), "weight_decay must be finite and >= 0, got nan"),
    "an unknown metric": (built(metric="cannonical"), "metric must be 'canonical', .* got 'cannonical'"),
    "a metric without end": (built(metric=-INF), "metric must be .* a number < 1, got -inf"),
    "an unknown exponential": (built(expm="pade"), "expm must be 'euler', 'cayley' or 'exact', got 'pade'"),
    "betas of one": (built(StiefelAdam, betas=(0.9, 1.0)), r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
    "one beta": (built(StiefelAdam, betas=0.9), r"betas must be two numbers in \[0, 1\), got 0.9"),
    "a negative eps": (built(StiefelAdam, eps=-1.0), "eps must be finite and > 0, got -1.0"),
    "a negative penalty": (built(RegularizedSGD, penalty=-1), "penalty must be finite and >= 0, got -1"),
    "a QR every no step": (built(ProjectedStiefelSGD, qr_every=0), "qr_every must be None or at least 1, got 0"),
    "an unknown keyword": (built(momentun=0.9), "unexpected keyword argument 'momentun'"),
    "polar of NaN": (call(polar, NAN * ONES), "polar: the matrix has entries that are not finite"),
    "polar of zeros": (call(polar, 0 * ONES), r"polar: the matrix is rank-deficient \(singular values from 0 to 0\)"),
    "polar of integers": (call(polar, torch.eye(3).long()), f"polar: {REAL}.int64"),
    "polar of complex numbers": (call(polar, torch.eye(3).cfloat()), f"polar: {REAL}.complex64"),
    "polar of a vector": (call(polar, torch.ones(3)), rf"polar: {EMPTY}, got \(3,\)"),
    "polar of nothing": (call(polar, torch.ones(0, 2, 3)), rf"polar: {EMPTY}, got \(0, 2, 3\)"),
    "cayley of a rectangle": (call(cayley, ONES), r"cayley: needs square matrices, got \(2, 3\)"),
    "the error of a vector": (call(orthogonality_error, torch.ones(3)), rf"orthogonality_error: {EMPTY}, got \(3,\)"),
    "a random frame of negative size": (call(random_stiefel, -1, 3), rf"{EMPTY}, got \(-1, 3\)"),
    "a random frame of integers": (call(random_stiefel, 2, 3, dtype=torch.int64), f"random_stiefel: {REAL}.int64"),
    "negative weights": (transport(torch.tensor([-0.5, 0.5, 0.5, 0.5])), "a has negative weights, the least is -0.5"),
    "weights that do not sum to one": (transport(b=torch.ones(4)), "b must sum to one, got 4; divide it by its sum"),
    "a cost of NaN": (transport(C=torch.full((4, 4), NAN)), "C has entries that are not finite"),
    "a cost of integers": (transport(C=torch.eye(4).long()), "C must be float32 or float64, got torch.int64"),
    "a cost of another shape": (transport(C=torch.eye(3)), r"must be \(…, n\), \(…, m\) and \(…, n, m\), got \(4,\)"),
    "batches that do not fit": (
        transport(torch.full((2, 4), 0.25), torch.full((3, 4), 0.25)), r"dimensions must be alike, got \(2,\), \(3,\)"),
    "no regularisation": (transport(reg=0), "reg must be positive and finite, got 0"),
    "too little regularisation": (transport(reg=1e-40), "reg = 1e-40 is too small for costs up to 1; raise it"),
    "a tolerance of NaN": (transport(tolerance=NAN), "tolerance must be at least 0, got nan"),
    "potentials of another size": (
        transport(potentials=(torch.zeros(4), torch.zeros(3))), r"potentials must be for 4 columns .*, got \(3,\)"),
    "infinite potentials": (
        transport(potentials=(torch.zeros(4), torch.full((4,), INF))), "potentials have entries that are not finite"),
    "more dimensions than there are": (projected(k=4), "k must be between 1 and d = 3, got 4"),
    "half a dimension": (projected(k=1.5), "k must be between 1 and d = 3, got 1.5"),
    "a start of zeros": (projected(start=torch.zeros(3, 1)), "start: polar: the matrix is rank-deficient"),
    "a start of another batch": (projected(start=torch.ones(4, 3, 1)), r"start must be \(…, 3, 1\), got \(4, 3, 1\)"),
    "clouds of different batches": (
        projected(x=torch.ones(2, 5, 3), y=torch.ones(3, 5, 3)), r"dimensions must be alike, got \(2,\), \(3,\)"),
    "a gradient of NaN to a baseline": (call(baseline_step, RGAS, (3, 2), NAN), "gradient is not finite; nothing was"),
    "a frame of rows to a baseline": (call(baseline_step, RAGAS, (2, 3), 1.0), r"of columns .*, got \(2, 3\); transpose"),
    "attention of NaN": (
        call(orthogonalize, filled_attention(NAN), "within"), "blocks.0.attn.qkv.weight has entries that are not finite"),
    "attention of zeros": (
        call(orthogonalize, filled_attention(0.0), "across"), "qkv.weight: .*rank-deficient .*init='random' starts from"),
    "more rows than dimensions across heads": (
        call(orthogonalize, Widening(), "across"), "cannot be orthonormal across heads: .*; use constraint='within'"),
    "an unknown constraint": (call(orthogonalize, nn.Linear(2, 3), "inside"), "constraint must be 'within', .*'inside'"),
    "a model without attention": (call(orthogonalize, nn.Linear(2, 3), "within"), "no attention found in Linear; looked"),
    "a model that is not there": (call(create_model, "ortho_vit_pcio"), "unknown model .*did you mean 'ortho_vit_pico'"),
}  # fmt: skip

TABLE = {"command": COMMANDS, "yaml": YAML, "checkpoint": CHECKPOINTS, "data": DATA, "tensor": TENSORS}


@pytest.mark.parametrize(
    ("scene", "pattern"),
    [
        pytest.param(scene, pattern, id=f"{kind}: {name}")
        for kind, rows in TABLE.items()
        for name, (scene, pattern) in rows.items()
    ],
)
def test_a_bad_input_ends_in_one_line_and_leaves_every_file_as_it_was(scenery, capsys, scene, pattern):
    bad = scene(scenery)
    before = snapshot(scenery)
    line = line_of_call(bad) if callable(bad) else refused(bad, "", capsys)
    assert re.search(pattern, line), line
    assert len(line) < 500
    assert snapshot(scenery) == before


def test_the_script_ends_as_the_function_does(scenery, capsys):
    before, arguments = snapshot(scenery), fit("--model.optimizer.lr -1")
    line = refused(arguments, "", capsys)
    script = [sys.executable, REPOSITORY / "train.py", *arguments]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{line}\n")
    assert snapshot(scenery) == before


# --------------------------------------------------------------------------------------- what a prediction skips

SKIPPED = {
    "a truncated image": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "an empty image": lambda path: path.write_bytes(b""),
    "a text called image": lambda path: path.write_bytes(b"not an image"),
    "an image of 3.6 billion pixels": lambda path: path.write_bytes(huge_png()),
}


@pytest.mark.parametrize("damage", SKIPPED.values(), ids=SKIPPED)
def test_a_prediction_leaves_out_what_it_cannot_read_and_counts_it(scenery, damage):
    for name in "abc":
        image_file(scenery / f"new/{name}.png")
    damage(scenery / "new/b.png")
    before = snapshot(scenery)
    data = image_folder(scenery, "predict", predict_root=str(scenery / "new"))
    with pytest.warns(UserWarning, match=r"cannot read .*b\.png: .*; skipped"):
        names = [name for _, batch in data.predict_dataloader() for name in batch]
    with pytest.warns(UserWarning, match="skipped 1 of 3 images"):
        data.teardown("predict")
    assert names == ["a.png", "c.png"]
    assert snapshot(scenery) == before
