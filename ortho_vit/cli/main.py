"""The command line: LightningCLI with a default sub-command, composed configurations and errors of one line.

`main` returns the exit code: 0 for success, 2 for a mistake in the command line or a configuration (found before anything is
written), 1 for an error during a run, 130 and 143 for a command that Ctrl-C or SIGTERM has stopped.  ORTHO_VIT_TRACEBACK=1
shows where an error came from.
"""

import argparse
import logging
import os
import shlex
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback, instantiate_class
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.environments import LightningEnvironment

from ortho_vit.cli.changes import SPLITTING, Changes, check_changes, find_changes, record_changes
from ortho_vit.cli.compose import config_files, expand, expand_card, refuse_classes, take_option
from ortho_vit.cli.entry import program
from ortho_vit.cli.export import Export
from ortho_vit.cli.from_run import expand_run, find_checkpoint
from ortho_vit.cli.lightning_cli import DeferredCLI, options_of
from ortho_vit.cli.messages import explain
from ortho_vit.cli.run_folder import classes_of, read_config, read_run, removed_if_empty, run_of, with_spec
from ortho_vit.cli.zoo import COMMANDS, Zoo
from ortho_vit.errors import UsageError
from ortho_vit.files import next_folder
from ortho_vit.stiefel import orthogonality_error
from ortho_vit.training.checkpointing import Checkpoints, Preloaded, is_trial, refuse_to_lose_steps
from ortho_vit.training.classifier import Classifier
from ortho_vit.training.images import AttentionImages
from ortho_vit.training.measuring import OrthogonalityMonitor
from ortho_vit.training.predictions import PerClass, PredictionWriter
from ortho_vit.training.reporting import (
    History,
    HyperParameters,
    LearningRates,
    StartLines,
    TensorBoard,
    as_table,
    describe,
    named_for,
    progress_bar,
    quiet_writer,
    summary,
)
from ortho_vit.training.same_data import check_classes, check_same_images
from ortho_vit.training.stopping import Stopped, signals

# Options of the model that may differ when a run is resumed:
MAY_CHANGE = ("weights", "skip_nonfinite", "compile", "optimizer.init_args.shard_stiefel")
SUBCOMMANDS = ("fit", "validate", "test", "predict", "export", *COMMANDS)


