import hashlib
import pickle

import numpy as np
import pytest
import torch

from ortho_vit.data import CIFAR10, CIFAR100, cifar
from ortho_vit.data.cifar import read_pickle
from tests.helpers.cifar_files import PER_FILE, Payload, contents, pack, place

DATASETS = [CIFAR10, CIFAR100]
FORMS = ["binary folder", "python folder", "binary archive", "python archive", "binary root", "python root"]


def opened(dataset, root, **kwargs):
    data = dataset(root=str(root), **{"val_size": 0, **kwargs})
    data.prepare_data()
    data.setup()
    return data


def refusal(dataset, root, kind=ValueError, **kwargs):
    with pytest.raises(kind) as caught:
        opened(dataset, root, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def listing(root):
    return sorted((path, path.stat().st_size) for path in root.rglob("*"))


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_layout_reads_the_same_images(tmp_path, dataset):
    expected = None
    for form in FORMS:
        root = tmp_path / form
        place(root, dataset, form)
        before = listing(root)
        data = opened(dataset, root)
        train, test = data.train_set, data.test_set
        found = [train.images, torch.from_numpy(train.labels), test.images, torch.from_numpy(test.labels)]
        expected = expected or found
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), form
        assert listing(root) == before
    assert expected[0].shape == (PER_FILE * len(dataset.layouts[0].train), 3, 32, 32)
    assert (expected[0].dtype, expected[1].dtype) == (torch.uint8, torch.int64)


@pytest.mark.parametrize("dataset", DATASETS)
def test_pixels_and_fine_labels_are_those_of_the_file(tmp_path, dataset):
    path = place(tmp_path / "data", dataset, "binary folder")
    data = opened(dataset, tmp_path / "data")
    label_bytes = 1 if dataset is CIFAR10 else 2
    record = (path / dataset.layouts[0].test[0]).read_bytes()[: label_bytes + 3072]
    assert data.test_set.labels[0] == record[label_bytes - 1]
    for channel, row, column in [(0, 0, 0), (1, 2, 3), (2, 31, 31)]:
        assert (
            data.test_set.images[0, channel, row, column]
            == record[label_bytes + 1024 * channel + 32 * row + column]
        )


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_are_read(protocol):
    pixels = np.arange(2 * 3072).astype(np.uint8).reshape(2, 3072)
    found, labels = read_pickle(pickle.dumps({"data": pixels, "labels": [3, 4]}, protocol), "labels")
    assert np.array_equal(found, pixels)
    assert labels.tolist() == [3, 4]


def test_a_pickle_of_python_2_and_old_numpy_is_read():
    pixels = bytes(range(256)) * 12
    text = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T\x00\x0c\x00\x00" + pixels + b"tbU\x06labels]K\x07au."
    )
    found, labels = read_pickle(text, "labels")
    assert found.tobytes() == pixels
    assert labels.tolist() == [7]


@pytest.mark.parametrize("form", ["python folder", "python archive"])
def test_a_malicious_pickle_runs_nothing(tmp_path, form):
    layout = CIFAR10.layouts[1]
    bad = pickle.dumps({"data": Payload(tmp_path / "pwned"), "labels": [0]})
    files = {**contents(CIFAR10, layout), "data_batch_3": bad}
    root = tmp_path / "data"
    (root / layout.folder).mkdir(parents=True)
    if form == "python archive":
        pack(root / layout.archive, {f"{layout.folder}/{name}": content for name, content in files.items()})
        (root / layout.folder).rmdir()
    else:
        for name, content in files.items():
            (root / layout.folder / name).write_bytes(content)
    message = refusal(CIFAR10, root)
    assert "data_batch_3" in message
    assert "posix.mkdir" in message
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "thing",
    [
        b"",
        b"garbage",
        pickle.dumps([1, 2]),
        pickle.dumps({"labels": [0]}),
        pickle.dumps({"data": np.zeros((1, 3072), np.float32), "labels": [0]}),
        pickle.dumps({"data": np.zeros((1, 3072), object), "labels": [0]}),
        pickle.dumps({"data": np.zeros((1, 3071), np.uint8), "labels": [0]}),
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}),
        pickle.dumps({"data": np.zeros((0, 3072), np.uint8), "labels": []}),
        pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["a"]}),
        pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [0]})[:-500],
    ],
    ids=range(11),
)
def test_a_pickle_that_is_not_a_batch_is_refused(thing):
    with pytest.raises(ValueError, match=r"^it "):
        read_pickle(thing, "labels")


