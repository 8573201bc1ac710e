"""The command line: LightningCLI with its own commands, composed configurations and errors of one line.

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

from ortho_vit.cli.changes import SPLITTING, Changes, check_changes, check_model, find_changes, record_changes
from ortho_vit.cli.compose import config_files, expand, expand_card, expand_run, refuse_classes, take_option
from ortho_vit.cli.entry import program
from ortho_vit.cli.export import Export
from ortho_vit.cli.messages import explain
from ortho_vit.cli.run_folder import (
    ROOT,
    classes_of,
    locate_checkpoint,
    read_config,
    read_run,
    removed_if_empty,
    run_of,
    with_spec,
)
from ortho_vit.cli.zoo import COMMANDS, Zoo
from ortho_vit.errors import UsageError
from ortho_vit.files import next_folder
from ortho_vit.stiefel import orthogonality_error
from ortho_vit.training import reporting
from ortho_vit.training.checkpointing import Checkpoints, Preloaded, is_trial, refuse_to_lose_steps
from ortho_vit.training.classifier import Classifier
from ortho_vit.training.images import AttentionImages
from ortho_vit.training.measuring import OrthogonalityMonitor
from ortho_vit.training.predictions import PerClass, PredictionWriter
from ortho_vit.training.same_data import check_classes, check_same_images
from ortho_vit.training.stopping import Stopped, signals

SUBCOMMANDS = ("fit", "validate", "test", "predict", "export", *COMMANDS)


class SaveConfig(SaveConfigCallback):
    """Writes the configuration into the folder of a run; a resumed run has it already."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = trainer.log_dir
        if stage == "fit" and folder and not os.path.exists(os.path.join(folder, self.config_filename)):
            super().setup(trainer, pl_module, stage)


