import pickle
import zipfile
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from ortho_vit import orthogonality_error
from ortho_vit.optim import StiefelSGD
from ortho_vit.training import Classifier
from tests.helpers.small_run import digits, make_classifier, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    model, folder = make_classifier(), tmp_path_factory.mktemp("run")
    make_trainer(folder, max_epochs=1).fit(model, datamodule=digits())
    return model, folder / "checkpoints/last.ckpt"


def equal(a, b, but=()):
    return all(torch.equal(v, b[k]) for k, v in a.items() if not k.startswith(tuple(but)))


def test_weights_come_from_a_checkpoint_of_a_run(trained):
    model, path = trained
    assert equal(model.model.state_dict(), make_classifier(weights=str(path)).model.state_dict())


def test_weights_come_from_safetensors(trained, tmp_path):
    model, _ = trained
    save_file(model.model.state_dict(), tmp_path / "w.safetensors")
    assert equal(
        model.model.state_dict(), make_classifier(weights=str(tmp_path / "w.safetensors")).model.state_dict()
    )


def test_a_head_of_other_classes_is_left_out(trained):
    model, path = trained
    other = make_classifier(weights=str(path), num_classes=3).model
    assert other.head.weight.shape[0] == 3
    assert equal(other.state_dict(), model.model.state_dict(), but=["head"])


def test_both_heads_of_a_distilled_model_are_left_out_and_learn_fastest(tmp_path):
    def build(num_classes, **kwargs):
        size = {"img_size": 32, "depth": 1}
        optimizer = partial(StiefelSGD, lr=0.1)
        name = "deit_tiny_distilled_patch16_224"
        return Classifier(name, optimizer, num_classes=num_classes, model_kwargs=size, **kwargs)

    save_file(build(10).model.state_dict(), tmp_path / "w.safetensors")
    other = build(3, weights=str(tmp_path / "w.safetensors"), layer_decay=0.5)
    assert other.model.head_dist.weight.shape[0] == 3
    rates = {
        name: group["lr"] for group in other.make_optimizer().param_groups for name in group["param_names"]
    }
    assert rates["head.weight"] == rates["head_dist.weight"] == pytest.approx(0.1)
    assert rates["blocks.0.norm1.weight"] == pytest.approx(0.05)


def test_patches_positions_and_channels_are_resampled(trained):
    model, path = trained
    kwargs = {"img_size": 16, "patch_size": 4, "in_chans": 3}
    other = make_classifier(weights=str(path), model_kwargs=kwargs).model
    assert equal(other.state_dict(), model.model.state_dict(), but=["patch_embed", "pos_embed"])
    assert other(torch.zeros(1, 3, 16, 16)).shape == (1, 10)
    assert orthogonality_error(other) < 2e-6


class Payload:
    def __reduce__(self):
        return print, ("this must not run",)


def damage(kind, path, state):
    if kind == "truncated":
        torch.save(state, path)
        path.write_bytes(path.read_bytes()[:2000])
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"state_dict": Payload()}, protocol=2))
    elif kind == "architecture":
        torch.save({"weight": torch.zeros(3)}, path)
    elif kind == "depth":
        torch.save({k: v for k, v in state.items() if not k.startswith("blocks.2")}, path)
    elif kind == "nan":
        torch.save(state | {"norm.weight": torch.full((64,), float("nan"))}, path)
    elif kind == "list":
        torch.save([torch.zeros(3)], path)
    elif kind == "text":
        path.write_text("not weights")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "no checkpoint"),
        ("truncated", "is damaged or not a checkpoint"),
        ("pickle", "is refused: it holds more than tensors"),
        ("architecture", "is of another architecture: it has no"),
        ("depth", "is of another architecture: it has no 'blocks.2"),
        ("nan", "is refused: 'norm.weight' has entries that are not finite"),
        ("list", "is not a checkpoint: it holds a list"),
        ("text", "is refused|is damaged"),
    ],
)
def test_bad_files_are_refused_in_a_line(kind, message, tmp_path, capsys):
    path = tmp_path / "w.ckpt"
    damage(kind, path, make_classifier().model.state_dict())
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        make_classifier(weights=str(path))
    assert "\n" not in str(caught.value)
    assert "must not run" not in capsys.readouterr().out


def test_compressed_records_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    """64 MB of zeros in a file of 64 kB: torch never compresses."""
    plain, bomb = tmp_path / "plain.ckpt", tmp_path / "bomb.ckpt"
    torch.save({"x": torch.zeros(2**24)}, plain)
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as target:
        for name in archive.namelist():
            target.writestr(name, archive.read(name))
    assert bomb.stat().st_size < 100_000
    monkeypatch.setattr(zipfile.ZipFile, "open", None)  # nothing is read
    with pytest.raises(
        ValueError, match=r"bomb.ckpt is refused: its records are compressed, which torch never does"
    ):
        make_classifier(weights=str(bomb))


