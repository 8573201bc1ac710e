import os
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from ortho_vit.data import ImageFolder
from ortho_vit.data.decode import decode, random_box
from tests.helpers.dispatch import OTHER, other_device
from tests.helpers.image_files import class_folders, huge_png, image_file, image_folder

RNG = np.random.default_rng(0)


def one_line(kind, call):
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_classes_are_the_folders_in_order(tmp_path):
    data = ImageFolder(str(class_folders(tmp_path, classes=("dog", "ant", "cat"))))
    assert data.classes == ("ant", "cat", "dog")
    assert (data.num_classes, data.image_size, data.channels) == (3, 224, 3)


def test_batches_are_normalised_squares_with_labels(tmp_path):
    for name, colour in (("black", (0, 0, 0)), ("white", (255, 255, 255))):
        image_file(tmp_path / name / "a.png", colour=colour)
        image_file(tmp_path / name / "b.png", size=(7, 31), colour=colour)
    data = image_folder(tmp_path, val_size=0, mean=(0.5, 0.5, 0.5), std=(0.5, 0.25, 0.125))
    ((images, labels),) = data.train_dataloader()
    assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 16, 16), torch.float32, torch.int64)
    for image, label in zip(images, labels, strict=True):
        expected = (2 * label.float() - 1) * torch.tensor([1.0, 2.0, 4.0])
        assert torch.allclose(image, expected[:, None, None].expand(3, 16, 16))


def test_a_flat_folder_is_split_by_seed_without_overlap(tmp_path):
    data = image_folder(class_folders(tmp_path), val_size=4)
    training, validation = set(data.train_set.paths), set(data.val_set.paths)
    assert (len(training), len(validation)) == (8, 4)
    assert not training & validation
    assert np.bincount(data.val_set.labels).tolist() == [2, 2]
    assert image_folder(tmp_path, val_size=4).val_set.paths == data.val_set.paths
    assert image_folder(tmp_path, val_size=4, seed=1).val_set.paths != data.val_set.paths
    assert data.test_set is data.val_set


def test_folders_train_val_and_test_are_used_as_they_are(tmp_path):
    data = image_folder(class_folders(tmp_path, parts=("train", "val", "test"), count=3))
    for part, chosen in (("train", data.train_set), ("val", data.val_set), ("test", data.test_set)):
        assert len(chosen) == 6
        assert all(path.is_relative_to(tmp_path / part) for path in chosen.paths)


def test_a_limit_holds_for_every_set(tmp_path):
    data = image_folder(class_folders(tmp_path), limit=2, val_size=0.5)
    assert (len(data.train_set), len(data.val_set)) == (2, 2)


@pytest.mark.parametrize("autoaugment", [False, True])
def test_batches_are_the_same_with_and_without_workers(tmp_path, autoaugment):
    class_folders(tmp_path)
    runs = []
    for workers in (0, 2):
        loader = image_folder(
            tmp_path, val_size=0, num_workers=workers, autoaugment=autoaugment
        ).train_dataloader()
        loader.sampler.set_epoch(2)
        runs.append(list(loader))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert len(runs[0]) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_reach_another_device_as_uint8_and_are_augmented_there_without_a_read(tmp_path, num_workers):
    for number, size in enumerate([(24, 20), (7, 31), (40, 16), (16, 16), (33, 9), (20, 50)]):
        image_file(tmp_path / "cat" / f"{number}.png", size=size)
        image_file(tmp_path / "dog" / f"{number}.png", size=size[::-1])
    options = {"val_size": 0, "augment": "randaugment", "random_erasing": 0.5, "mixup": 0.5, "cutmix": 0.5}
    expected = list(image_folder(tmp_path, **options).train_dataloader())
    data = image_folder(tmp_path, num_workers=num_workers, **options)
    data._device = lambda: OTHER
    loader = data.train_dataloader()
    assert [(batch.images.dtype, batch.images.shape) for batch in loader._loader] == [
        (torch.uint8, (4, 3, 16, 16))
    ] * 3
    with other_device():
        found = list(loader)
    for batch, theirs in zip(found, expected, strict=True):
        for ours, other in zip(batch, theirs, strict=True):
            assert ours.device == OTHER
            assert torch.equal(ours.values, other)


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("size", [(500, 333), (333, 500), (257, 311), (40, 37), (224, 224), (1000, 61)])
def test_evaluation_sees_what_timms_transform_gives(tmp_path, size, crop_pct):
    for label in ("a", "b"):
        image_file(tmp_path / label / "0.png", size=size)
    data = image_folder(tmp_path, val_size=1, image_size=64, crop_pct=crop_pct)
    ((images, _),) = data.val_dataloader()
    kwargs = {"input_size": (3, 64, 64), "crop_pct": data.crop_pct, "interpolation": "bicubic"}
    theirs = create_transform(**kwargs, mean=data.mean, std=data.std)
    (path,) = data.val_set.paths
    with Image.open(path) as image:
        assert torch.equal(images[0], theirs(image))