class CommandLine(LightningCLI):
    """One of the commands fit, validate, test and predict: the constructor parses and instantiates, `run` runs it.

    LightningCLI's own sub-commands run within its constructor, so it is used without them.
    """

    trainer: Trainer
    model: Classifier
    datamodule: Any

    def __init__(self, arguments: list[str]) -> None:
        if not arguments or arguments[0].startswith("-"):
            arguments = ["fit", *arguments]
        self.command, *options = self.arguments = arguments
        if self.command not in SUBCOMMANDS:
            raise UsageError(f"unknown sub-command {self.command!r}; there are {', '.join(SUBCOMMANDS)}")
        self._data: Any = None  # the data module, if the number of classes had to be taken from it
        self._preloaded: Preloaded | None = None  # the checkpoint that is resumed or evaluated
        self._allowed: list[str] = []  # changes of a run that is resumed
        self._changes: Changes = {}
        super().__init__(
            Classifier,
            save_config_callback=SaveConfig,
            trainer_defaults={
                "default_root_dir": ROOT,
                "enable_model_summary": False,
                "log_every_n_steps": 10,
                "num_sanity_val_steps": 0,
            },
            seed_everything_default=0,
            parser_kwargs={
                "exit_on_error": False,
                "prog": f"{program()} {self.command}",
                "description": f"Every option of `{self.command}`; `{program()} --help` has examples.",
            },
            auto_configure_optimizers=False,
            args=options,
            run=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        add = partial(parser.add_argument, type=str | None, default=None)
        add("--name", help="the folder of the run, below default_root_dir")
        add("--test_after_fit", type=bool, default=False, help="test the best checkpoint at the end")
        add(
            "--allow_changes",
            help="options that may differ from those of the run that is resumed: data.batch_size,trainer.precision",
        )
        if self.command != "fit":
            add("--weights", help="trained weights, whose card names model and data")
        if self.command == "predict":
            add("--pictures", help="a folder of images, or one image; needs --weights")
        parser.add_lightning_class_args(Checkpoints, "checkpoints")
        parser.add_lightning_class_args(OrthogonalityMonitor, "orthogonality")
        parser.add_lightning_class_args(AttentionImages, "images")
        parser.add_lightning_class_args(PredictionWriter, "predictions")
        if self.command == "test":
            parser.add_lightning_class_args(PerClass, "per_class")
        skip: set[str | int] = {*self.subcommands()[self.command]}
        self._trainer_options = parser.add_method_arguments(Trainer, self.command, skip=skip)

    # --------------------------------------------------------------------------------------------- parsing

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        command, files = self.command, config_files(args)
        allowed, args = take_option(args, "--allow_changes")
        self._allowed = allowed.split(",") if allowed else []
        try:
            self.config = parser.parse_args(expand_run(expand_card(expand(args), command), command))
        except argparse.ArgumentError as error:
            raise UsageError(explain(error, parser)) from error
        config = self.config
        if config.get("weights") or config.get("pictures"):  # abbreviated, or in a file
            raise UsageError("--weights and --pictures must be written in full, and on the command line")
        if config.allow_changes:
            raise UsageError(
                "--allow_changes must be written in full, and on the command line: a file would allow the changes every time"
            )
        if allowed and command != "fit":
            raise UsageError(f"--allow_changes is for fit with --ckpt_path, not for {command}")
        config.name = config.name or _name_of(files)
        if Path(config.name).is_absolute() or ".." in Path(config.name).parts:
            raise UsageError(
                f"name must be a folder below default_root_dir, got {config.name!r}; --trainer.default_root_dir says where"
            )
        if config.ckpt_path:
            folder = Path(config.trainer.default_root_dir or ".") / config.name
            config.ckpt_path = locate_checkpoint(config.ckpt_path, folder, command)
        if path := config.ckpt_path:
            self._preloaded = Preloaded(Path(path), read_run)
            stored = self._preloaded.content
            if command == "fit":
                if not stored.get("optimizer_states"):
                    raise UsageError(
                        f"{path} holds weights but no optimizer, so it cannot be resumed: give it as --model.weights"
                    )
                refuse_to_lose_steps(Path(path), stored.get("global_step", 0))
                self._compare(path)
            self._take_over(stored["hyper_parameters"], path)
        elif command != "fit" and config.model.weights is None:
            raise UsageError(
                f"{command} needs trained weights: give --weights NAME, --ckpt_path FILE.ckpt or --model.weights FILE"
            )

    def _compare(self, path: str) -> None:
        """Raise UsageError if the configuration differs from the `config.yaml` beside the checkpoint, unless allowed."""
        run = run_of(path)
        if run is None or self.config.get("data") is None:
            return
        ours = self._plain_config()
        if isinstance(ours.get("seed_everything"), bool):  # any seed, or none
            ours["seed_everything"] = read_config(run / "config.yaml").get("seed_everything")
        self._changes = find_changes(run, ours)
        if "data.root" in self._allowed:  # recorded also where other images are in the same folder
            root = (ours["data"].get("init_args") or {}).get("root")
            self._changes.setdefault("data.root", (root, root))
        check_changes(self._changes, self._allowed, path)

    def _plain_config(self) -> dict[str, Any]:
        """The configuration as plain values."""
        return yaml.safe_load(self.parser.dump(self.config, skip_none=False, skip_validation=True))

    def _take_over(self, stored: dict[str, Any], path: str) -> None:
        """Use the model of a checkpoint; to resume a run, it must be the model of the configuration."""
        refuse_classes(stored.get("model_kwargs"), path)
        if self.command == "fit":
            ours = with_spec(self._plain_config()["model"], "model")
            check_model(ours, stored, path)
            sharding = ours["optimizer"].get("init_args", {}).get("shard_stiefel")
            if sharding is not None:  # how ranks share the work is this command's choice
                stored["optimizer"].setdefault("init_args", {})["shard_stiefel"] = sharding
        model = self.config.model
        kept = {"weights": None, "skip_nonfinite": model.skip_nonfinite, "compile": model.compile}
        try:
            self.config = self.parser.parse_object({"model": stored | kept}, self.config)
        except (argparse.ArgumentError, TypeError) as error:
            raise UsageError(f"{path} is not a checkpoint of ours: {explain(error, self.parser)}") from error

    # --------------------------------------------------------------------------------------- instantiation

    def before_instantiate_classes(self) -> None:
        config = self.config
        if config.get("data") is None:
            raise UsageError("no data: give --data, such as ortho_vit.data.Digits")
        described = config.data.as_dict()
        trainer = {key: config.trainer[key] for key in ("max_epochs", "max_steps", "precision")}
        self._other_values = {"seed": config.seed_everything, "data": described, "trainer": trainer}
        _check_trainer(self.command, config)
        if config.model.num_classes is None:
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
        described = self.config.data
        if self._data is not None:
            self.config.data = None
        try:
            super().instantiate_classes()
        except ValueError as error:  # such as a logger that is not installed
            raise UsageError(explain(error, self.parser)) from error
        finally:
            self.config.data = described
        self.datamodule = self.datamodule or self._data

    def after_instantiate_classes(self) -> None:
        self.model.check_data(self.datamodule)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config, trainer = self.config_init, self.config_init.trainer
        kwargs |= launched_processes(trainer.devices, trainer.num_nodes)
        self._is_new = False  # whether a folder has to be created for the run
        loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
        own = [logger for logger in loggers if not isinstance(logger, bool | None)]  # the user's
        if self.command != "fit":
            kwargs["logger"] = False
        elif trainer.logger in (None, True) or (own and not isinstance(own[0], TensorBoardLogger)):
            # The first logger decides where the run's folder is
            run = run_of(config.ckpt_path) if config.ckpt_path else None
            self._is_new = run is None
            folder, name, version = trainer.default_root_dir, config.name, None
            if run:  # continue where it was
                folder, name, version = run.parent, "", run.name
            kwargs["logger"] = [
                reporting.TensorBoard(folder, name, version, default_hp_metric=False),
                *own,
            ]
        self.history = reporting.History()
        # Reporting callbacks run after the callbacks that compute metrics
        callbacks: list[Callback] = [reporting.StartLines(), self.history]
        if kwargs.get("logger", trainer.logger) and not trainer.fast_dev_run:
            callbacks += [reporting.LearningRates(), reporting.HyperParameters(self._other_values)]
        if trainer.enable_progress_bar is not False:
            callbacks.append(reporting.progress_bar(self.history))
        self.trainer_defaults["callbacks"] = callbacks
        return super().instantiate_trainer(**kwargs)

    # --------------------------------------------------------------------------------------------- running

    def run(self) -> None:
        self.model.check_images(self.datamodule)
        config, weights = self.config_init, self.model.hparams["weights"]
        if path := config.ckpt_path:  # before the run has a folder
            assert self._preloaded is not None
            self.model.check_checkpoint(self._preloaded.content, path, self.datamodule)
            config.checkpoints.preloaded, self._preloaded = self._preloaded, None
            self.model.new_seed = "seed_everything" in self._allowed
            self.model.new_images = not SPLITTING.isdisjoint(self._allowed)
        elif self.command != "fit":
            if self.model.untrained_head:
                raise UsageError(
                    f"{weights} has a head for other classes than the data's {self.model.num_classes}; fine-tune it "
                    "first, or give data of its own classes"
                )
            check_classes(classes_of(weights), self.datamodule, weights)
        options = {name: config[name] for name in self._trainer_options}
        getattr(self, self.command)(model=self.model, datamodule=self.datamodule, **options)

    def fit(self, **kwargs: Any) -> None:
        config, checkpoints = self.config_init, self.config_init.checkpoints
        self._say(reporting.describe(self.model.model, self.model.hparams["name"]))
        preloaded = checkpoints.preloaded
        if self.trainer.world_size == 1:  # reports missing or damaged data before the run has a folder
            self.datamodule.prepare_data()
            self.datamodule.setup("fit")
            if preloaded and not self.model.new_images:
                check_same_images(preloaded.content, self.datamodule, config.ckpt_path)
            if config.test_after_fit:
                self._require_test_set()
        created = None
        if self.trainer.is_global_zero and not is_trial(self.trainer):
            created = self._claim_folder(checkpoints)
            run = Path(self.trainer.log_dir or self.trainer.default_root_dir)
            self._say(f"run: {run}")
            if self._changes:
                record_changes(run, self._changes, preloaded.content["global_step"])
        with removed_if_empty(created, self.trainer):
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
            line = f"test it: {program()} test --ckpt_path {shlex.quote(self.trainer.log_dir)}"
            if isinstance(self.trainer.logger, TensorBoardLogger):
                line += f"   logs: tensorboard --logdir {self.trainer.logger.save_dir}"
            self._say(line)

    def _require_test_set(self) -> None:
        """Raise UsageError where the test at the end would have nothing to test on."""
        self.datamodule.setup("test")
        test_set = getattr(self.datamodule, "test_set", None)
        if test_set is not None and not len(test_set):
            raise UsageError(
                f"{type(self.datamodule).__name__} has no images to test on: set data.val_size, add a test set, or set "
                "test_after_fit to false"
            )

    def _claim_folder(self, checkpoints: Checkpoints) -> Path | None:
        """Create and lock the folder of the run, before anything is written and before other processes are started.

        Returns the folder if it is new.
        """
        logger, trainer, folder = self.trainer.logger, self.trainer, None
        if self._is_new:
            assert isinstance(logger, TensorBoardLogger)
            folder = next_folder(Path(logger.root_dir), "version_")
            version = int(folder.name.removeprefix("version_"))
            logger = reporting.TensorBoard(logger.save_dir, logger.name, version, default_hp_metric=False)
            trainer.loggers = [logger, *trainer.loggers[1:]]
        if logger is None:
            checkpoints.claim(Path(trainer.default_root_dir))
        elif isinstance(logger, TensorBoardLogger):
            checkpoints.claim(Path(logger.log_dir))
        return folder

    def validate(self, **kwargs: Any) -> None:
        self._summarize(dict(self.trainer.validate(**kwargs | {"verbose": False})[0]), kwargs["ckpt_path"])

    def test(self, **kwargs: Any) -> None:
        self._summarize(dict(self.trainer.test(**kwargs | {"verbose": False})[0]), kwargs["ckpt_path"])
        per_class: PerClass = self.config_init.per_class
        if per_class.folder is not None:
            self._say(reporting.as_table(("class", "images", "accuracy"), per_class.rows()))
            self._say(f"per-class accuracy and confusion matrix in {per_class.folder}")

    def predict(self, **kwargs: Any) -> None:
        self.trainer.predict(**kwargs | {"return_predictions": False})
        writer: PredictionWriter = self.config_init.predictions
        if writer.target is None:  # the standard output, which holds nothing else
            return
        if writer.count:
            self._say(reporting.as_table(("file", "class", "probability"), writer.preview))
        source = f", by {kwargs['ckpt_path']}" if kwargs["ckpt_path"] else ""
        self._say(f"{writer.count} predictions in {writer.target}{source}")

    def _say(self, line: str) -> None:
        if self.trainer.is_global_zero:
            print(line, flush=True)

    def _summarize(self, results: dict[str, Any], checkpoint: Any = None) -> None:
        rows = reporting.labelled(reporting.named_for(self.datamodule, results))
        if self.model.hparams["constraint"] is not None:
            rows["orthogonality error"] = f"{orthogonality_error(self.model.model):.1e}"
        if self.model.steps.skipped:
            rows["steps skipped"] = f"{self.model.steps.skipped}, not finite"
        if checkpoint := checkpoint or self.config_init.checkpoints.best_path:
            rows["checkpoint"] = str(checkpoint)
        if self.history.curves:
            rows["curves"] = str(self.history.curves)
        if rows:
            self._say(reporting.summary(rows))

    # -------------------------------------------------------------------------------------------- stopping

    def stop(self, stop: Stopped) -> int:
        """Say where training has stopped and how to continue it.  Returns the exit code."""
        strategy, is_first, code = self.trainer.strategy, self.trainer.is_global_zero, 128 + stop.signum
        line = _stopped_by(stop)
        if stop.step is not None:
            line = f"stopped at step {stop.step:,} of {stop.steps:,}"
            if last := self.config_init.checkpoints.last_path:
                line += f"; continue with {_continuing(self.arguments, last)}"
            environment = getattr(strategy, "cluster_environment", None)
            if isinstance(environment, LightningEnvironment) and not is_first:
                code = 0  # Lightning, which has started this process, would kill it otherwise
        elif strategy.launcher is not None:
            # the processes that it has started do not know, and would wait for this one
            strategy.launcher.kill(signal.SIGTERM)
        if is_first:
            print(line, file=sys.stderr, flush=True)
        return code


def _check_trainer(command: str, config: Any) -> None:
    """Raise UsageError for values that Lightning does not check, or only by a division by zero."""
    trainer = config.trainer
    positive = [f"limit_{command.replace('validate', 'val')}_batches"]
    if command == "fit":
        if trainer.max_epochs in (None, -1) and trainer.max_steps == -1 and not trainer.fast_dev_run:
            raise UsageError(
                "the schedule needs to know its end: give --trainer.max_epochs or --trainer.max_steps"
            )
        positive = [
            "accumulate_grad_batches", "check_val_every_n_epoch", "val_check_interval", "limit_train_batches",
            *(["limit_test_batches"] if config.test_after_fit else []),
        ]  # fmt: skip
    for name in positive:
        if trainer[name] == 0:
            remedy = ", or set test_after_fit to false" if command == "fit" and "test" in name else ""
            raise UsageError(f"trainer.{name} must be positive, got {trainer[name]}{remedy}")


def launched_processes(devices: Any, num_nodes: int) -> dict[str, int]:
    """The trainer's devices and nodes under torchrun, which has started the processes already.

    Raises UsageError where the configuration says otherwise: each process would train a copy of its own.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if str(devices) in ("auto", "-1", "None"):
        return {"devices": local, "num_nodes": world // local}
    asked = int(devices) if str(devices).isdecimal() else len(str(devices).split(","))
    if asked * num_nodes != world:
        raise UsageError(
            f"torchrun has started {world} processes, but trainer.devices is {devices} and trainer.num_nodes "
            f"{num_nodes}: give --trainer.devices {local} --trainer.num_nodes {world // local}"
        )
    return {}


def _name_of(files: list[Path]) -> str:
    """The name of a run: that of its first configuration file, with its folders below `configs`."""
    if not files:
        return "run"
    path = Path("/", os.path.normpath(files[0].with_suffix("")))
    _, found, below = path.as_posix().rpartition("/configs/")
    return below if found else path.name


def _stopped_by(stop: Stopped) -> str:
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
    with signals.handled(), warnings.catch_warnings(), reporting.quiet_writer():
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
            if isinstance(command, CommandLine):  # and not still being parsed
                return command.stop(stop)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(_stopped_by(stop), file=sys.stderr, flush=True)
            return 128 + stop.signum
        finally:
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()  # at exit, what it needs may be gone
    return 0
