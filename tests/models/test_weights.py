"""Checkpoints: what is saved loads again, to the bit; what was tampered with is refused in one line."""

import dataclasses
import hashlib
import http.server
import json
import os
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from random import Random

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

import ortho_vit
from ortho_vit import orthogonality_error, stiefel_parameters
from ortho_vit.models import (
    Checkpoint,
    CheckpointError,
    ModelSpec,
    create_model,
    export_for_hub,
    find_checkpoint,
    list_models,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from ortho_vit.models.card import synthetic_images
from ortho_vit.models.weights import export_folder, only_writer, read_checkpoint
from ortho_vit.models.zoo import build_from
from ortho_vit.resources import checkpoints_folder
from tests.helpers.zoo_weights import ABOUT, ARGUMENTS, NAME, PIXELS, build

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ORTHO_VIT_CHECKPOINTS", str(tmp_path))
    save_checkpoint(build(), NAME, folder=tmp_path, **ABOUT)
    return tmp_path


def rewrite(folder, change=lambda tensors: None, name=NAME, **fields):
    """Change the tensors and the card, and make the card's hash right again."""
    weights, card = folder / f"{name}.safetensors", folder / f"{name}.json"
    tensors = safetensors.torch.load_file(weights)
    change(tensors)
    safetensors.torch.save_file(tensors, weights)
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    card.write_text(json.dumps({**json.loads(card.read_text()), "sha256": sha256, **fields}))


def attention_of(model):
    return tuple(model.orthogonal[key] for key in ("constraint", "projections", "preserve"))


def refuses(match, name=NAME, **kwargs):
    with pytest.raises(CheckpointError, match=match) as caught:
        create_model(name, pretrained=True, **kwargs)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- round trip


def test_what_is_saved_loads_again_to_the_bit(folder):
    model = create_model(NAME, pretrained=True).eval()
    assert torch.equal(model(IMAGES), build()(IMAGES))
    assert attention_of(model) == ("across", "qk", False)
    assert sorted(os.listdir(folder)) == [f"{NAME}.json", f"{NAME}.safetensors"]


def test_the_card_tells_what_the_weights_are(folder):
    card = find_checkpoint(NAME).card
    model = build()
    assert card.parameters == sum(p.numel() for p in model.parameters())
    assert card.orthogonality_error == orthogonality_error(model) < 2e-6
    assert card.sha256 == hashlib.sha256((folder / f"{NAME}.safetensors").read_bytes()).hexdigest()
    assert (card.architecture, card.tag) == ("ortho_vit_pico", "shapes_across")
    assert card.classes == ABOUT["classes"]
    assert {"python", "torch", "timm"} <= set(card.versions)
    assert torch.equal(card.golden.images(), PIXELS)
    assert len(card.golden.logits) == 8
    assert card.golden_error(model) < 1e-5
    with torch.no_grad():
        model.head.bias.add_(0.01)
    with pytest.raises(CheckpointError, match=r"logits differ from the card's by 0.01"):
        card.check_golden(model)


def test_timm_finds_mean_and_labels_in_the_model(folder):
    config = timm.data.resolve_data_config(model=create_model(NAME, pretrained=True))
    assert (config["mean"], config["std"]) == (ABOUT["mean"], ABOUT["std"])
    assert create_model(NAME, pretrained=True).pretrained_cfg["label_names"] == tuple(ABOUT["classes"])


def test_names_are_listed_and_a_single_one_need_not_be_tagged(folder):
    assert list_models("*shapes*", pretrained=True) == [NAME]
    assert list_models("*no such*", pretrained=True) == []
    assert torch.equal(create_model("ortho_vit_pico", pretrained=True).head.weight, build().head.weight)
    save_checkpoint(build(), "ortho_vit_pico.other", folder=folder, **ABOUT)
    refuses(
        r"ortho_vit_pico has 2 trained weights; name one: ortho_vit_pico.other, ortho_vit_pico.shapes",
        "ortho_vit_pico",
    )
    refuses("ortho_vit_cifar has no trained weights", "ortho_vit_cifar")
    refuses(
        "no checkpoint 'ortho_vit_pico.shapes' in .*; did you mean 'ortho_vit_pico.shapes_across'",
        "ortho_vit_pico.shapes",
    )


def test_a_tag_without_weights_gives_the_cards_architecture(folder):
    model = create_model(NAME)
    assert len(model.blocks) == 1
    assert not torch.equal(model.head.weight, build().head.weight)
    assert model.orthogonal["constraint"] == "across"
    assert orthogonality_error(model) < 2e-6


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("constraint", ["within", "across", None])
def test_every_kind_of_model_makes_the_round_trip(tmp_path, constraint, preserve):
    model = build(
        "vit_tiny_patch16_224.x", constraint, preserve=preserve, img_size=32, embed_dim=48, patch_size=8
    )
    about = {**ABOUT, "arguments": {**ARGUMENTS, "img_size": 32, "embed_dim": 48, "patch_size": 8}}
    save_checkpoint(model, "vit_tiny_patch16_224.x", folder=tmp_path, **about)
    loaded = create_model("vit_tiny_patch16_224.x", pretrained=True, checkpoints=tmp_path).eval()
    assert torch.equal(loaded(IMAGES), model(IMAGES))
    assert [n for n, _ in stiefel_parameters(loaded)] == [n for n, _ in stiefel_parameters(model)]


# ------------------------------------------------------------------------------------------------------------ adapting


def test_another_number_of_classes_gives_a_new_head_on_the_same_features(folder):
    model = create_model(NAME, pretrained=True, num_classes=7).eval()
    assert model(IMAGES).shape == (2, 7)
    assert torch.equal(model.forward_features(IMAGES), build().forward_features(IMAGES))
    assert create_model(NAME, pretrained=True, num_classes=0)(IMAGES).shape == (2, 96)


def test_another_image_size_resamples_the_position_embedding(folder):
    model, small = create_model(NAME, pretrained=True, img_size=64).eval(), build()
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 4)
    expected = timm.layers.resample_abs_pos_embed(small.pos_embed, [8, 8])
    assert torch.equal(model.pos_embed, expected)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_other_channels_give_the_same_logits_for_a_grey_image(folder, channels):
    grey = torch.randn(2, 1, 32, 32)
    expected = build()(grey.expand(-1, 3, -1, -1))
    model = create_model(NAME, pretrained=True, in_chans=channels).eval()
    torch.testing.assert_close(model(grey.expand(-1, channels, -1, -1)), expected, atol=1e-5, rtol=0)


