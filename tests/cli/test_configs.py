"""Every file under configs/ parses, composes and makes its model, data and trainer; none needs its data for that."""

import importlib.util
from pathlib import Path

import pytest

from ortho_vit import stiefel_parameters
from ortho_vit.cli.main import CommandLine
from ortho_vit.errors import UsageError

CONFIGS = Path(__file__).parents[2] / "configs"
EXPERIMENTS = sorted(path for path in CONFIGS.rglob("*.yaml") if "parts" not in path.parts)
EXPERIMENTS = [path for path in EXPERIMENTS if "paper" not in path.parts]  # which are tested row by row
PARTS = sorted((CONFIGS / "parts").glob("*.yaml"))
PARTS = [path for path in PARTS if "optim." not in path.read_text()]  # optimizers are tested row by row
LOGGERS = ("wandb", "mlflow")  # which are not among the requirements

# Table 1 of the paper: learning rate of the free parameters and of the constrained ones, where it is another
PAPER = {
    "stiefel_sgd": ("StiefelSGD", 0.15, None),
    "projected_stiefel_sgd": ("ProjectedStiefelSGD", 0.1, 1.0),
    "regularized_sgd": ("RegularizedSGD", 0.1, None),
    "momentumless_stiefel_sgd": ("MomentumlessStiefelSGD", 0.1, None),
    "stiefel_adam": ("StiefelAdam", 1e-3, None),
    "projected_stiefel_adam": ("ProjectedStiefelAdam", 1e-3, 0.01),
    "regularized_adam": ("RegularizedAdam", 1e-3, None),
    "sgd": ("SGD", 0.1, None),
    "adam": ("Adam", 1e-3, None),
    "adamw": ("AdamW", 1e-3, None),
}


def make(*arguments):
    """Everything a configuration describes, on a CPU, with weights that need no download."""
    overrides = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--model.weights", "null"]
    return CommandLine([*map(str, arguments), *overrides])


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_experiment_is_instantiated(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):  # the only data whose number of classes is not known
        (tmp_path / "data/pictures" / name).mkdir(parents=True)
        (tmp_path / "data/pictures" / name / "1.png").touch()
    command = make("--config", path)
    assert command.model.num_classes == command.datamodule.num_classes
    constrained = list(stiefel_parameters(command.model))
    assert bool(constrained) == (command.model.hparams["constraint"] is not None)


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_part_composes_with_the_quickstart(path):
    arguments = "--config", CONFIGS / "quickstart.yaml", "--config", path
    if path.stem in LOGGERS and importlib.util.find_spec(path.stem) is None:
        with pytest.raises(UsageError, match=rf"^trainer\.logger: \w+Logger: .*pip install .*{path.stem}"):
            make(*arguments)
        assert f"pip install {path.stem}" in path.read_text()
    else:
        make(*arguments)


def test_parts_with_callbacks_add_up():
    parts = [("--config", CONFIGS / "parts" / f"{name}.yaml") for name in ("early_stopping", "swa")]
    command = make("--config", CONFIGS / "quickstart.yaml", *(word for part in parts for word in part))
    names = {type(callback).__name__ for callback in command.trainer.callbacks}
    assert {"EarlyStopping", "WeightAveraging"} <= names


ROWS = {
    f"{c}_{o}" for c in ("within", "across") for o in PAPER if not o.startswith(("sgd", "adam", "moment"))
}
ROWS |= {"within_momentumless_stiefel_sgd", "none_sgd", "none_adam", "none_adamw"}


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_each_row_of_the_papers_table_has_a_file(data):
    assert {path.stem for path in (CONFIGS / "paper" / data).glob("*.yaml")} == ROWS
    assert len(ROWS) == 16


@pytest.mark.parametrize("name", sorted(ROWS))
@pytest.mark.parametrize(("data", "parameters"), [("cifar10", 6_260_746), ("cifar100", 6_295_396)])
def test_a_row_of_the_papers_table_has_its_numbers(data, parameters, name):
    command = make("--config", CONFIGS / "paper" / data / f"{name}.yaml")
    constraint, _, optimizer = name.partition("_")
    kind, lr, stiefel_lr = PAPER[optimizer]
    made = command.model.make_optimizer()
    assert type(made).__name__ == kind
    (group,) = made.param_groups
    assert (group["lr"], group.get("stiefel_lr")) == (lr, stiefel_lr)
    assert group.get("momentum", 0.9) == 0.9
    assert tuple(group.get("betas", (0.9, 0.999))) == (0.9, 0.999)
    assert group["weight_decay"] == (0.2 if kind == "AdamW" else 5e-5)
    assert group.get("penalty", 1e-6) == 1e-6
    assert group.get("integrator", "paper") == "paper"
    hparams = command.model.hparams
    assert hparams["constraint"] == (None if constraint == "none" else constraint)
    assert bool(list(stiefel_parameters(command.model))) == (constraint != "none")
    assert (hparams["label_smoothing"], hparams["warmup_epochs"]) == (0.1, 5)
    assert sum(p.numel() for p in command.model.model.parameters()) == parameters
    assert (command.trainer.max_epochs, command.datamodule.batch_size, command.datamodule.val_size) == (
        200,
        128,
        0,
    )
    assert command.datamodule.autoaugment


def test_our_own_recipe_has_our_integrator():
    group = (
        make("--config", CONFIGS / "cifar10/within_stiefel_sgd.yaml").model.make_optimizer().param_groups[0]
    )
    assert (group["lr"], group["integrator"]) == (0.15, "isometric")
