"""Rows, statistics, tables, figures, and the page that shows them."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import ortho_vit
from ortho_vit.cli.main import CommandLine
from ortho_vit.errors import UsageError
from ortho_vit.experiments.figure import new_figure
from ortho_vit.experiments.result import Result, load
from ortho_vit.experiments.table1 import __main__ as command_module
from ortho_vit.experiments.table1 import figures, tables
from ortho_vit.experiments.table1.__main__ import main, make_parser
from ortho_vit.experiments.table1.compare import (
    Difference,
    common_seed,
    difference,
    held_out_error,
    paper_difference,
    summarize,
)
from ortho_vit.experiments.table1.controls import HeldNorm, LargeStart
from ortho_vit.experiments.table1.presets import PRESETS
from ortho_vit.experiments.table1.records import COLUMNS, collect
from ortho_vit.experiments.table1.rows import (
    CONSTRAINED,
    CONTRAST_FACTORS,
    CONTRASTED,
    CONTROLS,
    FACTORS,
    GROUPS,
    PAPER,
    ROWS,
    at_rate,
    choose,
    chosen,
    rate_of,
)
from ortho_vit.experiments.table1.runs import Sweep
from ortho_vit.training.recorder import Recorder

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
FEW = PRESETS["few"]


def entry(row: str, seed: int, error: float | None, **other) -> dict:
    run = {"row": row, "seed": seed, "status": "finished" if error is not None else "diverged", "step": 7}
    run |= {"test_accuracy": None if error is None else 1 - error / 100, "versions": {"torch": "2"}}
    return run | {"seconds": 60.0, "orthogonality": 1e-7, **other}


def made(*table: dict) -> Result:
    return Result("reduced-cifar10", {"preset": "reduced", "data": "CIFAR10"}, table=list(table))


SAMPLE = made(
    entry("within_stiefel_sgd", 0, 10.0),
    entry("within_stiefel_sgd", 1, 12.0),
    entry("within_stiefel_sgd", 2, None),
    entry("none_sgd", 0, 13.0, orthogonality=None),
    entry("none_sgd", 1, 14.0, orthogonality=None),
    entry("none_sgd", 2, 15.0, orthogonality=None),
)


# ------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_every_row_of_the_table_is_a_configuration_and_the_other_way_round(data):
    assert {path.stem for path in (REPOSITORY / "configs/paper" / data).glob("*.yaml")} == set(PAPER)


def test_groups_share_the_runs_they_have_in_common():
    def count(*groups, seeds=(0, 1, 2), preset="reduced"):
        return len(choose(PRESETS[preset], groups, (), seeds))

    assert count("table") == count() == 16 * 3
    assert count("own") == 8 * 3
    assert count("learning-rate") == 2 * len(FACTORS)
    assert count("two-rates") == 2
    assert count("projections") == 4
    # the paper's rate with either integrator, and QK, are there already
    assert count("all") == 48 + 24 + 10 + 2 + 3
    assert count(preset="few") == count("contrasts") == 5 * 3
    # a rate that was chosen is there already; Adam, AdamW and StiefelAdam are rows of the table
    assert count("rates") == 5 * 4
    assert count("contrasts", "rates") == 5 * 3 + 5 * 3
    assert count("all", preset="few") == 5 * 3 + 5 * 3 + 3 + 10


def test_rows_are_chosen_by_pattern_from_all_groups():
    reduced = PRESETS["reduced"]
    chosen = {row.name for row, _ in choose(reduced, (), ["*_sgd_qk?", "none_adam", "none_adamw"], (0,))}
    assert chosen == {"within_stiefel_sgd_qkv", "none_adam", "none_adamw"}
    chosen = {row.name for row, _ in choose(reduced, ["own"], ["*adam*"], (0,))}
    assert chosen == {"within_stiefel_adam_isometric"}


@pytest.mark.parametrize(("text", "seeds"), [("3", (0, 1, 2)), ("4,", (4,)), ("0,4,7", (0, 4, 7))])
def test_seeds_are_a_number_or_a_list(text, seeds):
    assert make_parser().parse_args(["--seeds", text]).seeds == seeds


def test_every_reference_is_a_row():
    assert {row.reference for row in ROWS.values() if row.reference} <= set(ROWS)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize(
    ("name", "group", "blocks"),
    [
        ("within_stiefel_adam_isometric", {"lr": 1e-3, "integrator": "isometric"}, 2 * 6 * 4),
        ("within_projected_stiefel_sgd_one_rate", {"lr": 0.1, "stiefel_lr": 0.1}, 2 * 6 * 4),
        ("none_sgd_same_rate", {"lr": 0.15, "momentum": 0.9}, 0),
        ("none_sgd_orthonormal_start", {"lr": 0.1, "momentum": 0.9, "penalty": 0}, 2 * 6 * 4),
        ("within_stiefel_sgd_rate_x0.25", {"lr": 0.0375, "integrator": "paper"}, 2 * 6 * 4),
        ("within_stiefel_sgd_isometric_rate_x8", {"lr": 1.2, "integrator": "isometric"}, 2 * 6 * 4),
        ("within_stiefel_sgd_stiefel_rate_x4", {"lr": 0.15, "stiefel_lr": 0.6}, 2 * 6 * 4),
        ("within_stiefel_sgd_q", {"lr": 0.15, "integrator": "paper"}, 6 * 4),
        ("within_stiefel_sgd_qk_mlp", {"lr": 0.15, "integrator": "paper"}, (2 * 6 + 2) * 4),
        ("within_stiefel_sgd_isometric_frozen", {"lr": 0.15, "stiefel_lr": 0}, 2 * 6 * 4),
        ("within_stiefel_sgd_isometric_qkv", {"lr": 0.15, "integrator": "isometric"}, 3 * 6 * 4),
        ("across_stiefel_sgd_isometric", {"lr": 0.15, "integrator": "isometric"}, 2 * 4),
    ],
)
def test_a_row_of_our_own_is_what_it_says(name, group, blocks, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    command = CommandLine(list(Sweep(Path("out"), "reduced", "CIFAR10").run(ROWS[name], 3).arguments))
    (made,) = command.model.make_optimizer().param_groups
    assert {key: made[key] for key in group} == group
    assert sum(len(p.matrices()) for _, p in ortho_vit.stiefel_parameters(command.model)) == blocks
    data, trainer = command.datamodule, command.trainer
    assert (data.seed, data.autoaugment, data.crop, data.flip, data.val_size) == (3, False, True, True, 0)
    assert (trainer.max_epochs, command.model.hparams["name"]) == (10, "ortho_vit_pico")
    assert command.model.hparams["label_smoothing"] == 0.1


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize(
    ("name", "lr", "control", "norm"),
    [
        ("none_sgd_large_start_rate_x0.5", 0.05, LargeStart, nn.Identity),
        ("none_sgd_held_norm", 0.1, HeldNorm, nn.Identity),
        ("none_sgd_qk_norm_rate_x2", 0.2, None, nn.LayerNorm),
    ],
)
def test_a_control_is_what_it_says_with_few_images(name, lr, control, norm, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    command = CommandLine(list(Sweep(Path("out"), "few", "CIFAR10").run(ROWS[name], 3).arguments))
    (made,) = command.model.make_optimizer().param_groups
    assert (made["lr"], made["momentum"], made["weight_decay"]) == (lr, 0.9, 5e-5)
    assert not list(ortho_vit.stiefel_parameters(command.model))
    controls = [type(c) for c in command.trainer.callbacks if isinstance(c, LargeStart)]
    assert controls == ([control] if control else [])
    assert isinstance(command.model.model.blocks[0].attn.q_norm, norm)
    (recorder,) = [c for c in command.trainer.callbacks if isinstance(c, Recorder)]
    assert (recorder.every_n_epochs, command.trainer.check_val_every_n_epoch) == (10, 100)
    data = command.datamodule
    assert (data.autoaugment, data.crop, data.flip) == (False, False, False)
    assert (data.seed, data.val_size) == (3, 45000)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize(
    ("preset", "data", "epochs", "autoaugment"),
    [("augmented", "CIFAR10", 60, False), ("brief", "CIFAR100", 10, False), ("long", "CIFAR10", 40, True)],
)
def test_the_other_regimes_of_the_contrasts_are_configurations(
    preset, data, epochs, autoaugment, monkeypatch
):
    monkeypatch.chdir(REPOSITORY)
    arguments = Sweep(Path("out"), preset, data).run(ROWS["none_sgd_held_norm"], 0).arguments
    command = CommandLine(list(arguments))
    assert command.trainer.max_epochs == epochs
    assert command.datamodule.autoaugment == autoaugment
    assert type(command.datamodule).__name__ == data


def test_runs_of_one_seed_start_from_the_same_other_weights():
    models = []
    for kwargs in ({"constraint": "within"}, {"constraint": None}, {"constraint": None, "qk_norm": True}):
        torch.manual_seed(5)
        models.append(dict(ortho_vit.create_model("ortho_vit_pico", **kwargs).named_parameters()))
    within, free, normed = models
    assert within.keys() == free.keys() < normed.keys()
    for name, weight in free.items():
        rest = slice(2 * 96, None) if "attn.qkv" in name else slice(None)  # the values
        assert torch.equal(within[name][rest], weight[rest])
        assert torch.equal(normed[name], weight)


# ------------------------------------------------------------------------------------------------------- statistics


def test_a_diverged_run_is_counted_and_not_averaged():
    summary = summarize(SAMPLE, "within_stiefel_sgd")
    assert (summary.mean, summary.diverged) == (pytest.approx(11.0), {2: 7})
    assert summary.std == pytest.approx(2**0.5)  # of a sample
    assert summarize(SAMPLE, "none_sgd").orthogonality is None


def test_differences_are_paired_by_seed():
    paired = difference(SAMPLE, "within_stiefel_sgd", "none_sgd")
    assert paired.values == pytest.approx([-3.0, -2.0])
    assert (paired.n, paired.better) == (2, 2)


@pytest.mark.parametrize("values", [[-3.0, -2.0], [0.1, -0.4, 0.2], [1.0, 1.1, 0.9, 1.3, 1.2]])
def test_the_p_value_is_that_of_the_paired_t_test(values):
    expected = scipy.stats.ttest_rel(values, [0.0] * len(values)).pvalue
    assert Difference(values).p == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("comparisons", [1, 3])
def test_an_interval_excludes_zero_where_the_corrected_p_value_is_below_five_percent(comparisons):
    near, far = ([shift - 0.3, shift + 0.1, shift, shift + 0.2] for shift in (0.1, 1.0))
    for values in (near, far):
        paired = Difference(values)
        assert (abs(paired.mean) > paired.half_width(comparisons)) == (paired.corrected_p(comparisons) < 0.05)
    expected = scipy.stats.t.interval(0.95, 3, np.mean(near), scipy.stats.sem(near))
    assert Difference(near).mean + Difference(near).half_width() == pytest.approx(expected[1])
    assert Difference([1.0, 1.1, -1.0]).corrected_p(3) == 1.0


@pytest.mark.parametrize("values", [[], [1.0], [0.5, 0.5]])
def test_without_a_spread_there_is_no_p_value(values):
    assert Difference(values).p is None


def test_rounding_is_no_spread():
    accuracies = {"none_sgd": (0.5433, 0.5533), "none_adam": (0.5440, 0.5540)}
    runs = [
        entry(row, seed, 0.0, test_accuracy=float(np.float32(values[seed])))
        for row, values in accuracies.items()
        for seed in (0, 1)
    ]
    paired = difference(made(*runs), "none_sgd", "none_adam")
    assert paired.mean == pytest.approx(0.07, abs=1e-4)
    assert paired.p is None


def test_tables_of_one_seed_have_one_seed():
    runs = [entry("within_stiefel_sgd", seed, 10.0 + seed, seconds=60.0 * seed) for seed in (1, 2)]
    runs += [entry("within_stiefel_sgd_q", 2, 20.0), entry("within_stiefel_sgd_qkv", 1, 30.0)]
    runs += [entry("within_stiefel_sgd_qk_mlp", 2, None)]
    result = made(*runs)
    assert common_seed(result, GROUPS["projections"]) == 2
    table = tables.one_seed_table(result, GROUPS["projections"])
    cells = [line.split(" | ")[2:5:2] for line in table.splitlines()[2:]]
    assert cells == [["20.00", "60 s"], ["12.00", "2 min"], ["–", "–"], ["diverged at step 7", "–"]]


def test_the_papers_differences_are_those_of_its_table():
    assert paper_difference("within_stiefel_sgd", "none_sgd", "CIFAR100") == pytest.approx(30.20 - 32.61)
    assert paper_difference("within_stiefel_sgd_isometric", "none_sgd", "CIFAR10") is None


# --------------------------------------------------------------------------------------------------- tables, figures


def test_the_table_shows_errors_runs_and_the_papers_figure():
    lines = tables.rows_table(SAMPLE, GROUPS["table"]).splitlines()
    assert len(lines) == 2 + 16
    (line,) = [line for line in lines if line.startswith("| StiefelSGD | within")]
    cells = [cell.strip() for cell in line.strip("|").split(" | ")]
    expected = ["11.00 ± 1.41", "2, and 1 diverged at step 7", "8.32 ± 0.39", "SGD, none", "-2.50 ± 0.71"]
    assert cells[2:] == [*expected, "0.126", "60 s", "1e-07"]


def test_every_finding_names_rows_that_exist():
    pairs = [pair for finding in tables.FINDINGS.values() for pair in finding]
    assert {name for pair in pairs for name in pair} <= set(ROWS)
    assert len(tables.FINDINGS) == 5


def test_a_finding_says_which_runs_diverged():
    cells = tables.pairs_table(SAMPLE, tables.FINDINGS["constraint"]).splitlines()[3].split(" | ")
    assert cells[1:4] == ["SGD, none", "-2.50 ± 0.71", "2 of 2; the first diverged 1 ×"]


def test_a_finding_counts_what_is_as_the_paper_says_and_what_is_not():
    runs = [entry("within_stiefel_sgd", seed, 10.0 + 0.01 * seed) for seed in range(3)]
    runs += [entry("across_stiefel_sgd", seed, 11.0) for seed in range(3)]
    runs += [entry("none_sgd", 0, 9.0)]
    first = tables.FINDINGS["constraint"]
    assert tables.tally(made(*runs), first) == (
        "1 of 3 pairs are ordered as the paper says, 1 of them with p < 0.05; "
        "2 the other way round, 0 of them with p < 0.05."
    )
    assert tables.tally(made(), first) == "No pair is finished yet."


def test_a_diverged_run_has_no_part_in_the_curves():
    result = made(entry("none_sgd", 0, 20.0), entry("none_sgd", 1, None))
    result.series = {f"none_sgd {seed}": {"epoch": [1.0], "train_loss": [2.0 + seed]} for seed in (0, 1)}
    _, axis = new_figure(1, 1, 3)
    figures._curve(axis, result, ROWS["none_sgd"], "train_loss")
    assert list(axis.lines[0].get_ydata()) == [2.0]


def test_a_curve_is_the_mean_in_a_band_from_the_lowest_to_the_highest_seed():
    result = made(*(entry("none_sgd", seed, 20.0) for seed in range(3)))
    result.series = {
        f"none_sgd {seed}": {"epoch": [1.0, 2.0], "train_loss": [2.0 + seed, 1.0]} for seed in range(3)
    }
    _, axis = new_figure(1, 1, 3)
    figures._curve(axis, result, ROWS["none_sgd"], "train_loss")
    assert list(axis.lines[0].get_ydata()) == [3.0, 1.0]
    band = axis.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band.tolist()} == {(1.0, 2.0), (1.0, 4.0), (2.0, 1.0)}


def test_only_what_stands_between_the_markers_of_a_sweep_is_replaced():
    def marked(sweep, inside):
        return f"<!-- {sweep}: projections -->\n{inside}<!-- end -->"

    page = f"before\n{marked('reduced-cifar10', 'old')}\nbetween\n{marked('paper-cifar10', 'kept')}\nafter"
    filled = tables.fill(page, SAMPLE, "figures")
    block = tables.one_seed_table(SAMPLE, GROUPS["projections"])
    assert filled == page.replace("old", f"{block}\n")
    assert tables.fill(filled, SAMPLE, "figures") == filled


def test_a_report_is_written_from_whatever_is_finished(tmp_path, capsys):
    plan = Sweep(tmp_path, "reduced", "CIFAR10")
    curve = [
        {"epoch": e, "train_loss": 2.0 / e, "train_accuracy": 0.3, "test_loss": 2.0, "test_accuracy": 0.4}
        | {"orthogonality": None, "lr": 0.1, "step": 7 * e, "seconds": 9.0 * e}
        for e in (1, 2)
    ]
    for name, seed in (("none_sgd", 0), ("none_sgd", 6), ("within_stiefel_sgd_rate_x2", 6)):
        run = plan.run(ROWS[name], seed)
        run.folder.mkdir(parents=True)
        result = entry(name, seed, 20.0 + seed) | {"test_loss": 1.0, "parameters": 9, "curve": curve}
        (run.folder / "result.json").write_text(json.dumps(result))
    page = tmp_path / "page.md"
    page.write_text(
        "".join(f"<!-- reduced-cifar10: {name} -->\n<!-- end -->\n" for name in ("table", "errors"))
    )
    arguments = ["report", "--preset", "reduced", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "| SGD | none | 23.00 ± 4.24 | 2 |" in capsys.readouterr().out
    assert main([*arguments, "--to", str(tmp_path / "docs"), "--page", str(page)]) == 0
    assert "| SGD | none | 23.00 ± 4.24 | 2 |" in page.read_text()
    assert "(docs/reduced-cifar10-errors.png)" in page.read_text()
    assert "(reduced-cifar10-errors.png)" in (tmp_path / "report" / "reduced-cifar10.md").read_text()
    written = {path.name.removeprefix("reduced-cifar10") for path in (tmp_path / "report").iterdir()}
    figures_drawn = {"-curves.png", "-errors.png", "-learning-rate.png"}
    assert written == {".json", ".csv", ".md", *figures_drawn}
    loaded = load(tmp_path / "report", plan.name)
    assert loaded.table == collect(plan, plan.begun()).table
    assert {(run["row"], run["seed"]) for run in loaded.table} == {
        (run.row.name, run.seed) for run in plan.begun()
    }
    assert loaded.series["none_sgd 6"]["train_loss"] == [2.0, 1.0]


def test_the_runs_of_a_report_are_finished_runs_elsewhere(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    plan = Sweep(here, "reduced", "CIFAR10")
    curve = [dict.fromkeys(COLUMNS, 0.5) | {"orthogonality": None}]
    finished = {"test_loss": 1.0, "parameters": 9, "curve": curve}
    for name, error in (("none_sgd", 20.0), ("within_stiefel_sgd", None)):
        run = plan.run(ROWS[name], 0)
        run.folder.mkdir(parents=True)
        (run.folder / "result.json").write_text(json.dumps(entry(name, 0, error) | finished))
        (run.folder / "run.json").write_text(json.dumps({"arguments": run.arguments, "commit": "abc"}))
    shared = ["--preset", "reduced", "--out"]
    assert main(["report", *shared, str(here), "--to", str(tmp_path / "docs")]) == 0
    restore = ["restore", *shared, str(there), "--from", str(tmp_path / "docs")]
    assert main(restore) == 0
    assert main(restore) == 0
    assert capsys.readouterr().out.endswith(
        f"2 runs restored to {there}/reduced-cifar10\n0 runs restored to {there}/reduced-cifar10\n"
    )
    runs = [
        Sweep(there, "reduced", "CIFAR10").run(ROWS[name], 0) for name in ("none_sgd", "within_stiefel_sgd")
    ]
    assert [run.state() for run in runs] == ["finished", "diverged"]
    assert [run.claim() for run in runs] == [None, None]
    runs[0].check(runs[0].started)
    assert main(["report", *shared, str(there)]) == 0
    for file in ("reduced-cifar10.json", "reduced-cifar10.csv"):
        assert (there / "report" / file).read_bytes() == (tmp_path / "docs" / file).read_bytes()


def test_a_sweep_without_runs_has_tables_and_no_figures(tmp_path):
    assert "| SGD | none | – | 0 |" in tables.rows_table(made(), GROUPS["table"])
    assert figures.draw(made(), tmp_path) == []


# ------------------------------------------------------------------------------------------------- command and page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--rows", "within_stifel_sgd"],
            "no row matches 'within_stifel_sgd'; did you mean 'within_stiefel_sgd'?",
        ),
        (["--seeds", "0"], "must be a number above 0 or a list such as 0,4,7, got 0"),
        (["--seeds", "1,1"], "must be a number above 0 or a list such as 0,4,7, got 1,1"),
        (["restore"], "restore needs --from FOLDER"),
        (["restore", "--from", "nowhere"], "no paper-cifar10.json in nowhere"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--root", "nowhere"], "CIFAR10: nothing found in"),
        (
            ["--group", "own", "--rows", "none_sgd"],
            "no row of own matches none_sgd; leave out one of the two",
        ),
        (["--prest"], "unrecognized arguments: --prest"),
        (["report", "--page", "page.md"], "page.md has no marker <!-- paper-cifar10: table -->"),
    ],
)
def test_a_wrong_command_is_answered_in_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.md").write_text("no markers")
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_the_page_has_the_tables_of_the_results_beside_it():
    page = (DOCS / "table1.md").read_text(encoding="utf-8")
    results = [path.stem for path in sorted((DOCS / "table1").glob("*.json"))]
    assert "reduced-cifar10" in results
    for name in results:
        result = load(DOCS / "table1", name)
        assert tables.fill(page, result, "table1") == page
        assert all(f"<!-- {name}: {block} -->" in page for block in tables.blocks(result, "table1"))
        drawn = {path.name for path in (DOCS / "table1").glob(f"{name}-*.png")}
        assert drawn == {f"{name}-{figure}.png" for figure in figures.available(result)}


# -------------------------------------------------------------------------------------------------------- contrasts


def contrasted(*errors: dict[str, float]) -> Result:
    """A result of the preset `few`, one dictionary of test errors by row for each seed."""
    runs = [
        entry(chosen(row, FEW), seed, error, train_accuracy=0.9, val_accuracy=0.4)
        for seed, of_seed in enumerate(errors)
        for row, error in of_seed.items()
    ]
    return Result("few-cifar10", {"preset": "few", "data": "CIFAR10"}, table=runs)


def test_the_contrasts_are_differences_of_the_constrained_row_to_each_control():
    large, held, normed = CONTROLS
    result = contrasted(
        {CONSTRAINED: 60.0, large: 61.0, held: 60.5, normed: 59.0, "none_sgd": 62.0},
        {CONSTRAINED: 61.0, large: 62.2, held: 61.3, normed: 60.2},
        {CONSTRAINED: 60.5, large: 61.4},
    )
    lines = [line.split(" | ") for line in tables.contrasts_table(result).splitlines()]
    assert "p × 3 |" in lines[0][-1]
    by_row = {line[0].removeprefix("| "): line[1:] for line in lines[2:]}
    assert by_row["SGD, large start, none"][1:5] == ["61.53 ± 0.61", "10.00", "3", "-1.03 ± 0.15"]
    assert by_row["SGD, large start, none"][6] == "3 of 3"
    p = scipy.stats.ttest_rel([60, 61, 60.5], [61, 62.2, 61.4]).pvalue
    assert by_row["SGD, large start, none"][-1] == f"{3 * p:.3f} |"
    assert by_row["SGD, qk_norm, none"][6] == "0 of 2"
    assert by_row["SGD, none"][-1] == "reference |"


def test_rates_are_compared_on_held_out_images_of_one_seed():
    name = CONTROLS[0]
    runs = [
        entry(at_rate(name, factor), seed, 50.0, val_accuracy=accuracy)
        for factor, seed, accuracy in [(0.5, 1, 0.1), (0.5, 0, 0.3), (1.0, 0, 0.4), (2.0, 0, None)]
    ]
    result = Result("few-cifar10", {"preset": "few", "data": "CIFAR10"}, table=runs)
    line = next(line for line in tables.rates_table(result).splitlines() if ROWS[name].label in line)
    assert line.split(" | ")[2:6] == ["–", "70.00", "60.00", "–"]


def test_the_chosen_rates_are_the_best_of_the_results():
    results = [load(path.parent, path.stem) for path in (DOCS / "table1").glob("*.json")]
    rated = {name: r for r in results if "rates" in PRESETS[name := r.settings["preset"]].groups}
    assert "few" in rated
    for name, result in rated.items():
        assert PRESETS[name].rates == name
        # on `few` a quarter was tried after the rates had been chosen
        factors = [factor for factor in CONTRAST_FACTORS if name != "few" or factor >= 0.5]
        for row in CONTRASTED:
            errors = {factor: held_out_error(result, at_rate(row, factor)) for factor in factors}
            if errors := {factor: error for factor, error in errors.items() if error is not None}:
                assert chosen(row, PRESETS[name]) == at_rate(row, min(errors, key=errors.get))


def test_validation_does_not_make_runs_different(tmp_path):
    run = Sweep(tmp_path, "augmented", "CIFAR10").run(ROWS["none_sgd"], 0)
    text = " ".join(run.arguments)
    without = text.replace("--trainer.limit_val_batches 79", "--trainer.limit_val_batches 0")
    run.check({"arguments": without.replace("--trainer.check_val_every_n_epoch 60 ", "").split()})
    with pytest.raises(UsageError, match=r"other arguments \(--trainer.max_epochs 59"):
        run.check({"arguments": text.replace("max_epochs 60", "max_epochs 59").split()})


def test_the_contrasts_and_the_attention_in_them_are_drawn(tmp_path):
    result = contrasted({row: 60.0 + i for i, row in enumerate(CONTRASTED)}, dict.fromkeys(CONTRASTED, 61.0))
    columns = {"epoch": [1.0, 2.0], "train_loss": [2.0, 1.0], "test_accuracy": [float("nan"), 0.4]}
    columns |= {name: [1.0, 2.0] for name in ("logit_max", "entropy", "qk_max", "qk_min", "effective_rank")}
    result.series |= {f"{chosen(row, FEW)} {seed}": columns for row in CONTRASTED for seed in (0, 1)}
    assert figures.available(result) == ["attention"]
    assert [path.name for path in figures.draw(result, tmp_path)] == ["few-cifar10-attention.png"]
    axis = figures.contrasts([result]).axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    reference = "few, CIFAR10: SGD (2 seeds, reference)"
    assert labels[::-1] == [*(f"few, CIFAR10: {ROWS[n].method} (2 seeds)" for n in CONTROLS), reference]
    assert len(figures.attention(result).axes[0].lines) == 5


def test_the_heads_of_a_run_become_one_number_per_epoch(tmp_path):
    plan = Sweep(tmp_path, "few", "CIFAR10")
    run = plan.run(ROWS["none_sgd"], 0)
    heads = {"blocks.0.attn": {"qk_min": [0.2, 0.1], "qk_max": [1.0, 3.0], "entropy": [1.0, 2.0]}}
    heads["blocks.1.attn"] = {"qk_min": [0.4, 0.5], "qk_max": [2.0, 1.0], "entropy": [1.0, 0.0]}
    heads["blocks.1.attn"] |= {"logit_max": [None, 3.0]}  # not finite, as in runs that are about to diverge
    point = {"epoch": 1, "step": 5, "train_loss": 2.0, "train_accuracy": 0.3, "test_loss": None}
    point |= {"val_accuracy": 0.25, "test_accuracy": None, "attention": heads}
    run.folder.mkdir(parents=True)
    (run.folder / "result.json").write_text(json.dumps(entry("none_sgd", 0, 60.0) | {"curve": [point]}))
    result = collect(plan, [run])
    curve = result.series["none_sgd 0"]
    assert (curve["qk_min"], curve["qk_max"], curve["entropy"]) == ([0.1], [3.0], [1.0])
    assert "effective_rank" not in curve
    assert "logit_max" not in curve
    assert (result.table[0]["train_accuracy"], result.table[0]["val_accuracy"]) == (0.3, 0.25)


# ----------------------------------------------------------------------------------------------- remembered arguments


def test_status_and_report_are_about_the_sweep_that_was_started_last(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command_module, "run", lambda options, runs: 0)
    out = ["--out", str(tmp_path)]
    few = ["--preset", "few", "--seeds", "2", "--group", "rates", "--rows", "none_sgd*"]
    assert main(["run", *out, "--preset", "reduced"]) == 0
    assert main(["run", *out, *few, "--", "--trainer.max_epochs", "4"]) == 0
    done = Sweep(tmp_path, "few", "CIFAR10", ("--trainer.max_epochs", "4")).run(
        ROWS[chosen("none_sgd", FEW)], 0
    )
    done.folder.mkdir(parents=True)
    (done.folder / "run.json").write_text(json.dumps({"arguments": done.arguments, "commit": None}))
    (done.folder / "result.json").write_text(json.dumps(entry("none_sgd", 0, 60.0) | {"curve": []}))

    def status(*arguments):
        assert main(["status", *out, *arguments]) == 0
        return capsys.readouterr().out

    assert status() == "1 of 16 runs done, 0 running, 15 left\n"
    assert status("--group", "contrasts", "--seeds", "1") == "1 of 5 runs done, 0 running, 4 left\n"
    assert status("--preset", "reduced") == "0 of 48 runs done, 0 running, 48 left\n"
    assert main(["report", *out]) == 0
    assert f"| SGD, none | {rate_of('none_sgd', FEW):g} | 60.00 |" in capsys.readouterr().out