def test_another_constraint_replaces_the_cards(folder):
    free = create_model(NAME, pretrained=True, constraint=None).eval()
    assert not list(stiefel_parameters(free))
    assert type(free.blocks[0].attn.qkv.weight) is nn.Parameter
    assert torch.equal(free(IMAGES), build()(IMAGES))
    within = create_model(NAME, pretrained=True, constraint="within").eval()
    assert [p.blocks for _, p in stiefel_parameters(within)] == [12]
    # Orthonormal across is within too
    torch.testing.assert_close(within(IMAGES), build()(IMAGES), atol=1e-5, rtol=0)


def test_a_free_checkpoint_can_be_constrained_without_changing_its_function(tmp_path):
    model = build(constraint=None)
    save_checkpoint(model, NAME, folder=tmp_path, **ABOUT)
    options = {"pretrained": True, "checkpoints": tmp_path, "constraint": "within"}
    preserved = create_model(NAME, preserve=True, **options).eval()
    assert orthogonality_error(preserved) < 2e-6
    torch.testing.assert_close(preserved(IMAGES), model(IMAGES), atol=1e-5, rtol=0)


# -------------------------------------------------------------------------------------------------------- other sources


def test_a_checkpoint_opens_by_its_path(folder):
    for suffix in ("json", "safetensors"):
        model = load_checkpoint(Checkpoint.open(folder / f"{NAME}.{suffix}")).eval()
        assert torch.equal(model(IMAGES), build()(IMAGES))


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def address(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path_factory.mktemp("hub")))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_checkpoint_is_downloaded_from_an_address(address):
    model = create_model(NAME, pretrained=True, checkpoints=address).eval()
    assert torch.equal(model(IMAGES), build()(IMAGES))
    refuses("cannot be downloaded .*404", "ortho_vit_pico.absent", checkpoints=address)


def test_a_downloaded_file_must_have_the_cards_hash(address, folder):
    with open(folder / f"{NAME}.safetensors", "ab") as file:
        file.write(b"x")
    refuses("its sha256 is .*, not .*: truncated or changed", checkpoints=address)


def test_only_web_addresses_are_downloaded(folder):
    refuses("only https, http and file addresses", checkpoints="ftp://example.org")