def test_random_boxes_lie_within_the_image_and_have_the_usual_areas():
    noise = RNG.random((2000, 4))
    boxes = np.array([random_box(640, 480, row) for row in noise])
    left, top, right, bottom = boxes.T
    assert (boxes >= 0).all()
    assert (right <= 640).all()
    assert (bottom <= 480).all()
    share = (right - left) * (bottom - top) / (640 * 480)
    assert share.min() >= 0.079
    assert share.max() > 0.9
    aspect = (right - left) / (bottom - top)
    assert aspect.min() > 0.74
    assert aspect.max() < 1.34


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("L", "png"), ("P", "png"), ("RGBA", "png"), ("LA", "png"), ("1", "png"), ("CMYK", "jpg")],
)
def test_every_mode_becomes_rgb(tmp_path, mode, suffix):
    path = image_file(tmp_path / f"a.{suffix}", mode=mode, colour=(255, 255, 255))
    image = decode(path)
    assert (image.mode, image.size) == ("RGB", (24, 20))
    assert np.asarray(image).min() >= 254


@pytest.mark.parametrize("value", [0, 0x1234, 0x80FF, 0xFFFF])
def test_sixteen_bits_keep_their_upper_eight(tmp_path, value):
    Image.fromarray(np.full((4, 5), value, np.uint16)).save(tmp_path / "a.png")
    assert np.unique(np.asarray(decode(tmp_path / "a.png"))).tolist() == [value >> 8]


def test_an_image_from_a_tilted_camera_is_put_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90° to see it upright
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    assert decode(tmp_path / "a.jpg").size == (20, 40)


def damaged(kind, good):
    return {
        "empty": b"",
        "text": b"this is not an image",
        "truncated": good[: len(good) // 2],
        "stub": good[:20],
        "bomb": huge_png(),
        "float": None,
    }[kind]


BAD = ["empty", "text", "truncated", "stub", "bomb", "float"]


def damage(path, kind):
    content = damaged(kind, path.read_bytes())
    if content is not None:
        path.write_bytes(content)
    else:
        path.unlink()
        path = path.with_suffix(".tiff")
        Image.fromarray(np.ones((4, 4), np.float32)).save(path)
    return path


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_stops_training_with_its_name(tmp_path, kind, num_workers):
    class_folders(tmp_path)
    bad = damage(tmp_path / "cat" / "3.png", kind)

    def epoch():
        return list(image_folder(tmp_path, val_size=0, num_workers=num_workers).train_dataloader())

    assert f"cannot read {bad}: " in one_line(ValueError, epoch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_images_are_left_out_of_a_prediction_and_counted(tmp_path, num_workers):
    class_folders(tmp_path / "new")
    bad = [damage(tmp_path / "new" / "cat" / f"{i}.png", kind) for i, kind in enumerate(BAD)]
    data = image_folder(tmp_path, "predict", predict_root=str(tmp_path / "new"), num_workers=num_workers)
    with pytest.warns(UserWarning, match="cannot read") as caught:
        batches = list(data.predict_dataloader())
    names = [name for _, batch in batches for name in batch]
    assert sorted(names) == [f"dog/{i}.png" for i in range(6)]
    assert sum(len(images) for images, _ in batches) == 6
    assert all(len(images) for images, _ in batches)
    assert len(caught) == len(data.skipped) == 6
    assert all(any(str(path) in reason for reason in data.skipped) for path in bad)
    with pytest.warns(UserWarning, match="skipped 6 of 12 images"):
        data.teardown("predict")


def test_a_prediction_takes_folders_flat_or_nested_and_single_images(tmp_path):
    image_file(tmp_path / "b.png")
    image_file(tmp_path / "a.jpg")
    image_file(tmp_path / "deep" / "er" / "c.bmp")
    image_file(tmp_path / ".hidden" / "d.png")
    for root, expected in ((tmp_path, ["a.jpg", "b.png", "deep/er/c.bmp"]), (tmp_path / "b.png", ["b.png"])):
        data = image_folder(tmp_path / "nowhere", "predict", predict_root=str(root))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ((images, names),) = data.predict_dataloader()
        assert names == expected
        assert images.shape == (len(expected), 3, 16, 16)


def test_what_is_not_a_file_is_not_opened(tmp_path):
    image_file(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    ((_, names),) = image_folder(tmp_path, "predict", predict_root=str(tmp_path)).predict_dataloader()
    assert names == ["a.png"]


def test_missing_images_are_answered_with_where_to_put_them(tmp_path):
    (tmp_path / "empty").mkdir()
    empty, nowhere = tmp_path / "empty", tmp_path / "nowhere"
    message = one_line(FileNotFoundError, lambda: image_folder(empty))
    assert f"no class folders in {empty}; put the images into one for each class" in message
    message = one_line(FileNotFoundError, lambda: image_folder(empty, "predict", predict_root=str(empty)))
    assert f"no images in {empty}; put some there" in message
    for kwargs in ({}, {"stage": "predict"}, {"stage": "predict", "predict_root": str(nowhere)}):
        assert f"{nowhere} does not exist; set" in one_line(
            FileNotFoundError, lambda k=kwargs: image_folder(nowhere, **k)
        )


def test_training_images_are_predicted_only_when_asked_for(tmp_path):
    class_folders(tmp_path)
    message = one_line(ValueError, lambda: image_folder(tmp_path, "predict"))
    assert "has no folder test" in message
    assert "data.predict_root" in message
    ((_, names), *_) = image_folder(tmp_path, "predict", predict_root=str(tmp_path)).predict_dataloader()
    assert names[0] == "cat/0.png"


# ------------------------------------------------------------------------------------------- which folders are what


@pytest.mark.parametrize(
    "names", [("Train", "Val", "Test"), ("TRAIN", "valid", "testing"), ("training", "Validation", "TEST")]
)
def test_the_usual_names_of_parts_are_recognised_in_any_case(tmp_path, names):
    data = image_folder(class_folders(tmp_path, parts=names, count=2))
    assert data.classes == ("cat", "dog")
    for name, chosen in zip(names, (data.train_set, data.val_set, data.test_set), strict=True):
        assert len(chosen) == 4
        assert all(path.is_relative_to(tmp_path / name) for path in chosen.paths)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("test",), "has the folder test, but no folder train beside it"),
        (("Val", "Test"), "has the folder Val and Test, but no folder train beside it"),
        (("train_set", "test_set"), "has the folder 'test_set', which looks like a part of the data set"),
        (("train", "dev"), "has the folder 'dev', which looks like a part of the data set"),
        (("train", "test-images"), "has the folder 'test-images', which looks like a part of the data set"),
        (("train", "val", "valid"), "has val and valid, both for val; keep one of them"),
        (("Train", "train"), "has Train and train, both for train; keep one of them"),
    ],
)
def test_a_class_with_the_name_of_a_part_is_refused(tmp_path, parts, message):
    class_folders(tmp_path, parts=parts, count=1)
    assert message in one_line(ValueError, lambda: image_folder(tmp_path))