def test_a_damaged_safetensors_file_is_refused(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
        make_classifier(weights=str(tmp_path / "w.safetensors"))


def test_weights_that_are_neither_a_file_nor_the_models_say_so():
    with pytest.raises(
        ValueError,
        match=r"no checkpoint 'ortho_vit_nano.cifar10_within_sgd' in .*; did you mean 'ortho_vit_nano.cifar",
    ):
        make_classifier(weights="ortho_vit_nano.cifar10_within_sgd")


# ------------------------------------------------------------------------------------------- off the manifold

QKV = "blocks.1.attn.qkv.weight"


def change(path, target, **keys):
    """Copy a checkpoint with some of its entries replaced, by functions of what they were."""
    content = torch.load(path, weights_only=True)
    for key, function in keys.items():
        content[key] = function(content[key])
    torch.save(content, target)
    return str(target)


def scaled(state, name=f"model.{QKV}", factor=1.01):
    return state | {name: state[name] * factor}


@pytest.mark.filterwarnings("ignore:parameter .* was off the manifold")
def test_a_run_that_kept_the_constraint_has_no_weights_off_the_manifold(trained, tmp_path):
    path = change(trained[1], tmp_path / "damaged.ckpt", state_dict=scaled)
    with pytest.raises(
        ValueError, match=rf"is refused: its '{QKV}' is off the manifold by 0\.02, more than 1e-04"
    ):
        make_classifier(weights=path)
    make_classifier(weights=path, constraint="across")  # which that run has never claimed
    make_classifier(weights=path, constraint=None)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"class_path": "ortho_vit.optim.RegularizedSGD", "init_args": {"lr": 0.1}},
        {"class_path": "ortho_vit.optim.StiefelSGD", "init_args": {"lr": 0.1, "inner_steps": 1}},
        {"class_path": "torch.optim.AdamW"},
    ],
)
def test_weights_of_a_run_that_claims_nothing_are_put_on_the_manifold(trained, tmp_path, optimizer):
    def claim(hyper_parameters):
        return hyper_parameters | {"optimizer": optimizer}

    path = change(trained[1], tmp_path / "other.ckpt", state_dict=scaled, hyper_parameters=claim)
    with pytest.warns(
        UserWarning, match=f"'{QKV}' .* was off the manifold by 0.02: replaced by its polar factor"
    ):
        model = make_classifier(weights=path)
    assert orthogonality_error(model.model) < 2e-6


def test_weights_of_a_plain_file_are_put_on_the_manifold(trained, tmp_path):
    save_file(scaled(trained[0].model.state_dict(), QKV), tmp_path / "plain.safetensors")
    with pytest.warns(UserWarning, match="was off the manifold"):
        model = make_classifier(weights=str(tmp_path / "plain.safetensors"))
    assert orthogonality_error(model.model) < 2e-6


def test_rounded_weights_of_a_run_are_not_damaged(trained, tmp_path):
    def rounded(state):
        return {name: value.bfloat16() for name, value in state.items()}

    path = change(trained[1], tmp_path / "rounded.ckpt", state_dict=rounded)
    with pytest.warns(UserWarning, match="was off the manifold by 0.00"):
        model = make_classifier(weights=path)
    assert orthogonality_error(model.model) < 2e-6


def nan_in(state, name):
    return state | {name: torch.full_like(state[name], float("nan"))}


def nan_momentum(optimizers):
    (optimizer,) = optimizers
    optimizer["state"][0]["momentum_buffer"].fill_(float("inf"))
    return [optimizer]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"state_dict": scaled}, rf"is refused: its 'model\.{QKV}' is off the manifold by 0\.02"),
        (
            {"state_dict": lambda s: nan_in(s, "model.head.bias")},
            r"'model\.head\.bias' has entries that are not finite",
        ),
        (
            {"optimizer_states": nan_momentum},
            "'momentum_buffer of parameter 0' has entries that are not finite",
        ),
    ],
    ids=["manifold", "weights", "momentum"],
)
def test_a_damaged_checkpoint_is_not_resumed(trained, tmp_path, damage, message):
    path = change(trained[1], tmp_path / "damaged.ckpt", **damage)
    with pytest.raises(ValueError, match=message) as caught:
        make_trainer(tmp_path / "again").fit(make_classifier(), datamodule=digits(), ckpt_path=path)
    assert str(caught.value).startswith(f"{path} is refused: ")
    assert not (tmp_path / "again/checkpoints").exists()