def test_timm_loads_them_by_name(folder):
    script = f"""
import sys
looked = []
sys.addaudithook(lambda event, args: looked.append(args) if event in ("os.scandir", "os.listdir", "glob.glob") else None)
import ortho_vit.models, timm
assert not [args for args in looked if {str(folder)!r} in str(args) or "checkpoints" in str(args)], looked
model = timm.create_model({NAME!r}, pretrained=True, num_classes=4).eval()
assert model.orthogonal["constraint"] == "across" and len(model.blocks) == 1
assert len(timm.create_model("ortho_vit_pico").blocks) == 4
ortho_vit.models.find_checkpoint({NAME!r}).card.check_golden(model)
assert timm.create_model("ortho_vit_pico", pretrained=True).orthogonal["constraint"] == "across"
try:
    timm.create_model("ortho_vit_digits", pretrained=True)
except ortho_vit.models.CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "ortho_vit_digits has 4 trained weights; name one: ortho_vit_digits.digits_across"
    )


def test_a_hub_folder_loads_through_timm(folder, tmp_path):
    hub = export_for_hub(find_checkpoint(NAME), tmp_path / "hub")
    assert sorted(os.listdir(hub)) == ["README.md", "config.json", "model.safetensors"]
    assert json.loads((hub / "config.json").read_text())["architecture"] == "vit_tiny_patch16_224"
    model = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    assert torch.equal(model(IMAGES), build()(IMAGES))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_truncated_or_changed_file_is_refused(folder):
    weights = folder / f"{NAME}.safetensors"
    data = weights.read_bytes()
    for damaged in (data[:-100], data[:-1] + bytes([data[-1] ^ 1])):
        weights.write_bytes(damaged)
        refuses("sha256 is .*, but its card says .*: truncated or changed")


def test_a_pickle_is_never_opened(folder):
    weights, card = folder / f"{NAME}.safetensors", folder / f"{NAME}.json"
    weights.write_bytes(pickle.dumps(Bomb()))
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    card.write_text(json.dumps({**json.loads(card.read_text()), "sha256": sha256}))
    refuses("not a safetensors file")
    with pytest.raises(CheckpointError, match=r"run.ckpt: a checkpoint is a .safetensors file"):
        Checkpoint.open(folder / "run.ckpt")


class Bomb:
    def __reduce__(self):
        return os._exit, (1,)


def test_weights_of_another_architecture_are_refused(folder):
    rewrite(folder, lambda tensors: tensors.pop("norm.weight"))
    refuses("is of another architecture: it has no 'norm.weight'")
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(5)}))
    refuses(r"another architecture: its 'norm.weight' is \(5,\), not \(96,\)")
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(96), "model": torch.ones(2)}))
    refuses("another architecture: it has an unknown 'model'")


def test_a_file_without_a_tag_is_no_checkpoint(folder):
    for suffix in ("json", "safetensors"):
        (folder / f"ortho_vit_nano.{suffix}").write_bytes((folder / f"{NAME}.{suffix}").read_bytes())
    assert list_models("*shapes*", pretrained=True) == [NAME]
    assert "ortho_vit_nano" not in list_models(pretrained=True)


def test_weights_that_are_not_finite_are_refused(folder):
    rewrite(folder, lambda tensors: tensors["norm.weight"].fill_(torch.nan))
    refuses("'norm.weight' has entries that are not finite")


def test_weights_off_the_manifold_are_refused(folder):
    rewrite(folder, lambda tensors: tensors["blocks.0.attn.qkv.weight"].mul_(1.001))
    refuses(r"its 'blocks.0.attn.qkv.weight' is off the manifold by 0.002, more than 1e-04")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"name": "ortho_vit_nano.shapes_across"}, "its card is that of 'ortho_vit_nano.shapes_across'"),
        ({"name": "../../etc/passwd"}, "name must be architecture.tag"),
        (
            {"arguments": {"checkpoint_path": "evil.pt"}},
            "arguments must be the architecture's own, got checkpoint_path",
        ),
        ({"arguments": {"dpth": 1}}, "ortho_vit_pico cannot be built with .*dpth"),
        ({"arguments": [1]}, "arguments must be an object"),
        ({"constraint": "both"}, "constraint must be 'within', 'across', None .*got 'both'"),
        ({"sha256": "abc"}, "sha256 must be 64 hexadecimal digits"),
        ({"golden": {"shape": [9, 3, 32, 32], "pixels": "", "logits": []}}, "not a checkpoint's card"),
    ],
)
def test_a_card_that_does_not_fit_is_refused(folder, fields, match):
    card = folder / f"{NAME}.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), **fields}))
    refuses(match)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": "x"}', "\xff"])
def test_a_file_that_is_no_card_is_refused(folder, text):
    (folder / f"{NAME}.json").write_text(text, encoding="latin-1")
    refuses(f"{NAME}.json: (not a checkpoint's card|the card lacks)")


VALUES = [None, True, -1, "x", [None], {"class_path": "os.system"}]


def test_any_field_of_a_card_may_be_missing_or_of_another_kind(folder):
    """Each is refused, or makes no difference to what is loaded."""
    path = folder / f"{NAME}.json"
    good = json.loads(path.read_text())
    logits = create_model(NAME, pretrained=True).eval()(IMAGES)
    refused = 0
    for field in good:
        for value in [..., *VALUES]:
            card = {key: x for key, x in good.items() if key != field} | (
                {} if value is ... else {field: value}
            )
            path.write_text(json.dumps(card))
            try:
                model = create_model(NAME, pretrained=True)
            except CheckpointError:
                refused += 1
            else:
                assert torch.equal(model.eval()(IMAGES), logits), (field, value)
    assert refused > len(good)


def test_a_damaged_run_checkpoint_is_refused_or_read_as_it_was(tmp_path):
    """Truncated anywhere, or with any bit changed."""
    path, random = tmp_path / "run.ckpt", Random(0)
    torch.save({"state_dict": {"w": torch.arange(64.0), "n": torch.ones(3)}, "global_step": 7}, path)
    good = path.read_bytes()
    damaged = [good[: random.randrange(len(good))] for _ in range(40)]
    for _ in range(200):
        flipped = bytearray(good)
        flipped[random.randrange(len(good))] ^= 1 << random.randrange(8)
        damaged.append(bytes(flipped))
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        try:
            content = read_checkpoint(path)
        except CheckpointError:
            refused += 1
        else:
            assert content["global_step"] == 7
            assert torch.equal(content["state_dict"]["w"], torch.arange(64.0))
            assert torch.equal(content["state_dict"]["n"], torch.ones(3))
    assert refused >= 120  # not the paddings between records


def test_nothing_is_saved_of_a_model_off_the_manifold(tmp_path):
    model = build()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.add_(0.01)
    with pytest.raises(CheckpointError, match="off the manifold"):
        save_checkpoint(model, NAME, folder=tmp_path, **ABOUT)
    with torch.no_grad():
        model.head.bias.fill_(torch.inf)
    with pytest.raises(CheckpointError, match=r"'head.bias' has entries that are not finite"):
        save_checkpoint(model, NAME, folder=tmp_path, **ABOUT)
    assert not os.listdir(tmp_path)


def test_nothing_is_saved_that_would_not_load_again(tmp_path):
    with pytest.raises(CheckpointError, match="another architecture"):
        save_checkpoint(
            build(), NAME, folder=tmp_path, **{**ABOUT, "arguments": {"num_classes": 4, "depth": 2}}
        )
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "about", "match"),
    [
        ("ortho_vit_pico", {}, "name must be architecture.tag"),
        ("../ortho_vit_pico.x", {}, "name must be architecture.tag"),
        ("ortho_vit_pcio.x", {}, "there is no architecture 'ortho_vit_pcio'"),
        (
            NAME,
            {"pixels": PIXELS.float()},
            r"pixels must be uint8 \(n, channels, height, width\), got torch.float32",
        ),
        (NAME, {"classes": ["cat", "dog"]}, "2 classes, but 4 logits"),
        (NAME, {"labels": [4] * 8}, r"labels must be one of the 4 classes per image, got \[4, 4"),
        (NAME, {"labels": [0]}, r"labels must be one of the 4 classes per image, got \[0\]"),
    ],
)
def test_nothing_is_saved_with_a_card_that_is_wrong(tmp_path, name, about, match):
    with pytest.raises(CheckpointError, match=match):
        save_checkpoint(build(), name, folder=tmp_path / "new", **{**ABOUT, **about})
    assert not any(tmp_path.rglob("*.*"))


def test_nothing_is_overwritten_unasked(folder):
    before = (folder / f"{NAME}.safetensors").read_bytes()
    other = build(constraint="within")
    with pytest.raises(CheckpointError, match="exists already; overwrite=True replaces it"):
        save_checkpoint(other, NAME, folder=folder, **ABOUT)
    assert (folder / f"{NAME}.safetensors").read_bytes() == before
    save_checkpoint(other, NAME, folder=folder, overwrite=True, **ABOUT)
    assert create_model(NAME, pretrained=True).orthogonal["constraint"] == "within"


def test_a_card_reads_back_as_it_was_written(folder):
    card = find_checkpoint(NAME).card
    assert type(card).from_json(card.to_json(), "card") == card
    assert dataclasses.asdict(card)["accuracy"] == {"test/top1": 0.25}


@pytest.mark.parametrize("create", [create_model, timm.create_model])
def test_other_projections_than_the_cards_are_constrained(create):
    name = "ortho_vit_digits.digits_within_stiefel_sgd"
    model = create(name, pretrained=True, projections="qkv")
    assert model.orthogonal["projections"] == "qkv"
    assert orthogonality_error(model) < 1e-6
    with pytest.raises(ValueError, match="projections must be one of"):
        create(name, pretrained=True, projections="zzz")


def test_weights_of_a_card_are_preserved_where_that_is_asked_for():
    name, images = "ortho_vit_digits.digits_within_stiefel_sgd", torch.rand(2, 1, 8, 8)
    model = create_model(name, pretrained=True, constraint="across", preserve=True).eval()
    assert attention_of(model) == ("across", "qk", True)
    plain = create_model(name, pretrained=True).eval()
    torch.testing.assert_close(model(images), plain(images), rtol=1e-4, atol=1e-5)
    within = create_model(name, pretrained=True, preserve=True)
    assert within.orthogonal["preserve"]


def test_the_cores_of_a_card_are_multiplied_in_where_it_is_constrained_otherwise(tmp_path):
    model = build(preserve=True)
    save_checkpoint(model, NAME, folder=tmp_path, **ABOUT)
    freed = create_model(NAME, pretrained=True, checkpoints=tmp_path, constraint=None).eval()
    assert not any("core" in key for key in freed.state_dict())
    torch.testing.assert_close(freed(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-5)
    plain = create_model(NAME, pretrained=True, checkpoints=tmp_path, preserve=False)
    assert attention_of(plain) == ("across", "qk", False)


# ------------------------------------------------------------------------------------------------------ what is loaded


def test_integers_are_refused_even_with_the_right_hash(folder):
    rewrite(
        folder, lambda tensors: tensors.update({"head.bias": torch.tensor([1, 2, 3, 4], dtype=torch.int32)})
    )
    refuses("is refused: its 'head.bias' is torch.int32, not torch.float32")


def test_verify_compares_the_logits_with_the_cards(folder):
    assert verify_checkpoint(NAME) < 1e-5
    create_model(NAME, pretrained=True, verify=True, num_classes=7)
    golden = json.loads((folder / f"{NAME}.json").read_text())["golden"]
    golden["logits"][3][2] += 0.5
    rewrite(folder, golden=golden)
    create_model(NAME, pretrained=True)
    refuses("logits differ from the card's by 0.5, more than 1e-03", verify=True)
    with pytest.raises(CheckpointError, match="verify=True needs weights with a card"):
        create_model("ortho_vit_pico", verify=True)


@pytest.mark.parametrize("channels", [1, 2, 3, 6])
def test_a_plain_file_is_adapted_as_an_entry_of_the_zoo_is(folder, tmp_path_factory, channels):
    plain = tmp_path_factory.mktemp("plain") / "w.safetensors"
    plain.write_bytes((folder / f"{NAME}.safetensors").read_bytes())
    spec = find_checkpoint(NAME).card.spec.replace(
        num_classes=7, arguments={"depth": 1, "in_chans": channels, "img_size": 64}
    )
    models = [build_from(spec, weights) for weights in (NAME, str(plain))]
    assert [new_head for _, new_head in models] == [True, True]
    one, other = (model.state_dict() for model, _ in models)
    assert all(torch.equal(x, other[key]) for key, x in one.items() if not key.startswith("head"))


def test_weights_without_a_head_give_an_untrained_one(folder, tmp_path_factory):
    plain = tmp_path_factory.mktemp("plain") / "w.safetensors"
    state = build(num_classes=0).state_dict()
    safetensors.torch.save_file(state, plain)
    model, new_head = build_from(find_checkpoint(NAME).card.spec, str(plain))
    assert new_head
    assert torch.equal(model.norm.weight, state["norm.weight"])


# ---------------------------------------------------------------------------------------------- name, file, folder, address


def test_the_environment_adds_to_the_weights_of_the_package(folder):
    names = list_models(pretrained=True)
    assert NAME in names
    assert "ortho_vit_digits.digits_within_stiefel_sgd" in names
    assert (
        find_checkpoint("ortho_vit_digits.digits_within_stiefel_sgd").weights.parent == checkpoints_folder()
    )


def test_a_name_a_file_and_a_folder_mean_the_same_everywhere(folder, monkeypatch):
    monkeypatch.delenv("ORTHO_VIT_CHECKPOINTS")
    expected, spec = build()(IMAGES), find_checkpoint(folder).card.spec
    for place in (folder, folder / f"{NAME}.safetensors", folder / f"{NAME}.json"):
        assert find_checkpoint(place).card.name == NAME
        assert torch.equal(create_model(str(place), pretrained=True).eval()(IMAGES), expected)
        assert torch.equal(build_from(spec, str(place))[0].eval()(IMAGES), expected)
        loaded = timm.create_model("ortho_vit_pico", pretrained=True, checkpoints=place)
        assert torch.equal(loaded.eval()(IMAGES), expected)
    monkeypatch.chdir(folder)
    for place in (".", f"{NAME}.safetensors"):
        assert torch.equal(create_model(place, pretrained=True).eval()(IMAGES), expected)
    save_checkpoint(build(), "ortho_vit_pico.other", folder=folder, **ABOUT)
    with pytest.raises(
        CheckpointError, match=r"has 2 checkpoints; name one: ortho_vit_pico.other, ortho_vit_pico.sha"
    ):
        find_checkpoint(folder)


def test_an_address_means_the_same_everywhere(address, monkeypatch):
    monkeypatch.delenv("ORTHO_VIT_CHECKPOINTS")
    file, expected = f"{address}/{NAME}.safetensors", build()(IMAGES)
    assert torch.equal(create_model(file, pretrained=True).eval()(IMAGES), expected)
    assert torch.equal(build_from(find_checkpoint(file).card.spec, file)[0].eval()(IMAGES), expected)
    loaded = timm.create_model(NAME, pretrained=True, checkpoints=address)
    assert torch.equal(loaded.eval()(IMAGES), expected)
    monkeypatch.setenv("ORTHO_VIT_CHECKPOINTS", address)
    assert torch.equal(create_model(NAME, pretrained=True).eval()(IMAGES), expected)
    assert create_model("ortho_vit_digits.digits_within_stiefel_sgd", pretrained=True) is not None
    with pytest.raises(CheckpointError, match=r"is not the address of a .safetensors file"):
        find_checkpoint(f"{address}/{NAME}")


# ------------------------------------------------------------------------------------------------------------- exporting


def test_nothing_of_the_data_is_published_unasked(folder):
    about = {key: value for key, value in ABOUT.items() if key not in ("pixels", "labels")}
    save_checkpoint(build(), "ortho_vit_pico.own", folder=folder, **about)
    card = find_checkpoint("ortho_vit_pico.own").card
    assert (card.golden.pixels, card.golden.labels, card.licence) == ("synthetic", [], "unknown")
    assert card.golden.images().shape == (8, 3, 32, 32)
    assert len({tuple(image.flatten().tolist()) for image in card.golden.images()}) == 8
    assert verify_checkpoint("ortho_vit_pico.own") < 1e-5


def test_synthetic_images_are_the_same_on_every_machine():
    images = synthetic_images([4, 3, 8, 8])
    assert hashlib.sha256(images.numpy().tobytes()).hexdigest()[:16] == "42ac97e438b44ae2"
    assert images.float().mean() == pytest.approx(127.5, abs=15)
    assert torch.equal(images[2, :, :4, :4], images[2, :, :1, :1].expand(3, 4, 4))  # squares of four pixels


def test_the_card_says_which_part_of_an_image_is_seen(folder):
    recipe = {"data": {"class_path": "ortho_vit.data.ImageFolder", "init_args": {}}}
    save_checkpoint(build(), "ortho_vit_pico.folder", folder=folder, **{**ABOUT, "recipe": recipe})
    model = create_model("ortho_vit_pico.folder", pretrained=True)
    assert timm.data.resolve_data_config(model=model)["crop_pct"] == 0.875
    assert timm.data.resolve_data_config(model=create_model(NAME, pretrained=True))["crop_pct"] == 1.0
    recipe["data"]["init_args"]["crop_pct"] = 0.9
    save_checkpoint(build(), "ortho_vit_pico.other", folder=folder, **{**ABOUT, "recipe": recipe})
    assert find_checkpoint("ortho_vit_pico.other").card.crop_pct == 0.9
    path = folder / "ortho_vit_pico.folder.json"
    card = json.loads(path.read_text())
    del card["crop_pct"]  # as version 0.1 wrote it
    path.write_text(json.dumps(card))
    assert find_checkpoint("ortho_vit_pico.folder").card.crop_pct == 0.875


@pytest.mark.parametrize("renames", range(4))
def test_a_kill_never_leaves_new_weights_with_the_old_card(folder, monkeypatch, renames):
    """The process ends at its n-th rename: the old pair is there, or the new one is as soon as anyone looks."""
    rename, count = Path.replace, [0]

    def killed(self, target):
        if count[0] == renames:
            raise KeyboardInterrupt
        count[0] += 1
        return rename(self, target)

    before = find_checkpoint(NAME).card.sha256
    other = build(constraint="within")
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(other, NAME, folder=folder, overwrite=True, **ABOUT)
    monkeypatch.setattr(Path, "replace", rename)
    on_disk = folder / f"{NAME}.json"
    if on_disk.exists():  # also for someone who copies the files
        weights = hashlib.sha256((folder / f"{NAME}.safetensors").read_bytes()).hexdigest()
        assert json.loads(on_disk.read_text())["sha256"] == weights
    assert verify_checkpoint(NAME) < 1e-5
    # The staged card is the point of no return
    assert (find_checkpoint(NAME).card.sha256 == before) == (renames < 2)
    assert sorted(os.listdir(folder)) == [f"{NAME}.json", f"{NAME}.safetensors"]


def test_a_second_export_of_a_name_is_refused_while_the_first_is_running(folder):
    with only_writer(folder / f"{NAME}.safetensors"):
        with pytest.raises(
            CheckpointError, match=rf"is being written by .*process {os.getpid()}; wait, or choose"
        ):
            save_checkpoint(build(), NAME, folder=folder, overwrite=True, **ABOUT)
        save_checkpoint(build(), "ortho_vit_pico.other", folder=folder, **ABOUT)
    save_checkpoint(build(), NAME, folder=folder, overwrite=True, **ABOUT)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]


def test_an_installed_package_is_never_written_to(tmp_path):
    target = tmp_path / "site-packages/ortho_vit/checkpoints"
    with pytest.raises(CheckpointError, match="belongs to an installed package; choose another folder"):
        save_checkpoint(build(), NAME, folder=target, **ABOUT)
    assert not target.exists()


def test_weights_are_found_inside_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.delenv("ORTHO_VIT_CHECKPOINTS", raising=False)
    package = tmp_path / "site-packages/ortho_vit"
    package.mkdir(parents=True)
    monkeypatch.setattr("ortho_vit.resources.PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    assert checkpoints_folder() == tmp_path / "site-packages/checkpoints"
    (package / "checkpoints").mkdir()
    save_checkpoint(build(), NAME, folder=tmp_path / "made", **ABOUT)
    for file in (tmp_path / "made").iterdir():
        (package / "checkpoints" / file.name).write_bytes(file.read_bytes())
    assert checkpoints_folder() == package / "checkpoints"
    assert list_models(pretrained=True) == [NAME]
    assert export_folder() == Path("checkpoints")


# ------------------------------------------------------------------------------------------------------------- the hub


def loads_with_plain_timm(hub, expected, images=IMAGES):
    config = json.loads((hub / "config.json").read_text())
    assert config["architecture"].startswith("vit_")
    assert not {"constraint", "projections", "preserve", "scale"} & set(config["model_args"])
    model = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    assert type(model) is timm.models.VisionTransformer
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=0)
    return timm.data.resolve_data_config(model=model)


@pytest.mark.parametrize(
    "options", [{}, {"preserve": True}, {"scale": True}, {"constraint": 3}, {"constraint": None}]
)
def test_a_hub_folder_needs_only_timm(tmp_path, options):
    model = build(**options)
    if options.get("scale"):
        torch.nn.init.uniform_(model.blocks[0].attn.qkv.core, 0.5, 2)
    save_checkpoint(model, NAME, folder=tmp_path, licence="CC0-1.0", crop_pct=0.5, **ABOUT)
    hub = export_for_hub(find_checkpoint(NAME, tmp_path), tmp_path / "hub")
    config = loads_with_plain_timm(hub, model(IMAGES))
    assert (tuple(config["mean"]), tuple(config["std"]), config["crop_pct"]) == (
        ABOUT["mean"],
        ABOUT["std"],
        0.5,
    )
    text = json.loads((hub / "config.json").read_text())
    assert (text["pretrained_cfg"]["license"], text["label_names"]) == ("CC0-1.0", ABOUT["classes"])


PLAIN_TIMM = """
import sys
import ortho_vit, timm  # as in conftest.py; it registers nothing with timm
for name in [name for name in sys.modules if name.partition(".")[0] == "ortho_vit"]:
    sys.modules[name] = None  # importing it fails from now on
