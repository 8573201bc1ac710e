import argparse
import csv
import json
import math
from pathlib import Path

import pytest

from ortho_vit.experiments.figure import new_figure
from ortho_vit.experiments.result import Progress, Result, duration, load, produce, run_command, thin


def test_a_result_is_saved_with_its_settings_and_versions(tmp_path: Path) -> None:
    result = Result("trial", {"seed": 3}, {"curve": {"x": [0.0, 1.0], "y": [1.0, math.nan]}})
    result.table.append({"method": "curve", "reached": None, "last": math.inf})
    result.save(tmp_path / "new folder")
    saved = json.loads((tmp_path / "new folder" / "trial.json").read_text(encoding="utf-8"))
    assert saved["settings"] == {"seed": 3}
    assert saved["table"] == [{"method": "curve", "reached": None, "last": None}]
    assert {"python", "torch", "machine"} <= set(saved["versions"])
    rows = list(csv.reader((tmp_path / "new folder" / "trial.csv").read_text(encoding="utf-8").splitlines()))
    assert rows == [["series", "x", "y"], ["curve", "0", "1"], ["curve", "1", "nan"]]


@pytest.mark.parametrize("length", [0, 1, 120, 121, 5001])
def test_thinning_keeps_both_ends_and_few_points(length: int) -> None:
    kept = thin(length)
    assert len(kept) <= 120
    assert kept == sorted(set(kept))
    if length:
        assert (kept[0], kept[-1]) == (0, length - 1)


def test_a_thinned_result_keeps_short_curves_and_cuts_long_ones() -> None:
    long = [float(i) for i in range(1000)]
    series = {"short": {"x": [1.0, 2.0]}, "long": {"x": long, "y": [-x for x in long]}}
    thinned = Result("trial", {}, series).thinned().series
    assert thinned["short"] == series["short"]
    assert len(thinned["long"]["x"]) <= 120
    assert thinned["long"]["y"] == [-x for x in thinned["long"]["x"]]


def test_a_table_prints_missing_numbers_as_dashes(capsys: pytest.CaptureFixture) -> None:
    Result(
        "trial", {}, table=[{"method": "a", "to 1e-6": None}, {"method": "bb", "to 1e-6": 0.12345}]
    ).print_table()
    assert capsys.readouterr().out == "method  to 1e-6\na       –\nbb      0.1235\n"


def test_an_error_of_the_user_is_one_line(capsys: pytest.CaptureFixture) -> None:
    def fails(_: object) -> None:
        raise ValueError("two\nlines")

    assert run_command(fails) == 1
    assert capsys.readouterr().err == "error: two lines\n"


def test_a_result_is_read_again_as_it_was_saved(tmp_path: Path) -> None:
    result = Result(
        "trial", {"seed": 3}, {"curve": {"x": [0.0, 1.0], "y": [1.0, 2.5]}}, [{"method": "curve"}]
    )
    result.save(tmp_path)
    assert load(tmp_path, "trial") == result
    with pytest.raises(FileNotFoundError, match=r"no .*other.json, the result of an earlier run"):
        load(tmp_path, "other")


def test_redrawing_runs_nothing(tmp_path: Path) -> None:
    options = argparse.Namespace(output=tmp_path, redraw=False)
    plotted = []

    def plot(result: Result):
        plotted.append(result)
        return new_figure(1, 1, 1.0)[0]

    result = produce("trial", options, lambda: Result("trial", {}, table=[{"method": "a"}]), plot)
    (tmp_path / "trial.png").unlink()
    options.redraw = True
    assert produce("trial", options, lambda: pytest.fail("the experiment ran"), plot) == result == plotted[1]
    assert (tmp_path / "trial.png").is_file()


def test_progress_in_a_log_is_one_line_per_part_with_an_estimate(capsys, monkeypatch) -> None:
    clock = iter(range(0, 1000, 30))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    progress = Progress(6)  # at 0 s
    with progress.part("first", 2):  # from 30 to 60 s; the rest is estimated at 90 s
        assert capsys.readouterr().err == ""
    with progress.part("second", 4):
        pass
    assert capsys.readouterr().err == "first: 30.0 s, about 3 min to go\nsecond: 30.0 s\n"


def test_progress_on_a_terminal_shows_what_runs(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress(1).part("only"):
        assert capsys.readouterr().err == "only …"
    assert capsys.readouterr().err.startswith("\r\033[Konly: 0.")


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (89, "89 s"), (120, "2 min"), (9000, "2.5 h")])
def test_durations_are_rounded(seconds: float, text: str) -> None:
    assert duration(seconds) == text
