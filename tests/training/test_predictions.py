"""What `predict` and `test` write, in each of its forms."""

import csv
import json
import os
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from ortho_vit.training import PerClass, PredictionWriter
from tests.helpers.small_run import digits, make_classifier, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")
NOT_UTF8 = os.fsdecode(b"caf\xe9.png")


@pytest.fixture(scope="module")
def model():
    return make_classifier().eval()


@pytest.fixture(scope="module")
def batches():
    torch.manual_seed(0)
    names = [["a.png", NOT_UTF8, "ü,b.png"], ["c.png", "d.png"]]
    return [(torch.rand(len(part), 1, 8, 8), part) for part in names]


def predict(model, batches, folder, **options):
    writer = PredictionWriter(**{"path": str(folder / "out.csv")} | options)
    trainer = make_trainer(folder, writer)
    trainer.predict(model, DataLoader(batches, batch_size=None), return_predictions=False)
    return writer


def expected(model, batches):
    with torch.no_grad():
        return torch.cat([model(images).softmax(-1) for images, _ in batches])


def test_the_classes_in_order_and_the_probability_of_every_class(model, batches, tmp_path):
    writer = predict(model, batches, tmp_path, top_k=3, probabilities=True)
    with open(writer.target, newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    columns = ["file", "class", "probability", "class_2", "probability_2", "class_3", "probability_3"]
    assert list(rows[0]) == [*columns, *(f"p({k})" for k in range(10))]
    assert [row["file"] for row in rows] == ["a.png", NOT_UTF8, "ü,b.png", "c.png", "d.png"]
    for row, p in zip(rows, expected(model, batches), strict=True):
        values, labels = p.topk(3)
        assert [row["class"], row["class_2"], row["class_3"]] == [str(k) for k in labels.tolist()]
        assert [float(row[f"probability{k}"]) for k in ("", "_2", "_3")] == pytest.approx(
            values.tolist(), abs=1e-6
        )
        assert [float(row[f"p({k})"]) for k in range(10)] == pytest.approx(p.tolist(), abs=1e-6)


def test_json_lines_by_extension(model, batches, tmp_path):
    plain = predict(model, batches, tmp_path, path=str(tmp_path / "plain.jsonl")).target
    whole = predict(
        model, batches, tmp_path, path=str(tmp_path / "out.jsonl"), top_k=2, probabilities=True
    ).target
    lines = [json.loads(line) for line in plain.read_text().splitlines()]
    assert list(lines[0]) == ["file", "class", "probability"]
    assert lines[1]["file"] == NOT_UTF8
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    for line, p in zip(lines, expected(model, batches), strict=True):
        assert [entry["class"] for entry in line["top"]] == [str(k) for k in p.topk(2).indices.tolist()]
        assert list(line["probabilities"].values()) == pytest.approx(p.tolist(), abs=1e-6)


def test_the_standard_output_holds_the_rows_alone(model, batches, tmp_path, capfdbinary):
    writer = predict(model, batches, tmp_path, path="-")
    lines = capfdbinary.readouterr().out.splitlines()
    assert writer.target is None
    assert not list(tmp_path.iterdir())
    assert lines[0] == b"file,class,probability"
    assert lines[2].startswith(b"caf\xe9.png,")
    assert len(lines) == 6


def test_without_a_path_the_earlier_predictions_are_kept(model, batches, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = {}
    for number in range(3):
        predict(model, batches[number % 2 :], tmp_path, path=None)
        written[number] = (tmp_path / "predictions.csv").read_text(errors="surrogateescape")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "predictions-1.csv",
        "predictions-2.csv",
        "predictions.csv",
    ]
    for number, name in enumerate(("predictions-1.csv", "predictions-2.csv", "predictions.csv")):
        assert (tmp_path / name).read_text(errors="surrogateescape") == written[number]
    assert written[0] == written[2] != written[1]
    predict(model, batches, tmp_path, path=None, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_is_replaced_only_when_asked_and_only_at_the_end(model, batches, tmp_path, monkeypatch):
    path = tmp_path / "out.csv"
    path.write_text("old")
    with pytest.raises(FileExistsError, match=r"or add --predictions\.overwrite true"):
        predict(model, batches, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PredictionWriter, "_top", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            predict(model, batches, tmp_path, overwrite=True)
    assert path.read_text() == "old"
    predict(model, batches, tmp_path, overwrite=True)
    assert path.read_bytes().count(b"\n") == 6
    assert [file.name for file in tmp_path.iterdir()] == ["out.csv"]


def test_rows_are_written_as_they_are_computed(model, batches, tmp_path, monkeypatch):
    seen = []
    step = type(model).predict_step

    def look(self, batch, batch_idx):
        seen.append((tmp_path / ".out.csv.partial").read_bytes().count(b"\n"))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(type(model), "predict_step", look)
    predict(model, batches, tmp_path)
    assert seen == [0, 4]  # a header and three rows


def test_a_process_without_images_writes_a_header(model, tmp_path):
    writer = PredictionWriter(str(tmp_path / "out.csv"), top_k=2)
    trainer = SimpleNamespace(global_rank=1, world_size=2)
    writer.setup(trainer, model, "predict")
    writer.on_predict_end(trainer, model)
    assert (tmp_path / "out-1.csv").read_text() == "file,class,probability,class_2,probability_2\n"
    with pytest.raises(ValueError, match="2 processes cannot share the standard output"):
        PredictionWriter("-").setup(trainer, model, "predict")


def test_a_number_of_classes_below_one_is_refused():
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        PredictionWriter(top_k=0)


def test_accuracy_and_confusion_of_each_class(model, tmp_path):
    per_class, data = PerClass(str(tmp_path / "out")), digits()
    (result,) = make_trainer(tmp_path, per_class).test(model, datamodule=data, verbose=False)
    images, labels = zip(*data.test_dataloader(), strict=True)
    with torch.no_grad():
        guesses = torch.cat([model(x) for x in images]).argmax(-1).tolist()
    labels = torch.cat(labels).tolist()
    with open(tmp_path / "out/confusion.csv") as file:
        header, *rows = csv.reader(file)
    assert header == ["true class", *map(str, range(10))]
    pairs = list(zip(labels, guesses, strict=True))
    assert [[int(x) for x in row[1:]] for row in rows] == [
        [pairs.count((i, j)) for j in range(10)] for i in range(10)
    ]
    with open(tmp_path / "out/classes.csv") as file:
        classes = list(csv.DictReader(file))
    hits = sum(int(row["images"]) * float(row["accuracy"]) for row in classes)
    assert hits / len(pairs) == pytest.approx(result["test/accuracy"], abs=1e-4)
    with Image.open(tmp_path / "out/confusion.png") as image:
        assert image.width > 300


def test_nothing_is_counted_without_a_folder(model, tmp_path):
    per_class = PerClass()
    make_trainer(tmp_path, per_class).test(model, datamodule=digits(), verbose=False)
    assert per_class.matrix is None
    assert not list(tmp_path.iterdir())
