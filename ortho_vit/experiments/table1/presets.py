"""The sizes of the experiment: the arguments that all runs of a sweep share."""

from dataclasses import dataclass

TABLE1 = ("table", "own", "learning-rate", "two-rates", "projections")


@dataclass(frozen=True)
class Preset:
    """A size of the experiment: the number of seeds, the arguments of all runs, and its groups, the default first."""

    seeds: int
    arguments: tuple[str, ...]
    groups: tuple[str, ...] = ("contrasts",)
    rates: str = "paper"  # the preset on which the learning rates of its contrasts were chosen


# No logger and no images: the recorder writes what is needed.
SHARED = (
    "--trainer.devices", "1",
    "--trainer.logger", "false",
    "--trainer.callbacks+=ortho_vit.training.recorder.Recorder",
    "--images.every_n_epochs", "0",
    "--test_after_fit", "true",
)  # fmt: skip
REDUCED = (
    *SHARED,
    "--trainer.accelerator", "cpu",
    "--trainer.max_epochs", "10",
    "--model.name", "ortho_vit_pico",
    "--model.warmup_epochs", "1",
    "--model.compile", "true",
    "--data.autoaugment", "false",
    "--data.num_workers", "0",
    "--checkpoints.every_n_steps", "100",
)  # fmt: skip
# 5,000 training images, different ones for each seed.  10,000 of the others are used for validation once, after the last
# epoch, to choose the learning rate.
FEW = (
    *SHARED,
    "--trainer.callbacks.every_n_epochs", "10",
    "--trainer.accelerator", "cpu",
    "--trainer.max_epochs", "100",
    "--trainer.check_val_every_n_epoch", "100",
    "--trainer.limit_val_batches", "79",
    "--model.name", "ortho_vit_pico",
    "--model.warmup_epochs", "5",
    "--model.compile", "true",
    "--data.autoaugment", "false",
    "--data.crop", "false",
    "--data.flip", "false",
    "--data.num_workers", "0",
    "--data.val_size", "45000",
)  # fmt: skip
# The same with a tenth of the epochs, to see which learning rates train at all.
STABILITY = (
    *FEW,
    "--trainer.max_epochs", "10",
    "--trainer.check_val_every_n_epoch", "10",
    "--model.warmup_epochs", "1",
)  # fmt: skip
# 10,000 training images with crop and flip; 10,000 of the others are used for validation, as above.  bfloat16 activations
# halve the time of a run.
AUGMENTED = (
    *SHARED,
    "--trainer.callbacks.every_n_epochs", "10",
    "--trainer.accelerator", "cpu",
    "--trainer.precision", "bf16-mixed",
    "--trainer.max_epochs", "60",
    "--trainer.check_val_every_n_epoch", "60",
    "--trainer.limit_val_batches", "79",
    "--model.name", "ortho_vit_compact",
    "--model.warmup_epochs", "3",
    "--model.compile", "true",
    "--data.autoaugment", "false",
    "--data.num_workers", "0",
    "--data.val_size", "40000",
    "--checkpoints.every_n_steps", "50",
)  # fmt: skip
# As `reduced`, in less time and with 5,000 of the 50,000 training images held out, to choose the learning rate.
BRIEF = (
    *REDUCED,
    "--trainer.callbacks.every_n_epochs", "10",
    "--trainer.precision", "bf16-mixed",
    "--trainer.check_val_every_n_epoch", "10",
    "--data.val_size", "5000",
)  # fmt: skip
LONG = (
    *SHARED,
    "--trainer.callbacks.every_n_epochs", "5",
    "--trainer.accelerator", "cpu",
    "--trainer.precision", "bf16-mixed",
    "--trainer.max_epochs", "40",
    "--model.name", "ortho_vit_pico",
    "--model.warmup_epochs", "3",
    "--model.compile", "true",
    "--data.num_workers", "0",
    "--checkpoints.every_n_steps", "100",
)  # fmt: skip
PRESETS = {
    "paper": Preset(5, SHARED, (*TABLE1, "contrasts")),
    "reduced": Preset(3, REDUCED, TABLE1),
    "few": Preset(8, FEW, ("contrasts", "rates", "exploratory"), rates="few"),
    "stability": Preset(1, STABILITY, ("largest-rate",)),
    "augmented": Preset(4, AUGMENTED, ("contrasts", "rates"), rates="augmented"),
    "brief": Preset(5, BRIEF, ("contrasts", "rates"), rates="brief"),  # meant for CIFAR-100
    "long": Preset(2, LONG, rates="brief"),
}
