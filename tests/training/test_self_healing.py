"""Weights that something writes between two steps are back on the manifold before they are saved."""

import lightning as L
import torch

from ortho_vit import orthogonality_error, stiefel_parameters
from tests.helpers.small_run import digits, make_classifier, make_trainer


class Disturb(L.Callback):
    """Adds noise to every constrained weight after the third step, as Lookahead or a careless callback would."""

    worst = 0.0

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == 3:
            with torch.no_grad():
                for _, p in stiefel_parameters(pl_module):
                    p.add_(0.05 * torch.randn_like(p))
            self.worst = orthogonality_error(pl_module)


def test_a_run_whose_weights_are_disturbed_heals_by_itself(tmp_path):
    disturb, model = Disturb(), make_classifier()
    trainer = make_trainer(tmp_path, disturb, threshold=None, max_epochs=3)
    trainer.fit(model, datamodule=digits())
    assert disturb.worst > 0.1
    assert trainer.global_step == 12
    assert orthogonality_error(model) < 2e-6