def test_a_class_may_be_called_train(tmp_path):
    data = image_folder(class_folders(tmp_path, classes=("bus", "ship", "train")), val_size=0)
    assert data.classes == ("bus", "ship", "train")
    assert len(data.train_set) == 18


def test_what_archives_and_systems_leave_behind_is_not_a_class(tmp_path):
    class_folders(tmp_path)
    image_file(tmp_path / "__MACOSX" / "._0.png")
    (tmp_path / "cat" / "Thumbs.db").write_bytes(b"x")
    image_file(tmp_path / "dog" / "__MACOSX" / "0.png")
    data = image_folder(tmp_path)
    assert data.classes == ("cat", "dog")
    assert len(data.train_set) + len(data.val_set) == 12
    assert len(data.skipped) == 3


def test_links_are_counted_where_they_are_skipped(tmp_path):
    class_folders(tmp_path / "set")
    image_file(tmp_path / "elsewhere" / "a.png")
    (tmp_path / "set/cat/gone.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "set/dog/more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set/dog/linked.png").symlink_to(tmp_path / "elsewhere/a.png")
    data = image_folder(tmp_path / "set", val_size=0)
    assert len(data.train_set) == 13
    assert sorted(data.skipped) == [
        f"{tmp_path}/set/cat/gone.png: a dangling link",
        f"{tmp_path}/set/dog/more: a link to a folder",
    ]
    predicted = image_folder(tmp_path, "predict", predict_root=str(tmp_path / "set"))
    assert len(predicted.predict_set) == 13
    assert "13 images to predict" in predicted.describe()
    assert "skipped 2: " in predicted.describe()


def test_one_line_describes_what_was_found(tmp_path):
    class_folders(tmp_path, parts=("train", "test"), count=4)
    (tmp_path / "notes").mkdir()
    (tmp_path / "train/cat/gone.png").symlink_to(tmp_path / "gone.png")
    text = image_folder(tmp_path, val_size=2).describe()
    assert text == (
        f"ImageFolder: 2 classes (cat 3, dog 3); 6 training, 2 validation, 8 test; in {tmp_path}; validation held out "
        f"of training; ignored folders: notes; skipped 1: {tmp_path}/train/cat/gone.png: a dangling link"
    )
    flat = image_folder(class_folders(tmp_path / "flat"), val_size=2).describe()
    assert "10 training, 2 validation, test on the validation images" in flat


def test_names_that_are_not_utf8_are_read_and_can_be_printed(tmp_path):
    class_folders(tmp_path, parts=("train",))
    odd = os.fsdecode(b"caf\xe9")
    image_file(tmp_path / "train" / odd / "0.png")
    image_file(tmp_path / "test" / "cat" / f"{odd}.png")
    data = image_folder(tmp_path, val_size=0)
    data.describe().encode("utf-8")
    ((_, names),) = image_folder(tmp_path, "predict").predict_dataloader()
    assert names == [f"cat/{odd}.png"]


# ----------------------------------------------------------------------------------------------------- bad files


def test_all_bad_files_are_listed_at_the_start(tmp_path):
    class_folders(tmp_path, count=12)
    bad = [damage(tmp_path / "cat" / f"{i}.png", "empty") for i in range(7)]
    (tmp_path / "dog/notes.txt").write_text("")
    message = one_line(ValueError, lambda: image_folder(tmp_path))
    assert str(bad[0]) in message
    assert "; and 3 more; repair or remove them, or set data.skip_unreadable" in message


@pytest.mark.parametrize("num_workers", [0, 2])
def test_unreadable_files_are_left_out_on_request_and_counted(tmp_path, num_workers):
    class_folders(tmp_path)
    damage(tmp_path / "cat/1.png", "text")
    truncated = tmp_path / "dog/2.png"  # its header is good
    truncated.write_bytes(truncated.read_bytes()[:-400])
    (tmp_path / "dog/notes.txt").write_text("")
    with pytest.warns(
        UserWarning, match=r"skipped 2 of 13 files: cannot read .*1\.png.*notes\.txt is not an image"
    ):
        data = image_folder(tmp_path, val_size=0, skip_unreadable=True, num_workers=num_workers)
    assert len(data.train_set) == 11
    with pytest.warns(UserWarning, match=r"cannot read .*2\.png: .*; skipped"):
        batches = list(data.train_dataloader())
    assert sum(len(images) for images, _ in batches) == sum(len(labels) for _, labels in batches) == 10


def test_a_share_that_rounds_to_no_image_is_refused(tmp_path):
    class_folders(tmp_path, count=1)
    message = one_line(ValueError, lambda: image_folder(tmp_path, val_size=0.25))
    assert "val_size=0.25 of 2 images rounds to 0; give a count, or 0" in message


@pytest.mark.parametrize("value", [0, 7, 255])
def test_thirty_two_bits_that_hold_eight_keep_them(tmp_path, value):
    Image.fromarray(np.array([[value, 255]], np.int32)).save(tmp_path / "a.tiff")
    with Image.open(tmp_path / "a.tiff") as image:
        assert image.mode == "I"
    assert np.asarray(decode(tmp_path / "a.tiff"))[0, :, 0].tolist() == [value, 255]


def test_more_than_sixteen_bits_are_refused(tmp_path):
    Image.fromarray(np.array([[0, 70_000]], np.int32)).save(tmp_path / "a.tiff")
    assert "pixels of 32 bits" in one_line(ValueError, lambda: decode(tmp_path / "a.tiff"))


def test_nothing_to_test_on_is_said(tmp_path):
    data = image_folder(class_folders(tmp_path), "test", val_size=0)
    assert "nothing to test on" in one_line(ValueError, data.test_dataloader)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"image_size": 0}, "ImageFolder: image_size must be at least 1, got 0"),
        ({"std": (1.0, 0.0, 1.0)}, "ImageFolder: std must be positive, got (1.0, 0.0, 1.0)"),
        (
            {"mean": (0.5,)},
            "ImageFolder: mean and std must have 3 numbers, got (0.5,) and (0.229, 0.224, 0.225)",
        ),
    ],
)
def test_wrong_arguments_are_answered_in_one_line(kwargs, message):
    assert one_line(ValueError, lambda: ImageFolder("x", **kwargs)) == message


def test_images_beside_the_folders_of_classes_are_counted(tmp_path):
    class_folders(tmp_path, parts=("train",))
    image_file(tmp_path / "train" / "lost.png")
    (tmp_path / "train" / "notes.txt").write_text("not an image")
    data = image_folder(tmp_path)
    assert data.skipped == [f"{tmp_path}/train/lost.png: not in the folder of a class"]
