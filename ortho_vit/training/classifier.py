"""The classifier that Lightning trains: a model of the zoo, a loss, metrics, an optimizer and its schedule.

Every argument is a plain value or, for the optimizer, a class with its arguments, so that a YAML file is the same thing
as a call.  The hyper-parameters a checkpoint keeps are plain values too, and it loads under `weights_only=True`.

Whatever is random in a training step is a function of (seed, epoch, batch, rank): the generators are seeded again
before every batch.  With data modules whose batches are such a function too, a run that was killed and resumed ends
with the same bits as one that was not.
"""

import importlib
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from ortho_vit import optim
from ortho_vit.models import ModelSpec
from ortho_vit.models.orthogonalize import Constraint, Projections
from ortho_vit.models.weights import check_finite, check_manifold, check_types, is_head
from ortho_vit.models.zoo import build, build_from
from ortho_vit.optim.base import StiefelOptimizer
from ortho_vit.parameter import StiefelParameter, project_, stiefel_parameters
from ortho_vit.stiefel import working_dtype
from ortho_vit.training.compile import compile_model, write_out_attention
from ortho_vit.training.finite_steps import BatchResult, FiniteSteps
from ortho_vit.training.lightning_internals import (
    batches_per_epoch,
    begins_with_validation,
    count_finished_epoch_once,
    expect_no_first_step,
)
from ortho_vit.training.metrics import Mean
from ortho_vit.training.schedule import (
    SCHEDULERS,
    Adapted,
    Interval,
    SchedulerFactory,
    scheduler_config,
    warmup_cosine,
)
from ortho_vit.training.stopping import StopOnSignal

SHARDING = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
NUMERICS = 2  # the version of the training arithmetic: runs continue to the same bits within one version
OptimizerFactory = Callable[[Iterable], Optimizer]  # parsed from `class_path` and `init_args` in YAML
Kind = type | tuple[type, ...]
Prepared = tuple[
    Optimizer, dict[str, Any] | None
]  # an optimizer, and Lightning's configuration of its scheduler


