"""The classifier that Lightning trains: a model of the zoo, a loss, metrics, an optimizer and its schedule.

Every argument is a plain value or, for the optimizer, a class with its arguments, so that a YAML file is the same thing
as a call.  The hyper-parameters a checkpoint keeps are plain values too, and it loads under `weights_only=True`.

Whatever is random in a training step is a function of (seed, epoch, batch, rank): the generators are seeded again
before every batch.  With data modules whose batches are such a function too, a run that was killed and resumed ends
with the same bits as one that was not.
"""

import math
import os
import random
from collections.abc import Callable
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
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from ortho_vit.models import ModelSpec
from ortho_vit.models.orthogonalize import Constraint, Projections
from ortho_vit.models.weights import check_finite, check_manifold, check_types
from ortho_vit.models.zoo import build, build_from
from ortho_vit.parameter import project_, stiefel_parameters
from ortho_vit.stiefel import working_dtype
from ortho_vit.training.compile import compile_model, write_out_attention
from ortho_vit.training.finite_steps import BatchResult, FiniteSteps
from ortho_vit.training.lightning_internals import (
    begins_with_validation,
    count_finished_epoch_once,
    expect_no_first_step,
)
from ortho_vit.training.metrics import Mean
from ortho_vit.training.optimizer import (
    OptimizerFactory,
    as_factory,
    as_plain,
    keeps_manifold,
    make_optimizer,
    matching,
    parse_groups,
)
from ortho_vit.training.same_data import (
    check_classes,
    check_same_images,
    class_names,
    images_of,
    stored,
    stored_classes,
)
from ortho_vit.training.schedule import (
    SCHEDULERS,
    Adapted,
    Interval,
    SchedulerFactory,
    scheduler_config,
    warmup_cosine_config,
)
from ortho_vit.training.stopping import StopOnSignal

SHARDING = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
NUMERICS = 2  # the version of the training arithmetic: runs continue to the same bits within one version
Prepared = tuple[Optimizer, dict[str, Any] | None]  # and Lightning's configuration of its scheduler


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
        scheduler: a schedule instead of warm-up and cosine: the class and the arguments of a scheduler of
            `torch.optim.lr_scheduler` or `timm.scheduler`.  For plateaus they watch val/loss, or val/accuracy with mode max.
        scheduler_interval: whether it advances after each "epoch" or each "step"; null: by epoch, except for OneCycleLR,
            CyclicLR and timm's schedulers with t_in_epochs false.
        param_groups: options of the optimizer for some parameters, found by name with wildcards, the first match deciding:
            `[{match: "*.qkv.weight", lr: 0.01}, {match: ["*.bias", "*norm*"], weight_decay: 0}]`.
        layer_decay: for fine-tuning: each block learns at this factor times the rate of the one after it.
        freeze: names of parameters that are not trained, with wildcards: `["patch_embed.*", "pos_embed"]`.
        skip_nonfinite: skip the optimizer steps whose loss or gradient is not finite, instead of stopping; a hundred of
            them in a row still stop the run.
        compile: run the model through `torch.compile`: it takes about a minute at the start, and steps are faster.

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
        if num_classes is None:
            raise ValueError(
                "Classifier: num_classes is missing; give it, as in num_classes=data.num_classes (train.py takes it from "
                "the data)"
            )
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
        try:
            spec = ModelSpec.from_options(locals())
        except ValueError as error:
            raise ValueError(f"Classifier: model_kwargs: {error}") from error
        recipes = {
            "optimizer": as_plain(optimizer, Optimizer),
            "scheduler": scheduler and as_plain(scheduler, SCHEDULERS),
        }
        optimizer = as_factory(optimizer, Optimizer, "an optimizer")
        scheduler = scheduler and as_factory(scheduler, SCHEDULERS, "a scheduler of torch or timm")
        self.save_hyperparameters()  # from the command line these are the parsed values already
        self.hparams.update({key: recipe for key, recipe in recipes.items() if recipe is not None})
        self.hparams.update(spec.options())  # of which model_kwargs may hold some: each in its own place

        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self.warmup_epochs, self.layer_decay = warmup_epochs, layer_decay
        self.spec, self.untrained_head = spec, False
        if weights is None:
            self.model = build(spec)
        else:
            self.model, self.untrained_head = build_from(spec, weights, keeps_manifold)
        self._freeze(freeze or [])
        self._require(
            constraint is None or any(True for _ in stiefel_parameters(self.model)),
            f"constraint={constraint!r}, but no parameter of {name!r} is constrained",
        )
        self._optimizer, self._groups = optimizer, parse_groups(self.model, param_groups or [])
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
            for parameter in matching(self.model, pattern, "freeze"):
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
        return make_optimizer(self.model, self._optimizer, self._groups, self.layer_decay)

    def _prepare(self) -> Prepared:
        """The optimizer and its scheduler; the default one is None, as it depends on the length of the run."""
        optimizer = self.make_optimizer()
        if self._scheduler is None:
            return optimizer, None
        try:
            return optimizer, scheduler_config(self._scheduler(optimizer), self._interval)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Classifier: scheduler: {error}") from error

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
            schedule = warmup_cosine_config(optimizer, self.trainer, self.warmup_epochs)
        watched = getattr(schedule["scheduler"], "watches", None)
        self._require(
            watched is None or self.trainer.enable_validation,
            f"the scheduler watches {watched}, and there is no validation; set trainer.limit_val_batches, or take "
            "another scheduler",
        )
        expect_no_first_step(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": schedule | {"name": "lr"}}  # what its curve is called

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if getattr(scheduler, "watches", None) is None:  # the others advance in `on_train_epoch_end`
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
        for name, sums in self._means.items():  # not when they are loaded: `bf16-true` would round them
            getattr(self, name).restore(sums, self.global_rank, self.trainer.world_size)
        self._means = {}
        count_finished_epoch_once(self.trainer)
        if begins_with_validation(self.trainer):  # maybe that of an epoch without further batches
            self._log_means()
            self._log_skipped()

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
        try:
            trainer = self.trainer
        except RuntimeError:  # loaded from a checkpoint, to be used without a trainer
            trainer = None
        data = getattr(trainer, "datamodule", None)
        source = str(getattr(trainer, "ckpt_path", None) or "the checkpoint")
        self.check_checkpoint(checkpoint, source, data)
        saved = stored(checkpoint)
        self.classes = stored_classes(checkpoint) or self.classes
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        if saved.get("numerics") != NUMERICS:
            rank_zero_warn(
                f"{source} is of an earlier version, whose steps round differently: the run goes on, but not to the "
                "same bits as with that version"
            )
        if not self.new_images:
            check_same_images(checkpoint, data, source)
        if saved:
            self._seed = None if self.new_seed else saved["seed"]
            self._means = saved.get("means", {})
            if "steps" in saved:
                self.steps.load_state_dict(saved["steps"])

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
                tensors = {key: x for key, x in state.items() if isinstance(x, Tensor)}
                check_finite({f"{key} of parameter {number}": x for key, x in tensors.items()}, source)


def _seed_everything(*parts: int) -> None:
    seed = int(np.random.SeedSequence(parts).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
