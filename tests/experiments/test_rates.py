"""The sweep over learning rates, in small."""

import json
import math
from pathlib import Path

from ortho_vit.experiments import rates
from ortho_vit.experiments.finetuning import digits_task
from ortho_vit.experiments.rates import error_after, main, show
from ortho_vit.experiments.result import markdown


def test_a_run_is_a_function_of_its_seed_and_stiefel_lr_is_a_rate_of_its_own():
    run = {"steps": 8, "seed": 0}
    task = digits_task()
    first = error_after(task, "within", 0.1, None, **run)
    assert error_after(task, "within", 0.1, 0.1, **run) == first  # None is the rate of all
    assert error_after(task, "within", 0.1, 2.0, **run) != first
    assert error_after(task, "across", 0.1, None, **run) != first


def test_a_run_that_diverges_has_no_error():
    assert math.isnan(error_after(digits_task(), "within", 1e30, None, steps=12, seed=0))
    assert show([1.0, math.nan, 2.0]) == "1 of 3 diverged"
    assert show([1.0, 2.0, 3.0]) == "2.0 ± 1.0"


def test_the_command_writes_table_numbers_and_figure(tmp_path, capsys):
    main(["--quick", "--output", str(tmp_path)])
    saved = json.loads((tmp_path / "rates.json").read_text())
    assert markdown(saved["table"]) in capsys.readouterr().out
    assert [(row["varied"], row["constraint"]) for row in saved["table"]] == [
        (kind, constraint) for kind in rates.SWEEPS for constraint in rates.CONSTRAINTS
    ]
    (tmp_path / "rates.png").unlink()
    main(["--redraw", "--output", str(tmp_path)])
    assert (tmp_path / "rates.png").stat().st_size > 1000


def test_the_page_has_the_table_of_the_results_beside_it():
    docs = Path(__file__).parents[2] / "docs"
    saved = json.loads((docs / "experiments" / "rates.json").read_text(encoding="utf-8"))
    page = (docs / "choosing.md").read_text(encoding="utf-8")
    assert markdown(saved["table"]) in page
    assert "](experiments/rates.png)" in page