class SaveConfig(SaveConfigCallback):
    """Writes the configuration into the folder of a run; a resumed run has it already."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = trainer.log_dir
        if stage == "fit" and folder and not os.path.exists(os.path.join(folder, self.config_filename)):
            super().setup(trainer, pl_module, stage)


class CommandLine(DeferredCLI):
    """The constructor parses and instantiates; `run` runs the sub-command."""

    trainer: Trainer
    model: Classifier
    datamodule: Any

    def __init__(self, arguments: list[str]) -> None:
        if not arguments or arguments[0].startswith("-"):
            arguments = ["fit", *arguments]
        self._chosen, self._arguments = arguments[0], arguments
        self._is_new = False  # whether a folder has to be created for the run
        self._created: Path | None = None  # that folder
        self._data: Any = None  # the data module, if the number of classes had to be taken from it
        self._preloaded: Preloaded | None = None  # the checkpoint that is resumed or evaluated
        self._allowed: list[str] = []  # changes of a run that is resumed
        self._changes: Changes = {}
        self._step = 0  # the step of the checkpoint
        if self._chosen not in SUBCOMMANDS:
            raise UsageError(f"unknown sub-command {self._chosen!r}; there are {', '.join(SUBCOMMANDS)}")
        quiet = {"exit_on_error": False}
        super().__init__(
            Classifier,
            save_config_callback=SaveConfig,
            trainer_defaults={
                "default_root_dir": "runs",
                "enable_model_summary": False,
                "log_every_n_steps": 10,
                "num_sanity_val_steps": 0,
            },
            seed_everything_default=0,
            parser_kwargs=quiet | {self._chosen: dict(quiet)},
            auto_configure_optimizers=False,
            args=arguments,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the sub-command that was chosen: each of the others would take as long again to prepare."""
        return {self._chosen: LightningCLI.subcommands()[self._chosen]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add = partial(parser.add_argument, type=str | None, default=None)
        add("--name", help="the folder of the run, below default_root_dir")
        add("--test_after_fit", type=bool, default=False, help="test the best checkpoint at the end")
        add(
            "--allow_changes",
            help="options that may differ from those of the run that is resumed: data.batch_size,trainer.precision",
        )
        if self._chosen != "fit":
            add("--weights", help="trained weights, whose card names model and data")
        if self._chosen == "predict":
            add("--pictures", help="a folder of images, or one image; needs --weights")
        parser.add_lightning_class_args(Checkpoints, "checkpoints")
        parser.add_lightning_class_args(OrthogonalityMonitor, "orthogonality")
        parser.add_lightning_class_args(AttentionImages, "images")
        parser.add_lightning_class_args(PredictionWriter, "predictions")
        if self._chosen == "test":
            parser.add_lightning_class_args(PerClass, "per_class")

    # --------------------------------------------------------------------------------------------- parsing

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        subcommand, files = self._chosen, config_files(args)
        allowed, args = take_option(args, "--allow_changes")
        self._allowed = allowed.split(",") if allowed else []
        self._parse(parser, expand_run(expand_card(expand(args), subcommand), subcommand))
        config = self.config[subcommand]
        if config.get("weights") or config.get("pictures"):  # abbreviated, or in a file
            raise UsageError("--weights and --pictures must be written in full, and on the command line")
        if config.allow_changes:
            raise UsageError(
                "--allow_changes must be written in full, and on the command line: a file would allow the changes for ever"
            )
        if allowed and subcommand != "fit":
            raise UsageError(f"--allow_changes is for fit with --ckpt_path, not for {subcommand}")
        config.name = config.name or _name_of(files)
        if Path(config.name).is_absolute() or ".." in Path(config.name).parts:
            raise UsageError(
                f"name must be a folder below default_root_dir, got {config.name!r}; --trainer.default_root_dir says where"
            )
        folder = Path(config.trainer.default_root_dir or ".") / config.name
        config.ckpt_path = path = config.ckpt_path and find_checkpoint(config.ckpt_path, folder, subcommand)
        if path is None:
            if subcommand != "fit" and config.model.weights is None:
                raise UsageError(
                    f"{subcommand} needs trained weights: give --weights NAME, --ckpt_path FILE.ckpt or --model.weights FILE"
                )
            return
        self._preloaded = Preloaded(Path(path), partial(_stored, subcommand=subcommand))
        if subcommand == "fit":
            refuse_to_lose_steps(Path(path), self._preloaded.content.get("global_step", 0))
            self._compare(path)
        self._take_over(self._preloaded.content["hyper_parameters"], path)

    def _compare(self, path: str) -> None:
        """Raise UsageError if the configuration differs from the `config.yaml` beside the checkpoint, unless allowed."""
        config, run = self.config["fit"], run_of(path)
        if run is None or config.get("data") is None:
            return
        ours = self._plain(config)
        if isinstance(ours.get("seed_everything"), bool):  # any seed, or none
            ours["seed_everything"] = read_config(run / "config.yaml").get("seed_everything")
        self._changes = find_changes(run, ours)
        if "data.root" in self._allowed:  # recorded also where other images are in the same folder
            root = (ours["data"].get("init_args") or {}).get("root")
            self._changes.setdefault("data.root", (root, root))
        check_changes(self._changes, self._allowed, path)

    def _plain(self, config: Any) -> dict[str, Any]:
        """A configuration as plain values."""
        return yaml.safe_load(
            self.parser_of(self._chosen).dump(config, skip_none=False, skip_validation=True)
        )

    def _parse(self, parser: LightningArgumentParser, arguments: list[str]) -> None:
        try:
            self.config = parser.parse_args(arguments)
        except argparse.ArgumentError as error:
            raise UsageError(explain(str(error), self._options())) from error

    def _options(self) -> list[str]:
        return options_of(self.parser_of(self._chosen))

    def _take_over(self, stored: dict[str, Any], path: str) -> None:
        """Use the model of a checkpoint; to resume a run, it must be the model of the configuration."""
        refuse_classes(stored.get("model_kwargs"), path)
        config = self.config[self._chosen]
        if self._chosen == "fit":
            ours = with_spec(self._plain(config)["model"], "model")
            different = [
                f"{key} was {old}, now {new}"
                for key, old, new in _differences(ours, stored)
                if key not in MAY_CHANGE and not (key == "num_classes" and new is None)
            ]
            if different:
                raise UsageError(
                    f"{path} cannot be resumed with another model: {'; '.join(different[:3])}.  Leave it as it was, or "
                    f"start a new run from its weights with --model.weights {path}"
                )
            _carry_over(ours, stored)
        free = {
            "weights": None,
            "skip_nonfinite": config.model.skip_nonfinite,
            "compile": config.model.compile,
        }
        values = {self._chosen: {"model": stored | free}}
        try:
            self.config = self.parser.parse_object(values, self.config)
        except (argparse.ArgumentError, TypeError) as error:
            raise UsageError(
                f"{path} is not a checkpoint of ours: {explain(str(error), self._options())}"
            ) from error

    # --------------------------------------------------------------------------------------- instantiation

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        if config.get("data") is None:
            raise UsageError("no data: give --data, such as ortho_vit.data.Digits")
        if self.subcommand == "fit":
            _check_trainer(config.trainer)
        _check_evaluation(str(self.subcommand), config)
        if config.model.num_classes is None:
            described = config.data.as_dict()
            data = instantiate_class((), described)
            # it is used for training too, unless some arguments are objects, which only the parser builds
            if "class_path" not in str(described.get("init_args")):
                self._data = data
            if not hasattr(data, "num_classes"):
                raise UsageError(
                    f"{type(data).__name__} does not say how many classes it has: give --model.num_classes"
                )
            config.model.num_classes = data.num_classes

    def instantiate_classes(self) -> None:
        """Instantiate the classes, except for a data module that was built already."""
        config = self.config[self.subcommand]
        self._described = described = config.data
        if self._data is not None:
            config.data = None
        try:
            super().instantiate_classes()
        except ValueError as error:
            if "Problem with given class_path" not in str(error):  # such as a logger that is not installed
                raise
            raise UsageError(explain(str(error), ())) from error
        finally:
            config.data = described
        self.datamodule = self.datamodule or self._data

    def after_instantiate_classes(self) -> None:
        self.model.check_data(self.datamodule)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self.config_init[self.subcommand]
        trainer, fitting = config.trainer, self.subcommand == "fit"
        kwargs |= launched_processes(trainer.devices, trainer.num_nodes)
        if trainer.logger is None or trainer.logger is True:
            folder, name, version = trainer.default_root_dir, config.name, None
            self._is_new = fitting
            if fitting and config.ckpt_path:
                run = run_of(config.ckpt_path)
                if run is not None:  # continue where it was
                    folder, name, version, self._is_new = run.parent, "", run.name, False
            kwargs["logger"] = fitting and TensorBoard(folder, name, version, default_hp_metric=False)
        return super().instantiate_trainer(**kwargs)

    def last_callbacks(self, config: dict[str, Any]) -> list[Callback]:
        """Reporting callbacks run after the callbacks that compute metrics."""
        self.history = History()
        callbacks: list[Callback] = [StartLines(), self.history]
        if config["logger"] and not config["fast_dev_run"]:
            callbacks += [LearningRates(), HyperParameters(self._values())]
        if config["enable_progress_bar"] is not False:
            callbacks.append(progress_bar(self.history))
        return callbacks

    def _values(self) -> dict[str, Any]:
        """The values of a run that are not hyper-parameters of the model."""
        config = self.config[self.subcommand]
        trainer = {key: config.trainer[key] for key in ("max_epochs", "max_steps", "precision")}
        return {"seed": config.seed_everything, "data": self._described.as_dict(), "trainer": trainer}

    # --------------------------------------------------------------------------------------------- running

    def run(self) -> None:
        self.model.check_images(self.datamodule)
        config = self.config_init[self.subcommand]
        if self.subcommand != "fit" and not config.ckpt_path and self.model.untrained_head:
            raise UsageError(
                f"{config.model.hparams['weights']} has a head for other classes than the data's {self.model.num_classes}; "
                "fine-tune it first, or give data of its own classes"
            )
        weights = config.model.hparams["weights"]
        if path := config.ckpt_path:  # before the run has a folder
            assert self._preloaded is not None
            self.model.check_checkpoint(self._preloaded.content, path, self.datamodule)
            self._step = self._preloaded.content["global_step"]
            config.checkpoints.preloaded, self._preloaded = self._preloaded, None
            self.model.new_seed = "seed_everything" in self._allowed
            self.model.new_images = not SPLITTING.isdisjoint(self._allowed)
        elif self.subcommand != "fit" and weights is not None:
            check_classes(classes_of(weights), self.datamodule, weights)
        self.run_subcommand()

    def fit(self, **kwargs: Any) -> None:
        config = self.config_init[self.subcommand]
        self._say(describe(self.model.model, config.model.hparams["name"]))
        if self.trainer.world_size == 1:  # reports missing or damaged data before the run has a folder
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
            if (preloaded := config.checkpoints.preloaded) and not self.model.new_images:
                check_same_images(preloaded.content, self.datamodule, config.ckpt_path)
            if config.test_after_fit:
                self._require_test_set()
        checkpoints: Checkpoints = config.checkpoints
        if self.trainer.is_global_zero and not is_trial(self.trainer):
            self._claim_folder(checkpoints)
            run = Path(self.trainer.log_dir or self.trainer.default_root_dir)
            self._say(f"run: {run}")
            if self._changes:
                record_changes(run, self._changes, self._step)
        with removed_if_empty(self._created, self.trainer):
            self.trainer.fit(**kwargs)
        results: dict[str, Any] = {}
        if config.test_after_fit and not is_trial(self.trainer):
            best = checkpoints.best_path
            kwargs = {"datamodule": self.datamodule, "ckpt_path": best and str(best), "verbose": False}
            results = dict(self.trainer.test(self.model, **kwargs)[0])
        elif checkpoints.best_score is not None:
            results = {f"best {checkpoints.monitor}": checkpoints.best_score}
        self._summarize(results)
        if self.trainer.log_dir and checkpoints.best_path:
            run = Path(self.trainer.log_dir)
            command = f"{program()} test --ckpt_path {shlex.quote(str(run))}"
            logger = self.trainer.logger
            board = (
                f"   logs: tensorboard --logdir {logger.save_dir}"
                if isinstance(logger, TensorBoardLogger)
                else ""
            )
            self._say(f"test it: {command}{board}")

    def _require_test_set(self) -> None:
        """Raise UsageError where the test at the end would have nothing to test on."""
        self.datamodule.setup("test")
        test_set = getattr(self.datamodule, "test_set", None)
        if test_set is not None and not len(test_set):
            raise UsageError(
                f"{type(self.datamodule).__name__} has no images to test on: set data.val_size, add a test set, or set "
                "test_after_fit to false"
            )

    def _claim_folder(self, checkpoints: Checkpoints) -> None:
        """Create and lock the folder of the run, before anything is written and before other processes are started."""
        logger, trainer = self.trainer.logger, self.trainer
        if self._is_new:
            assert isinstance(logger, TensorBoardLogger)
            self._created = folder = next_folder(Path(logger.root_dir), "version_")
            version = int(folder.name.removeprefix("version_"))
            trainer.logger = logger = TensorBoard(
                logger.save_dir, logger.name, version, default_hp_metric=False
            )
        if logger is None:
            checkpoints.claim(Path(trainer.default_root_dir))
        elif isinstance(logger, TensorBoardLogger):
            checkpoints.claim(Path(logger.log_dir))

    def validate(self, **kwargs: Any) -> None:
        self._summarize(dict(self.trainer.validate(**kwargs | {"verbose": False})[0]), kwargs["ckpt_path"])

    def test(self, **kwargs: Any) -> None:
        self._summarize(dict(self.trainer.test(**kwargs | {"verbose": False})[0]), kwargs["ckpt_path"])
        per_class: PerClass = self.config_init[self.subcommand].per_class
        if per_class.folder is not None:
            self._say(as_table(("class", "images", "accuracy"), per_class.rows()))
            self._say(f"per-class accuracy and confusion matrix in {per_class.folder}")

    def predict(self, **kwargs: Any) -> None:
        self.trainer.predict(**kwargs | {"return_predictions": False})
        writer: PredictionWriter = self.config_init[self.subcommand].predictions
        if writer.target is None:  # the standard output, which holds nothing else
            return
        if writer.count:
            self._say(as_table(("file", "class", "probability"), writer.preview))
        source = f", by {kwargs['ckpt_path']}" if kwargs["ckpt_path"] else ""
        self._say(f"{writer.count} predictions in {writer.target}{source}")

    def stopped(self, stop: Stopped) -> str:
        """One line that says where training has stopped, and how to continue it."""
        if stop.step is None or stop.steps is None:
            launcher = self.trainer.strategy.launcher
            if (
                launcher is not None
            ):  # the processes that it has started do not know, and would wait for this one
                launcher.kill(signal.SIGTERM)
            return _named(stop)
        line = f"stopped at step {stop.step:,} of {stop.steps:,}"
        last = self.config_init[self.subcommand].checkpoints.last_path
        return f"{line}; continue with {_continuing(self._arguments, last)}" if last else line

    def exit_code(self, stop: Stopped) -> int:
        """The exit code of a stopped process: 0 if another one has started it, which Lightning would kill otherwise."""
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        launched = isinstance(environment, LightningEnvironment) and not self.trainer.is_global_zero
        return 0 if launched and stop.step is not None else 128 + stop.signum

    def _say(self, line: str) -> None:
        if self.trainer.is_global_zero:
            print(line, flush=True)

    def _summarize(self, results: dict[str, Any], checkpoint: Any = None) -> None:
        rows = {}
        for name, value in named_for(self.datamodule, results).items():
            label = name.replace("/", " ").replace("_", " ")
            rows[label] = f"{value:.2%}" if "accuracy" in name else f"{value:.4f}"
        if self.model.hparams["constraint"] is not None:
            rows["orthogonality error"] = f"{orthogonality_error(self.model.model):.1e}"
        if self.model.steps.skipped:
            rows["steps skipped"] = f"{self.model.steps.skipped}, not finite"
        checkpoint = checkpoint or self.config_init[self.subcommand].checkpoints.best_path
        if checkpoint:
            rows["checkpoint"] = str(checkpoint)
        if self.history.curves:
            rows["curves"] = str(self.history.curves)
        if rows:
            self._say(summary(rows))


def _check_trainer(trainer: Any) -> None:
    """Raise UsageError for values that Lightning does not check, or only by a division by zero."""
    endless = trainer.max_epochs in (None, -1) and trainer.max_steps == -1
    if endless and not trainer.fast_dev_run:
        raise UsageError(
            "the schedule needs to know its end: give --trainer.max_epochs or --trainer.max_steps"
        )
    for name in (
        "accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "limit_train_batches",
    ):  # fmt: skip
        value = getattr(trainer, name)
        if isinstance(value, int | float) and value == 0:
            raise UsageError(f"trainer.{name} must be positive, got {value}")


def _check_evaluation(subcommand: str, config: Any) -> None:
    """Raise UsageError, before any training, if the evaluation has no batches."""
    part = {"fit": "test" if config.test_after_fit else None, "validate": "val"}.get(subcommand, subcommand)
    if part is None:
        return
    value = config.trainer[f"limit_{part}_batches"]
    if value is not None and value == 0:
        remedy = ", or set test_after_fit to false" if subcommand == "fit" else ""
        raise UsageError(f"trainer.limit_{part}_batches must be positive, got {value}{remedy}")


def launched_processes(devices: Any, num_nodes: int) -> dict[str, int]:
    """The trainer's devices and nodes under torchrun, which has started the processes already.

    Raises UsageError where the configuration says otherwise: each process would train a copy of its own.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if str(devices) not in ("auto", "-1", "None"):
        asked = len(devices) if isinstance(devices, list) else str(devices).count(",") + 1
        asked = int(devices) if asked == 1 and str(devices).isdecimal() else asked
        if asked * num_nodes != world:
            raise UsageError(
                f"torchrun has started {world} processes, but trainer.devices is {devices} and trainer.num_nodes "
                f"{num_nodes}: give --trainer.devices {local} --trainer.num_nodes {world // local}"
            )
        return {}
    return {"devices": local, "num_nodes": world // local}


def _name_of(files: list[Path]) -> str:
    """The name of a run: that of its first configuration file, with its folders below `configs`."""
    if not files:
        return "run"
    parts = Path(os.path.normpath(files[0].with_suffix(""))).parts
    if "configs" in parts:
        return "/".join(parts[len(parts) - parts[::-1].index("configs") :])
    return parts[-1]


def _stored(path: str, subcommand: str) -> dict[str, Any]:
    """Read the checkpoint of a run; to resume it, it must hold the state of an optimizer."""
    checkpoint = read_run(path)
    if subcommand == "fit" and not checkpoint.get("optimizer_states"):
        raise UsageError(
            f"{path} holds weights but no optimizer, so it cannot be resumed: give it as --model.weights"
        )
    return checkpoint


def _carry_over(ours: dict[str, Any], stored: dict[str, Any]) -> None:
    """Keep this command's `shard_stiefel`, which says how ranks share the work, instead of the checkpoint's."""
    now = ours["optimizer"].get("init_args", {})
    if "shard_stiefel" in now:
        stored["optimizer"].setdefault("init_args", {})["shard_stiefel"] = now["shard_stiefel"]


def _differences(ours: Any, theirs: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(key, theirs, ours) wherever two nests of plain values differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            difference
            for k in dict.fromkeys([*theirs, *ours])
            for difference in _differences(ours.get(k), theirs.get(k), f"{key}.{k}" if key else k)
        ]
    as_list = [list(x) if isinstance(x, tuple) else x for x in (ours, theirs)]
    return [] if as_list[0] == as_list[1] else [(key, theirs, ours)]


def _end(command: Any, stop: Stopped) -> int:
    """Print where a command was stopped.  Returns the exit code."""
    running = isinstance(command, CommandLine)  # and not still being parsed
    first = command.trainer.is_global_zero if running else os.environ.get("LOCAL_RANK", "0") == "0"
    line = command.stopped(stop) if running else _named(stop)
    if first:
        print(line, file=sys.stderr, flush=True)
    return command.exit_code(stop) if running else 128 + stop.signum


def _named(stop: Stopped) -> str:
    return f"stopped by {signal.Signals(stop.signum).name}"


def _continuing(arguments: list[str], checkpoint: Path) -> str:
    """The command that continues from a checkpoint, made from the arguments of the command that was stopped."""
    _, kept = take_option(arguments, "--ckpt_path")
    start = program()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        start = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} {sys.argv[0]}"
    return f"{start} {shlex.join([*kept, '--ckpt_path', str(checkpoint)])}"


def _command(arguments: list[str]) -> Any:
    """The command that the arguments name, parsed."""
    if arguments[0] == "export":
        return Export(arguments[1:])
    return Zoo(arguments) if arguments[0] in COMMANDS else CommandLine(arguments)


def main(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with signals.handled(), warnings.catch_warnings(), quiet_writer():
        if not sys.warnoptions:
            warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
            warnings.filterwarnings(
                "ignore", message=".*(many workers|smaller than the logging interval|LeafSpec).*"
            )
        code, command = 2, None
        try:
            command = _command(arguments)
            code = 1
            command.run()
        except Exception as error:
            if os.environ.get("ORTHO_VIT_TRACEBACK"):
                raise
            print(f"error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
            return code
        except Stopped as stop:
            return _end(command, stop)
        finally:
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()  # at exit, what it needs may be gone
    return 0
