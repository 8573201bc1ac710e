"""The transport experiments end to end in their quick forms, and the corpora they build."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ortho_vit.experiments import transport
from ortho_vit.experiments.result import run_command
from ortho_vit.experiments.transport import Corpus, fragmented_hypercube, read_texts
from ortho_vit.transport import sinkhorn

ROOT = Path(__file__).parents[2]
LINES = [
    "to be or not to be that is the question",
    "whether it is nobler in the mind",
    "all the world's a stage",
]


def run(*arguments: str, output: Path) -> dict:
    transport.main([*arguments, "--quick", "--output", str(output)])
    name = arguments[0]
    assert (output / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert (output / f"{name}.csv").stat().st_size > 100
    return json.loads((output / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    folder = tmp_path / "plays"
    folder.mkdir()
    for i in range(3):
        (folder / f"play{i}.txt").write_text("\n".join(LINES[i:] * 5), encoding="utf-8")
    return folder


@pytest.fixture
def mnist_files(tmp_path: Path) -> Path:
    """Random images in torchvision's layout, 600 to train on and 300 to test on."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, count in (("train", 600), ("t10k", 300)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        (raw / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">4i", 2051, count, 28, 28) + images.tobytes()
        )
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())
    return tmp_path


def test_digits_compare_every_pair_by_every_method(tmp_path: Path) -> None:
    saved = run("digits", output=tmp_path)
    assert saved["settings"]["pairs"] == 45
    assert saved["settings"]["d"] == 128
    assert {row["method"] for row in saved["table"]} == set(transport.COLOURS)
    assert all(row["last"] > 0 for row in saved["table"])


def test_mnist_reads_torchvisions_files(tmp_path: Path, mnist_files: Path) -> None:
    assert run("mnist", "--data", str(mnist_files), output=tmp_path)["settings"]["pairs"] == 45


def test_shakespeare_reads_a_folder_of_texts(tmp_path: Path, plays: Path) -> None:
    pytest.importorskip("gensim")
    saved = run("shakespeare", "--texts", str(plays), output=tmp_path)
    assert saved["settings"]["clouds"] == ["play0", "play1", "play2"]
    assert saved["settings"]["pairs"] == 3


def test_hypercube_reports_its_exact_value(tmp_path: Path) -> None:
    saved = run("hypercube", output=tmp_path)
    assert saved["settings"]["exact"] == 8
    assert {row["samples"] for row in saved["table"]} == {"paired", "independent"}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_paired_hypercube_costs_exactly_4k(k: int) -> None:
    """In the true coordinates the identity is optimal among all matchings."""
    x, y = fragmented_hypercube(40, 5, k, seeds=[0, 1], paired=True)
    assert x.shape == y.shape == (2, 40, 5)
    torch.testing.assert_close((x - y).square().sum(-1), torch.full((2, 40), 4.0 * k, dtype=torch.float64))
    C = torch.cdist(x[..., :k], y[..., :k]).square()
    uniform = C.new_full((40,), 1 / 40)
    assert (sinkhorn(uniform, uniform, C, 1e-3).value - 4 * k).abs().max() < 1e-2


def test_a_corpus_pads_with_weightless_points_and_lists_every_pair() -> None:
    clouds = {str(n): (torch.randn(n, 4).double(), torch.full((n,), 1 / n).double()) for n in (2, 3, 5)}
    corpus = Corpus.of(clouds)
    assert corpus.points.shape == (3, 5, 4)
    torch.testing.assert_close(corpus.weights.sum(1), torch.ones(3).double())
    assert corpus.weights[0].count_nonzero() == 2
    x, y, _, b = corpus.pairs()
    assert x.shape == y.shape == (3, 5, 4)
    assert b[0].count_nonzero() == 3


def test_a_corpus_is_scaled_to_a_distance() -> None:
    clouds = {str(n): (torch.randn(n, 4).double() + n, torch.full((n,), 1 / n).double()) for n in (2, 3, 5)}
    corpus = Corpus.of(clouds)
    x, y, a, b = corpus.pairs()
    costs = (a.unsqueeze(-1) * torch.cdist(x, y).square() * b.unsqueeze(-2)).sum((-2, -1))
    assert corpus.point_distance() == pytest.approx(costs.mean().item())
    shifts = (a.unsqueeze(-2) @ x - b.unsqueeze(-2) @ y).square().sum((-2, -1))
    assert corpus.centre_distance() == pytest.approx(shifts.mean().item())
    assert corpus.scaled(9.0).point_distance() == pytest.approx(9 * corpus.point_distance())


def test_texts_are_lower_case_words(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("Who's THERE?\n\n  Nay, answer me: 42!\n", encoding="utf-8")
    assert read_texts(tmp_path)["a"] == [["who's", "there"], ["nay", "answer", "me"]]


def fails(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert run_command(transport.main, [*arguments, "--quick"]) == 1
    return capsys.readouterr().err


def test_bad_input_is_one_line(tmp_path: Path, plays: Path, capsys: pytest.CaptureFixture) -> None:
    missing = str(tmp_path / "nowhere")
    assert fails(capsys, "shakespeare", "--texts", missing) == f"error: no folder {missing}\n"
    assert fails(capsys, "mnist", "--data", missing).startswith("error: no MNIST in ")
    (plays / "play1.txt").write_bytes(b"\xff\xfe\x00bad")
    assert "play1.txt as UTF-8 text" in fails(capsys, "shakespeare", "--texts", str(plays))
    (plays / "play1.txt").write_text("12 34\n")
    assert "play1.txt has no words in it" in fails(capsys, "shakespeare", "--texts", str(plays))
    for path in plays.iterdir():
        path.unlink()
    assert "has 0 .txt files; pairs need at least two" in fails(capsys, "shakespeare", "--texts", str(plays))


def test_missing_gensim_is_one_line(
    plays: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "gensim.models", None)
    assert "word vectors need gensim: pip install" in fails(capsys, "shakespeare", "--texts", str(plays))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sonnets"], "invalid choice: 'sonnets'"),
        (["digits", "--texts", "plays"], "--texts is an option of shakespeare, not of digits"),
    ],
)
def test_a_wrong_corpus_or_option_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stop:
        transport.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_line_as_a_user_types_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ortho_vit.experiments.transport"]
    missing = [*command, "shakespeare", "--texts", str(tmp_path / "nowhere")]
    result = subprocess.run(missing, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"error: no folder {tmp_path / 'nowhere'}\n"