@pytest.mark.parametrize("form", ["binary folder", "python folder"])
def test_a_truncated_file_is_named(tmp_path, form):
    folder = place(tmp_path / "data", CIFAR10, form)
    victim = sorted(folder.iterdir())[1]
    victim.write_bytes(victim.read_bytes()[:-100])
    assert str(victim) in refusal(CIFAR10, tmp_path / "data")


@pytest.mark.parametrize("form", ["binary folder", "python folder"])
def test_a_missing_file_is_named(tmp_path, form):
    folder = place(tmp_path / "data", CIFAR10, form)
    victim = sorted(folder.iterdir())[2]
    victim.unlink()
    assert victim.name in refusal(CIFAR10, tmp_path / "data", FileNotFoundError)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1000],
        lambda data: data[:100],
        lambda data: b"",
        lambda data: b"not an archive" * 100,
        lambda data: data[:5000] + bytes(200) + data[5200:],
    ],
    ids=["truncated", "a stub", "empty", "not an archive", "overwritten"],
)
@pytest.mark.parametrize("form", ["binary archive", "python archive"])
def test_a_damaged_archive_is_named_and_left_as_it_was(tmp_path, form, damage):
    archive = place(tmp_path / "data", CIFAR10, form)
    archive.write_bytes(damage(archive.read_bytes()))
    before = listing(tmp_path)
    assert str(archive) in refusal(CIFAR10, tmp_path / "data")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("dataset", DATASETS)
def test_missing_data_are_answered_with_where_what_and_how(tmp_path, dataset):
    message = refusal(dataset, tmp_path / "nowhere", FileNotFoundError)
    for part in (
        str(tmp_path / "nowhere"),
        dataset.layouts[0].archive,
        dataset.layouts[1].archive,
        "download=True",
    ):
        assert part in message
    assert not (tmp_path / "nowhere").exists()


def served(tmp_path, monkeypatch, md5=None):
    """Let the data set's host be a folder of this machine; returns the archive in it."""
    archive = place(tmp_path / "host", CIFAR10, "binary archive")
    layout = CIFAR10.layouts[0]._replace(md5=md5 or hashlib.md5(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(cifar, "HOST", (tmp_path / "host").as_uri())
    monkeypatch.setattr(CIFAR10, "layouts", (layout, CIFAR10.layouts[1]))
    return archive


def test_a_download_is_kept_and_not_repeated(tmp_path, monkeypatch):
    archive = served(tmp_path, monkeypatch)
    root = tmp_path / "new" / "data"
    first = opened(CIFAR10, root, download=True)
    assert [path.name for path in root.iterdir()] == [archive.name]
    archive.unlink()
    assert torch.equal(opened(CIFAR10, root, download=True).test_set.images, first.test_set.images)


def test_a_download_with_a_wrong_md5_is_not_kept(tmp_path, monkeypatch):
    served(tmp_path, monkeypatch, md5="0" * 32)
    assert "its md5 is " in refusal(CIFAR10, tmp_path / "data", download=True)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch):
    served(tmp_path, monkeypatch).unlink()
    message = refusal(CIFAR10, tmp_path / "data", ConnectionError, download=True)
    assert f"put it into {tmp_path / 'data'}" in message
    assert list((tmp_path / "data").iterdir()) == []


def test_the_validation_set_is_held_out_of_the_training_set(tmp_path):
    place(tmp_path, CIFAR10, "binary folder")
    data = opened(CIFAR10, tmp_path, val_size=10)
    rows = np.concatenate([data.train_set.rows, data.val_set.rows])
    assert len(data.val_set) == 10
    assert sorted(rows.tolist()) == list(range(5 * PER_FILE))
    assert "val_size must be in [0, 40) for 40 images, got 40" in refusal(CIFAR10, tmp_path, val_size=40)


@pytest.mark.parametrize("autoaugment", [False, True])
def test_batches_are_the_same_with_and_without_workers(tmp_path, autoaugment):
    place(tmp_path, CIFAR100, "binary folder")
    kwargs = {"batch_size": 3, "autoaugment": autoaugment}
    here, there = (
        list(opened(CIFAR100, tmp_path, num_workers=n, **kwargs).train_dataloader()) for n in (0, 2)
    )
    assert len(here) == len(there) == 3
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert (here[0][0].dtype, here[0][1].dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize("dataset", DATASETS)
def test_it_describes_itself(dataset):
    data = dataset()
    assert data.num_classes == len(set(data.classes)) == {CIFAR10: 10, CIFAR100: 100}[dataset]
    assert list(data.classes) == sorted(data.classes)
    assert (data.image_size, data.channels, len(data.mean), len(data.std)) == (32, 3, 3, 3)