class Classifier(L.LightningModule):
    """Trains a model of the zoo, or any of timm's, to classify images.

    Args:
        name: the model, as `create_model` knows it.
        optimizer: the optimizer's class and arguments.  With a constraint it must be one of `ortho_vit.optim`.
        constraint: which attention weights are orthonormal: "within" each head, "across" heads, the number of heads that
            share a block, or null for none.
        projections: which projections are constrained: "q", "qk" or "qkv", or "qk+mlp" for both layers of the MLPs too.
        preserve: keep the function of the weights that training starts from, with a free core after each constrained
            projection.
        scale: give each head a learned scalar that multiplies its logits.
        num_classes: how many classes; null takes the number from the data.
        model_kwargs: further arguments of the model, such as `drop_path_rate`.
        weights: where fine-tuning starts: a model's name with its tag, a `.safetensors` file, a folder or an https address
            with one, or a `.ckpt` file of another run.  The classifier's head is left out where the number of classes
            differs.  To continue a run that was interrupted, use `ckpt_path` instead.
        label_smoothing: the share of the target that is spread over all classes.
        warmup_epochs: how long the learning rate rises before it falls along a cosine to 0.01 of its peak.
        scheduler: another schedule than warm-up and cosine: the class and the arguments of a scheduler of
            `torch.optim.lr_scheduler` or `timm.scheduler`.  Those for plateaus watch val/loss, with mode max val/accuracy.
        scheduler_interval: whether it advances after each "epoch" or each "step"; null: by epoch, except for OneCycleLR,
            CyclicLR and those of timm with t_in_epochs false.
        param_groups: options of the optimizer for some parameters, found by name with wildcards, the first match deciding:
            `[{match: "*.qkv.weight", lr: 0.01}, {match: ["*.bias", "*norm*"], weight_decay: 0}]`.
        layer_decay: for fine-tuning: each block learns at this factor times the rate of the one after it.
        freeze: names of parameters that are not trained, with wildcards: `["patch_embed.*", "pos_embed"]`.
        skip_nonfinite: skip the optimizer steps whose loss or gradient is not finite, instead of stopping; a hundred of
            them in a row still stop the run.
        compile: run the model through `torch.compile`: a minute or so at the start, faster steps afterwards.

    Gradient clipping (`trainer.gradient_clip_val`) measures gradients as autograd gives them.  For a constrained block this
    includes the part normal to the manifold, which moves nothing: the norm is overestimated, so that clipping by norm is a
    little stricter than the threshold says (by 0.03 % at the start of training on the digits).  It keeps the direction of
    the step along the manifold; clipping by value changes it.
    """

    def __init__(
        self,
        name: str,
        optimizer: OptimizerFactory,
        *,
        constraint: Constraint = "within",
        projections: Projections = "qk",
        preserve: bool = False,
        scale: bool = False,
        num_classes: int | None = None,
        model_kwargs: dict[str, Any] | None = None,
        weights: str | None = None,
        label_smoothing: float = 0.0,
        warmup_epochs: float = 0.0,
        layer_decay: float = 1.0,
        freeze: list[str] | None = None,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: Interval | None = None,
        param_groups: list[dict[str, Any]] | None = None,
        skip_nonfinite: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self._require(
            num_classes is not None,
            "num_classes is missing; give it, as in num_classes=data.num_classes (train.py takes it from the data)",
        )
        assert num_classes is not None
        self._require(num_classes >= 2, f"num_classes must be at least 2, got {num_classes}")
        self._require(
            not isinstance(optimizer, Optimizer),
            "optimizer must be a class with its arguments, such as partial(StiefelSGD, lr=0.1), not an optimizer "
            "that has its parameters already",
        )
        self._require(0 <= label_smoothing < 1, f"label_smoothing must be in [0, 1), got {label_smoothing}")
        self._require(0 <= warmup_epochs < math.inf, f"warmup_epochs must be at least 0, got {warmup_epochs}")
        self._require(0 < layer_decay <= 1, f"layer_decay must be in (0, 1], got {layer_decay}")
        self._require(
            scheduler is None or warmup_epochs == 0,
            f"warmup_epochs is {warmup_epochs:g}, which belongs to the schedule that scheduler replaces; set it to 0",
        )
        self._require(
            scheduler is not None or scheduler_interval is None,
            f"scheduler_interval is {scheduler_interval!r}, but there is no scheduler; give one, or leave it out",
        )
        spec = _spec(locals())
        recipes = {
            "optimizer": _as_plain(optimizer, Optimizer),
            "scheduler": scheduler and _as_plain(scheduler, SCHEDULERS),
        }
        optimizer = _as_factory(optimizer, Optimizer, "an optimizer")
        scheduler = scheduler and _as_factory(scheduler, SCHEDULERS, "a scheduler of torch or timm")
        self.save_hyperparameters()  # from the command line these are the parsed values already
        self.hparams.update({key: recipe for key, recipe in recipes.items() if recipe is not None})
        self.hparams.update(
            spec.options()
        )  # model_kwargs may hold some of these options too: each in its own place

        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self.warmup_epochs, self.layer_decay = warmup_epochs, layer_decay
        self.spec, self.untrained_head = spec, False
        if weights is None:
            self.model = build(spec)
        else:
            self.model, self.untrained_head = build_from(spec, weights, keeps_manifold)
        self._freeze(freeze or [])
        if constraint is not None and not any(True for _ in stiefel_parameters(self.model)):
            raise ValueError(
                f"Classifier: constraint={constraint!r}, but no parameter of {name!r} is constrained"
            )
        self._optimizer, self._groups = optimizer, self._parse_groups(param_groups or [])
        self._scheduler, self._interval = scheduler, scheduler_interval
        self._prepared: Prepared | None = self._prepare()  # now, so that errors come before any data is read

        top = {"accuracy": 1} | ({"accuracy_top5": 5} if num_classes > 5 else {})
        accuracy = partial(MulticlassAccuracy, num_classes, average="micro", validate_args=False)
        metrics = MetricCollection({key: accuracy(top_k=k) for key, k in top.items()})
        self.train_loss, self.train_accuracy = Mean(), Mean()
        self.val_metrics, self.test_metrics = metrics.clone(prefix="val/"), metrics.clone(prefix="test/")
        self.steps = FiniteSteps(skip_nonfinite)
        self._compile = compile
        self.classes: list[str] | None = None  # the names of the classes it was trained on, if known
        self.new_seed = False  # whether a resumed run takes this process's seed instead of the checkpoint's
        self.new_images = False  # whether a resumed run may have other training or validation images
        self._images: str | None = None  # a hash of them, where the data module gives one
        self._seed: int | None = None
        self._means: dict[str, Any] = {}  # of the epoch that a resumed run continues

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"Classifier: {message}")

    def _freeze(self, patterns: list[str]) -> None:
        for pattern in patterns:
            found = [p for name, p in self.model.named_parameters() if fnmatchcase(name, pattern)]
            self._require(bool(found), f"freeze: no parameter is called {pattern!r}")
            for parameter in found:
                parameter.requires_grad_(False)
        self._require(any(p.requires_grad for p in self.model.parameters()), "freeze leaves nothing to train")

    def configure_callbacks(self) -> list[Callback]:
        return [StopOnSignal()]

    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        self.check_data(data)
        if stage == "fit":
            self.classes = class_names(data)  # those of a checkpoint are compared when it is loaded
        else:
            check_classes(self.classes, data, "the model")
        constrained = any(True for _ in stiefel_parameters(self.model))
        self._require(
            not (constrained and isinstance(self.trainer.strategy, SHARDING)),
            f"{type(self.trainer.strategy).__name__} cuts parameters apart, orthonormal blocks too; "
            "use trainer.strategy=ddp, or set model.constraint to null",
        )
        if isinstance(self.trainer.precision_plugin, DoublePrecision):
            self.double()  # Lightning converts after a checkpoint is loaded, which would round it to float32
            if stage == "fit":
                project_(self.model)  # to the precision of float64
        device = self.trainer.strategy.root_device
        if device.type == "cpu" and str(self.trainer.precision).startswith("bf16"):
            write_out_attention(self.model)
        if self._compile and stage == "fit":
            compile_model(self.model, device)
            self._compile = False  # once

    def check_data(self, data: Any) -> None:
        """Raise ValueError where the data has another number of classes."""
        theirs = getattr(data, "num_classes", self.num_classes)
        self._require(
            theirs == self.num_classes,
            f"num_classes is {self.num_classes}, but {type(data).__name__} has {theirs} classes; "
            f"set model.num_classes to {theirs}, or leave it out",
        )

    @torch.no_grad()
    def check_images(self, data: Any) -> None:
        """Raise ValueError where the model does not take images of the data's size and channels."""
        if not hasattr(data, "image_size"):
            return
        channels, size, was_training = data.channels, data.image_size, self.model.training
        try:
            self.model.eval()(next(self.model.parameters()).new_zeros(1, channels, size, size))
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"Classifier: {self.hparams['name']} does not take images of {channels}×{size}×{size} "
                f"({' '.join(str(error).split())}); set model.model_kwargs to {{in_chans: {channels}, img_size: {size}}}"
            ) from error
        finally:
            self.model.train(was_training)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    # ----------------------------------------------------------------------------------------------- steps

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self._logits(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        classes = labels if labels.dim() == 1 else labels.argmax(1)  # probabilities, with mixup or cutmix
        self.steps.add(BatchResult(batch_idx, loss.detach(), logits.detach(), classes))
        self.log("train/loss_step", loss)
        self._log_means()
        return loss

    def _log_means(self) -> None:
        """Log the means of the epoch, which are computed at its end."""
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)

    def _log_skipped(self) -> None:
        if self.steps.skip:
            skipped = float(self.steps.skipped)
            self.log("train/skipped_steps", skipped, on_step=False, on_epoch=True, reduce_fx="max")

    def _logits(self, images: Tensor) -> Tensor:
        """The model's logits, at least in float32, so that the loss is as precise as its mean."""
        logits = self.model(images)
        return logits.to(working_dtype(logits.dtype))

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        assert optimizer_closure is not None
        losses = [optimizer_closure()]  # computed first, as `FiniteSteps` needs the gradients

        def closure() -> Any:
            """The loss that is there already; an optimizer that evaluates the model again, as LBFGS does, gets a new one."""
            return losses.pop() if losses else optimizer_closure()

        step = partial(super().optimizer_step, epoch, batch_idx, optimizer, closure)
        for result in self.steps.run(self, step):
            count = len(result.labels)
            self.train_loss.update(result.loss.float() * count, count)
            self.train_accuracy.update((result.logits.argmax(1) == result.labels).sum(), count)
        self._log_skipped()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val/loss", self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._evaluate(batch, "test/loss", self.test_metrics)

    def _evaluate(self, batch: tuple[Tensor, Tensor], loss_name: str, metrics: MetricCollection) -> Tensor:
        """Update and log the metrics; returns the logits."""
        images, labels = batch
        logits = self._logits(images)
        if len(labels):  # a rank without images takes part in the mean too
            metrics.update(logits, labels)
        loss = F.cross_entropy(logits, labels, reduction="sum") / max(len(labels), 1)
        self.log(loss_name, loss, batch_size=len(labels), sync_dist=True)
        self.log_dict(dict(metrics.items()), batch_size=len(labels))
        return logits

    def predict_step(self, batch: tuple[Tensor, Any], batch_idx: int) -> tuple[Any, Tensor]:
        """The names of a batch, and the probability of each class for each image."""
        images, names = batch
        return names, self._logits(images).softmax(-1)

    # ------------------------------------------------------------------------------ optimizer and schedule

    def make_optimizer(self) -> Optimizer:
        """Build the optimizer of the parameters that are trainable now, in groups by learning rate and options."""
        groups: dict[tuple[float, int], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                number = next(
                    i
                    for i, (patterns, _) in enumerate(self._groups)
                    if any(fnmatchcase(name, pattern) for pattern in patterns)
                )
                groups.setdefault((self._lr_scale(name), number), []).append((name, parameter))
        options = [options for _, options in self._groups]
        optimizer = self._optimizer(
            [{"params": named} | options[number] for (_, number), named in groups.items()]
        )
        unknown = {key for choice in options for key in choice} - optimizer.defaults.keys()
        self._require(
            not unknown,
            f"param_groups: {type(optimizer).__name__} has no option {', '.join(map(repr, sorted(unknown)))}; "
            f"it has {', '.join(optimizer.defaults)}",
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

    def _parse_groups(self, groups: list[dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
        """The patterns and options of each of `param_groups`; the last, without options, has all other parameters."""
        parsed: list[tuple[list[str], dict[str, Any]]] = []
        for group in groups:
            match = group.get("match")
            patterns = [match] if isinstance(match, str) else match
            if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
                raise ValueError(
                    f"Classifier: param_groups: {group} needs `match`, a name of parameters with wildcards or a list of them"
                )
            for pattern in patterns:
                self._require(
                    any(fnmatchcase(name, pattern) for name, _ in self.model.named_parameters()),
                    f"param_groups: no parameter is called {pattern!r}",
                )
            parsed.append((patterns, {key: value for key, value in group.items() if key != "match"}))
        return [*parsed, (["*"], {})]

    def _lr_scale(self, name: str) -> float:
        """layer_decay to the power of the number of layers above: none for the head, all blocks for the embeddings."""
        if self.layer_decay == 1:
            return 1.0
        depth = len(getattr(self.model, "blocks", ()))
        self._require(
            depth > 0, f"layer_decay needs a model with `blocks`, and {type(self.model).__name__} has none"
        )
        first, _, rest = name.partition(".")
        if first == "blocks":
            above = depth - int(rest.split(".")[0])
        else:
            above = 0 if first in ("norm", "fc_norm", "attn_pool") or is_head(first) else depth + 1
        return self.layer_decay**above

    def _prepare(self) -> Prepared:
        """The optimizer and its scheduler; the default one is None, as it depends on the length of the run."""
        optimizer = self.make_optimizer()
        return optimizer, None if self._scheduler is None else self._scheduler_config(optimizer)

    def _take_prepared(self) -> Prepared:
        """What was built with the model, for the first fit; rebuilt if other parameters are trainable now.

        An optimizer with an initial state, such as Adagrad, is rebuilt too: the model may have changed device or precision.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0].state:
            return self._prepare()
        held = {id(p) for group in prepared[0].param_groups for p in group["params"]}
        trainable = {id(p) for p in self.model.parameters() if p.requires_grad}
        return prepared if held == trainable else self._prepare()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and spawned processes build their own optimizer: a scheduler cannot be pickled."""
        return self.__dict__ | {"_prepared": None}

    def configure_optimizers(self) -> Any:
        optimizer, schedule = self._take_prepared()
        if schedule is None:
            schedule = {"scheduler": LambdaLR(optimizer, self._warmup_cosine()), "interval": "step"}
        else:
            watched = getattr(schedule["scheduler"], "watches", None)
            self._require(
                watched is None or self.trainer.enable_validation,
                f"the scheduler watches {watched}, and there is no validation; set trainer.limit_val_batches, or take "
                "another scheduler",
            )
        expect_no_first_step(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": schedule | {"name": "lr"}}  # what its curve is called

    def _warmup_cosine(self) -> Callable[[int], float]:
        """The default schedule, over the length of this run."""
        total = self.trainer.estimated_stepping_batches
        self._require(
            math.isfinite(total),
            "the schedule needs to know its end: set trainer.max_epochs or trainer.max_steps",
        )
        an_epoch = math.ceil(batches_per_epoch(self.trainer) / self.trainer.accumulate_grad_batches)
        warmup = min(round(self.warmup_epochs * an_epoch), int(total))
        return lambda step: warmup_cosine(step, warmup=warmup, total=int(total))

    def _scheduler_config(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self._scheduler is not None
        try:
            return scheduler_config(self._scheduler(optimizer), self._interval)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Classifier: scheduler: {error}") from error

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if (
            getattr(scheduler, "watches", None) is None
        ):  # one that watches a metric advances at the end of the epoch
            scheduler.step()

    def _watching(self) -> list[Adapted]:
        """The schedulers that watch a metric."""
        made = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return [scheduler for scheduler in made if isinstance(scheduler, Adapted) and scheduler.watches]

    def on_validation_end(self) -> None:
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            for scheduler in self._watching():
                scheduler.score = float(self.trainer.callback_metrics[str(scheduler.watches)])

    def on_train_epoch_end(self) -> None:
        for scheduler in self._watching():
            if scheduler.score is not None:
                scheduler.step()

    # -------------------------------------------------------------------------------------- exact resuming

    def on_fit_start(self) -> None:
        if self._seed is None:
            self._seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        self._images = images_of(getattr(self.trainer, "datamodule", None))

    def on_train_start(self) -> None:
        self._restore_means()
        count_finished_epoch_once(self.trainer)
        if begins_with_validation(self.trainer):  # maybe that of an epoch without further batches
            self._log_means()
            self._log_skipped()

    def _restore_means(self) -> None:
        """Restore the means of a resumed epoch, after the model was converted: `bf16-true` would have rounded them."""
        for name, states in self._means.items():
            getattr(self, name).restore(states, self.global_rank, self.trainer.world_size)
        self._means = {}

    def on_train_epoch_start(self) -> None:
        """Reset the means.  Lightning does not call this for a run that continues within an epoch."""
        self.train_loss.reset()
        self.train_accuracy.reset()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self._seed is not None
        _seed_everything(self._seed, self.current_epoch, batch_idx, self.global_rank)
        self.steps.before_batch(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ortho_vit"] = {
            "numerics": NUMERICS,
            "classes": self.classes,
            "images": self._images,
            "seed": self._seed,
            "steps": self.steps.state_dict(),
            "means": {"train_loss": self.train_loss.sums(), "train_accuracy": self.train_accuracy.sums()},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = self._attached_trainer()
        data, path = getattr(trainer, "datamodule", None), getattr(trainer, "ckpt_path", None)
        source = str(path or "the checkpoint")
        self.check_checkpoint(checkpoint, source, data)
        saved = checkpoint.get("ortho_vit") or {}
        self.classes = stored_classes(checkpoint) or self.classes
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if saved.get("numerics") != NUMERICS:
            rank_zero_warn(
                f"{source} is of an earlier version, whose steps round differently: the run goes on, but not to the "
                "same bits as with that version"
            )
        if not self.new_images:
            check_same_images(stored_images(checkpoint), data, source)
        if saved:
            self._seed = None if self.new_seed else saved["seed"]
            self._means = saved.get("means", {})
            if "steps" in saved:
                self.steps.load_state_dict(saved["steps"])

    def _attached_trainer(self) -> L.Trainer | None:
        try:
            return self.trainer
        except RuntimeError:  # loaded from a checkpoint, to be used without one
            return None

    def check_checkpoint(self, checkpoint: dict[str, Any], source: str, data: Any = None) -> None:
        """Raise ValueError for damaged weights or optimizer states, another model, or other classes than those of `data`."""
        check_classes(stored_classes(checkpoint), data, source)
        theirs, ours = checkpoint["state_dict"], self.state_dict()
        for name, x in ours.items():
            if name not in theirs or theirs[name].shape != x.shape:
                raise ValueError(
                    f"{source} is of another model: its {name!r} is missing, or of another shape"
                )
        for key in ("state_dict", "current_model_state"):  # with averaging, the average and the weights
            weights = checkpoint.get(key, {})
            check_types(ours, weights, source)
            check_finite(weights, source)
            if keeps_manifold(self.hparams):
                check_manifold(self, weights, source)
        for optimizer in checkpoint.get("optimizer_states", ()):
            for number, state in optimizer["state"].items():
                tensors = {
                    f"{key} of parameter {number}": x for key, x in state.items() if isinstance(x, Tensor)
                }
                check_finite(tensors, source)


def _spec(options: dict[str, Any]) -> ModelSpec:
    try:
        return ModelSpec.from_options(options)
    except ValueError as error:
        raise ValueError(f"Classifier: model_kwargs: {error}") from error


def class_names(data: Any) -> list[str] | None:
    """The names of a data module's classes in the order of their labels, or None where it has none."""
    names = getattr(data, "classes", None)
    return None if names is None else [str(name) for name in names]


def stored_classes(checkpoint: Mapping[str, Any]) -> list[str] | None:
    """The names of the classes in a run checkpoint, or None where it has none: those of version 0.1 have none."""
    saved = checkpoint.get("ortho_vit")
    names = saved.get("classes") if isinstance(saved, Mapping) else None
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"the checkpoint is damaged: its class names are {names!r:.80}, not a list of names")
    return names


def check_classes(trained: Sequence[str] | None, data: Any, source: str) -> None:
    """Raise ValueError where the data's classes have other names than those trained on, or another order."""
    names = class_names(data)
    if trained is None or names is None or list(trained) == names:
        return
    if len(trained) != len(names):
        difference = f"it was trained on {len(trained)} classes, and {type(data).__name__} has {len(names)}"
    else:
        label = next(i for i, (a, b) in enumerate(zip(trained, names, strict=True)) if a != b)
        difference = (
            f"its class {label} is {trained[label]!r}, but that of {type(data).__name__} is {names[label]!r}"
        )
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
    return f", rename some with --data.class_names '{{{folder}: {theirs[0]}}}'"


def images_of(data: Any) -> str | None:
    """A hash of a data module's training and validation images, or None where it gives none."""
    return data.digest() if hasattr(data, "digest") else None


def stored_images(checkpoint: Mapping[str, Any]) -> str | None:
    """The same of the images that a run checkpoint was trained on, or None: earlier versions had none."""
    saved = checkpoint.get("ortho_vit")
    return saved.get("images") if isinstance(saved, Mapping) else None


def check_same_images(trained: str | None, data: Any, source: str) -> None:
    """Raise ValueError where a run that is resumed would train or validate on other images than before."""
    found = images_of(data)
    if trained is not None and found is not None and found != trained:
        raise ValueError(
            f"{source} was trained on other images than {type(data).__name__} has now: some were added, removed or renamed, "
            "so training images may become validation images.  Give it those it had, start a new run from its weights "
            f"with --model.weights {source}, or ask for it with --allow_changes data.root"
        )


def keeps_manifold(run: Any) -> bool:
    """Whether a run of these hyper-parameters claims that its constrained weights are orthonormal."""
    recipe = run.get("optimizer") if isinstance(run, Mapping) and run.get("constraint") else None
    if not isinstance(recipe, dict):
        return False
    optimizer = getattr(optim, str(recipe.get("class_path")).rpartition(".")[2], None)  # of this package only
    return getattr(optimizer, "exact", False) and (recipe.get("init_args") or {}).get("inner_steps") is None


def _seed_everything(*parts: int) -> None:
    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# ------------------------------------------ optimizer and scheduler, from and to `class_path` and `init_args`


def _as_factory(value: Any, kind: Kind, what: str) -> Any:
    """A function that builds the optimizer or the scheduler, also from `class_path` and `init_args`."""
    if not isinstance(value, dict):
        return value
    return partial(class_at(value["class_path"], kind, what), **value.get("init_args", {}))


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


def _as_plain(value: Any, kind: Kind) -> dict[str, Any] | None:
    """`class_path` and `init_args` of a class or `functools.partial`; None where only the parser knows them."""
    if isinstance(value, dict):
        return value
    cls = value.func if isinstance(value, partial) else value
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        return None
    arguments = dict(value.keywords) if isinstance(value, partial) else {}
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": arguments}
