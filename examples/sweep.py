"""A search over learning rate and momentum with Optuna (`pip install optuna`), on the digits: python examples/sweep.py

Each trial is an ordinary run of Lightning's Trainer; trials that do worse than the median are stopped early.
"""

import logging
import sys
from functools import partial

import ortho_vit  # noqa: F401  # isort: skip  (first: Lightning then imports beside a torchvision of another build, too)
import lightning as L

from ortho_vit.data import Digits
from ortho_vit.optim import StiefelSGD
from ortho_vit.training import Classifier

try:
    import optuna
except ModuleNotFoundError:
    sys.exit("examples/sweep.py needs Optuna: pip install optuna")


class Prune(L.Callback):
    """Report each epoch to Optuna, and stop a trial that it gives up on."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trial.report(trainer.callback_metrics["val/accuracy"].item(), trainer.current_epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def objective(trial: optuna.Trial, epochs: int) -> float:
    """The validation accuracy of one run."""
    L.seed_everything(0, verbose=False)
    lr, momentum = trial.suggest_float("lr", 0.005, 0.5, log=True), trial.suggest_float("momentum", 0.5, 0.95)
    model = Classifier("ortho_vit_digits", partial(StiefelSGD, lr=lr, momentum=momentum), num_classes=10)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=[Prune(trial)],
    )  # fmt: skip
    trainer.fit(model, Digits(batch_size=64))
    return trainer.callback_metrics["val/accuracy"].item()


def main(trials: int = 20, epochs: int = 5) -> float:
    """Search, print the best trial, and return its accuracy."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(partial(objective, epochs=epochs), n_trials=trials)
    print(f"best of {len(study.trials)}: {study.best_params}, validation accuracy {study.best_value:.1%}")
    return study.best_value


if __name__ == "__main__":
    main()
