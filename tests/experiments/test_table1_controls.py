"""The controls of the contrasts: what they do to W^Q and W^K, and that they do nothing else."""

from functools import partial

import lightning as L
import pytest
import torch

from ortho_vit.experiments.table1.controls import HeldNorm, LargeStart, query_key_blocks
from ortho_vit.training import Classifier
from tests.helpers.small_run import digits, make_classifier, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated"),
]


def make(lr: float = 0.1) -> Classifier:
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=0.9, weight_decay=0.1)  # norms shrink visibly
    return make_classifier(optimizer, constraint=None)


def fit(folder, model, *callbacks, epochs=2, resume=None):
    trainer = make_trainer(folder, *callbacks, max_epochs=epochs)
    trainer.fit(model, digits(limit=64, val_size=0), ckpt_path=resume)


def norms(model):
    return torch.cat([torch.linalg.matrix_norm(X).detach() for X in query_key_blocks(model)])


def test_the_blocks_are_the_queries_and_keys_of_every_head():
    model = make().model
    blocks = query_key_blocks(model)
    assert [tuple(X.shape) for X in blocks] == [(4, 16, 64)] * 6  # q and k of three attentions
    weight = model.blocks[0].attn.qkv.weight
    torch.testing.assert_close(blocks[1], weight[64:128].view(4, 16, 64))


def test_a_large_start_rescales_queries_and_keys_and_nothing_else(tmp_path):
    model, before = make(lr=1e-30), make()  # a rate at which nothing moves
    fit(tmp_path, model, LargeStart(), epochs=1)
    torch.testing.assert_close(norms(model), torch.full((24,), 4.0))  # √16
    entries = torch.cat([X.flatten() for X in query_key_blocks(model)])
    assert entries.std().item() == pytest.approx(64**-0.5, rel=0.02)
    for (name, a), (_, b) in zip(model.named_parameters(), before.named_parameters(), strict=True):
        rest = slice(128, None) if "qkv" in name else slice(None)  # of the fused weight, the values
        torch.testing.assert_close(a[rest], b[rest])
    q, start = query_key_blocks(model)[0][0], query_key_blocks(before)[0][0]
    torch.testing.assert_close(q, start * (4 / start.norm()))


def test_a_large_start_is_free_afterwards_and_a_held_norm_is_not(tmp_path):
    large, held = make(), make()
    fit(tmp_path / "large", large, LargeStart())
    fit(tmp_path / "held", held, HeldNorm())
    assert norms(large).max() < 3.95
    torch.testing.assert_close(norms(held), torch.full((24,), 4.0))


@pytest.mark.parametrize("control", [LargeStart, HeldNorm])
def test_a_resumed_run_keeps_its_weights(tmp_path, control):
    class Stop(L.Callback):
        """As a kill after the first epoch's checkpoint would."""

        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                raise RuntimeError("the power failed")

    whole, parts = make(), make()
    fit(tmp_path / "whole", whole, control())
    with pytest.raises(RuntimeError, match="the power failed"):
        fit(tmp_path / "parts", parts, control(), Stop())
    resumed = make()
    fit(tmp_path / "parts", resumed, control(), resume=tmp_path / "parts/checkpoints/last.ckpt")
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