import safetensors.torch
model = timm.create_model(f"local-dir:{sys.argv[1]}", pretrained=True).eval()
expected = safetensors.torch.load_file(sys.argv[2])
print((model(expected["images"]) - expected["logits"]).abs().max().item())
print([name for name in timm.list_models() if name.startswith("ortho_vit")])
"""


def test_a_hub_folder_loads_where_ortho_vit_cannot_be_imported(tmp_path):
    model = build(preserve=True)
    torch.nn.init.normal_(model.blocks[0].attn.qkv.core, std=0.3)  # as training leaves it
    save_checkpoint(model, NAME, folder=tmp_path, **ABOUT)
    hub = export_for_hub(find_checkpoint(NAME, tmp_path), tmp_path / "hub")
    expected = {"images": IMAGES, "logits": model(IMAGES).detach()}
    safetensors.torch.save_file(expected, tmp_path / "expected.safetensors")
    command = [sys.executable, "-c", PLAIN_TIMM, str(hub), str(tmp_path / "expected.safetensors")]
    environment = os.environ | {"PYTHONPATH": str(Path(ortho_vit.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    difference, registered = done.stdout.splitlines()
    assert float(difference) < 1e-5
    assert registered == "[]"


def test_a_hub_folder_of_other_sizes_and_of_timms_own_models_needs_only_timm(tmp_path):
    card = find_checkpoint("ortho_vit_digits.digits_within_stiefel_sgd")
    hub = export_for_hub(card, tmp_path / "digits")
    images = torch.randn(2, 1, 8, 8)
    loads_with_plain_timm(hub, load_checkpoint(card).eval()(images), images)
    name, size = "vit_tiny_patch16_224.x", {"img_size": 32, "embed_dim": 48, "patch_size": 8}
    model = build(name, "within", preserve=True, **size)
    save_checkpoint(model, name, folder=tmp_path, **{**ABOUT, "arguments": ARGUMENTS | size})
    loads_with_plain_timm(export_for_hub(find_checkpoint(name, tmp_path), tmp_path / "timm"), model(IMAGES))


def test_the_compact_model_makes_both_round_trips(tmp_path):
    model = build("ortho_vit_compact.x", "within", preserve=True)
    save_checkpoint(model, "ortho_vit_compact.x", folder=tmp_path, **ABOUT)
    checkpoint = find_checkpoint("ortho_vit_compact.x", tmp_path)
    assert torch.equal(load_checkpoint(checkpoint).eval()(IMAGES), model(IMAGES))
    hub = export_for_hub(checkpoint, tmp_path / "hub")
    loaded = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    torch.testing.assert_close(loaded(IMAGES), model(IMAGES), atol=1e-5, rtol=0)


def test_a_hub_folder_of_version_0_1_still_loads(folder, tmp_path):
    hub = export_for_hub(find_checkpoint(NAME), tmp_path / "hub")
    config = json.loads((hub / "config.json").read_text())
    config["architecture"] = "ortho_vit_pico"
    config["model_args"] = {**ARGUMENTS, "constraint": "across", "projections": "qk"}
    (hub / "config.json").write_text(json.dumps(config))
    model = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    assert model.orthogonal["constraint"] == "across"
    assert torch.equal(model(IMAGES), build()(IMAGES))


def test_timms_weights_are_known_by_their_name(monkeypatch):
    asked, create = [], timm.create_model

    def offline(name, pretrained=False, **kwargs):
        asked.append((name, pretrained))
        return create(name, False, **kwargs)

    monkeypatch.setattr(timm, "create_model", offline)
    name = "deit_tiny_patch16_224"
    spec = ModelSpec(name, "within", preserve=True, num_classes=3, arguments={"depth": 1})
    model, new_head = build_from(spec, f"{name}.fb_in1k")
    assert (asked, new_head) == ([(f"{name}.fb_in1k", True)], True)
    assert model.blocks[0].attn.qkv.core.shape == (3, 64, 64)
    assert not build_from(spec.replace(num_classes=1000), f"{name}.fb_in1k")[1]
    with pytest.raises(CheckpointError, match="are of another model, 'deit_tiny_patch16_224'"):
        build_from(ModelSpec("ortho_vit_pico"), f"{name}.fb_in1k")


def test_a_hub_folder_of_four_channels_keeps_its_patch_embedding(tmp_path):
    name, images = "vit_tiny_patch16_224.x", torch.randn(2, 4, 32, 32)
    arguments = {"img_size": 32, "embed_dim": 48, "patch_size": 8, "in_chans": 4}
    model = build(name, "within", **arguments)
    about = ABOUT | {"arguments": ARGUMENTS | arguments, "mean": [0.5] * 4, "std": [0.5] * 4}
    about |= {"pixels": torch.randint(256, (8, 4, 32, 32), dtype=torch.uint8)}
    path = save_checkpoint(model, name, folder=tmp_path, **about)
    hub = export_for_hub(find_checkpoint(name, tmp_path), tmp_path / "hub")
    loaded = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images), model(images), atol=1e-5, rtol=0)
    torch.testing.assert_close(create_model(path, True).eval()(images), model(images))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_saved_with_the_logits_they_will_have(tmp_path, dtype):
    save_checkpoint(build().to(dtype), NAME, folder=tmp_path, **ABOUT)
    assert verify_checkpoint(find_checkpoint(NAME, tmp_path)) < 1e-5
