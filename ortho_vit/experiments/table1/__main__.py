"""The paper's Table 1 as one sweep: one run per row and seed, resumable, shared by any number of processes.

    python -m ortho_vit.experiments.table1 run     --preset reduced --root DATA --workers 2
    python -m ortho_vit.experiments.table1 status
    python -m ortho_vit.experiments.table1 report  [--to FOLDER]
    python -m ortho_vit.experiments.table1 restore --preset reduced --from FOLDER

`run` may be stopped, killed and started again at any time, and on several machines at once.  Arguments after `--` are
passed to every run, after those of the preset: -- --trainer.max_epochs 1 --data.limit 256.  `status` and `report` refer to
the sweep that was started last, with its arguments, unless others are given.  `restore` reads the runs of a report as
finished runs, so that a sweep continues where another machine's ended.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ortho_vit.errors import UsageError
from ortho_vit.experiments.figure import save_figure
from ortho_vit.experiments.result import load
from ortho_vit.experiments.table1 import figures, tables
from ortho_vit.experiments.table1.compare import paired_contrast
from ortho_vit.experiments.table1.presets import PRESETS
from ortho_vit.experiments.table1.progress import Display, overview
from ortho_vit.experiments.table1.records import collect, restore, sweeps_in
from ortho_vit.experiments.table1.rows import CONTROLS, DATA, GROUPS, choose, select
from ortho_vit.experiments.table1.runs import Run, Sweep
from ortho_vit.experiments.table1.sweep import HOPELESS, sweep, visible_gpus
from ortho_vit.files import lock, write_json

MODULE = "python -m ortho_vit.experiments.table1"
STATISTICS = "--trainer.callbacks+=ortho_vit.training.attention_statistics.AttentionStatistics"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {MODULE} --help shows them all")


def make_parser() -> Parser:
    parser = Parser(prog=MODULE, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", nargs="?", choices=("run", "status", "report", "restore"), default="run")
    add("--preset", choices=tuple(PRESETS), help="the size of the experiment (run: default paper)")
    add("--data", choices=DATA, help="run: default CIFAR10")
    add("--root", type=Path, default=Path("data"), help="folder of the data (default data/)")
    add("--download", action="store_true", help="download the data into --root if it is missing")
    add(
        "--seeds",
        type=_seeds,
        help="a number of seeds, or a list: 3, or 0,4,7, or 4, (default: the preset's)",
    )
    group = "group of rows; may be repeated (default: the preset's first, table or contrasts)"
    add("--group", action="append", choices=(*GROUPS, "all"), default=[], help=group)
    add("--rows", nargs="+", default=[], metavar="PATTERN", help="names of rows, such as 'within_*'")
    add("--out", type=Path, default=Path("runs/table1"), help="folder of the runs (default runs/table1)")
    add("--workers", type=int, help="runs at a time (default: one per GPU, otherwise one)")
    add("--to", type=Path, help="report: folder for tables and figures (default OUT/report)")
    add("--from", type=Path, dest="source", help="restore: folder of a report")
    add("--page", type=Path, help="report: a Markdown page whose marked tables are replaced")
    return parser


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.removesuffix(",").split(","))
    except ValueError:
        seeds = ()
    if seeds and "," not in text:
        seeds = tuple(range(seeds[0]))
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"must be a number above 0 or a list such as 0,4,7, got {text}")
    return seeds


def run(options: argparse.Namespace, runs: Sequence[Run]) -> int:
    """Run the sweep; the exit code is 0 if every run has a result, 1 if one failed, 130 if the sweep was stopped."""
    workers = options.workers if options.workers is not None else len(visible_gpus()) or 1
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, got {workers}")
    check_data(options)
    display = Display(runs)
    outcome = sweep(runs, workers, display.say, display.show)
    display.say(*overview(runs))
    if outcome.stopped:
        display.say("stopped; the same command continues where it was")
        return 130
    if outcome.hopeless:
        display.say(f"gave up: {HOPELESS} runs failed and none succeeded")
    for name, error in outcome.failed.items():
        print(f"error: {name}: {error}", file=sys.stderr)
    return 1 if outcome.failed else 0


def check_data(options: argparse.Namespace) -> None:
    """Download the data on request, once for all runs; raise if it is missing or damaged."""
    import ortho_vit.data  # imports Lightning, which `status` and `report` do not need

    data = getattr(ortho_vit.data, options.data)(options.root, download=options.download)
    options.out.mkdir(parents=True, exist_ok=True)
    with lock(options.out / "data.lock", wait=True):
        data.prepare_data()
    data.setup()


def report(options: argparse.Namespace, plan: Sweep) -> int:
    """Write the finished runs that were asked for as JSON and CSV, draw the figures, write the tables."""
    preset, folder = PRESETS[options.preset], options.to or options.out / "report"
    selected = select(preset, options.group or preset.groups, options.rows)
    names = {name for group in selected.values() for name in group}
    runs = [run for run in plan.begun() if run.row.name in names]
    collect(plan, [run for run in runs if not options.seeds or run.seed in options.seeds]).save(folder)
    result = load(folder, plan.name)
    for path in figures.draw(result, folder):
        print(path)
    reported = [load(folder, name) for name in sweeps_in(folder)]
    regimes = [r for r in reported if "contrasts" in PRESETS[r.settings["preset"]].groups]
    if any(paired_contrast(regime, control).n for regime in regimes for control in CONTROLS):
        save_figure(figures.contrasts(regimes), folder / "contrasts.png")
    blocks = tables.blocks(result, ".")
    if options.page:
        tables.update(options.page, result, folder)
    else:
        text = "\n\n".join(f"## {name}\n\n{block}" for name, block in blocks.items())
        (folder / f"{result.name}.md").write_text(text + "\n", encoding="utf-8")
    print(next(text for name, text in blocks.items() if name != "summary"))
    return 0


REMEMBERED = ("preset", "data", "seeds", "group", "rows")


def remember(options: argparse.Namespace, plan: Sweep) -> None:
    """Write the options of a sweep into its folder, for `status` and `report`."""
    kept = {name: getattr(options, name) for name in REMEMBERED} | {"overrides": plan.overrides}
    write_json(plan.out / plan.name / "sweep.json", kept)


def recall(options: argparse.Namespace) -> tuple[str, ...]:
    """Fill in the options from the latest sweep that agrees with them, and return what followed its `--`."""
    for path in sorted(options.out.glob("*/sweep.json"), key=lambda p: p.stat().st_mtime, reverse=True):
        last = json.loads(path.read_text(encoding="utf-8"))
        if options.preset in (None, last["preset"]) and options.data in (None, last["data"]):
            asked_for = options.seeds or options.group or options.rows
            for name in ("preset", "data") if asked_for or options.command == "report" else REMEMBERED:
                setattr(options, name, last[name])
            return tuple(last["overrides"])
    return ()


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    overrides = tuple(arguments[split + 1 :])
    try:
        options = make_parser().parse_args(arguments[:split])
        if options.command in ("status", "report"):
            recalled = recall(options)
            overrides = overrides or recalled
        options.preset, options.data = options.preset or "paper", options.data or DATA[0]
        machine = ("--data.root", str(options.root.resolve()), STATISTICS)
        plan = Sweep(options.out, options.preset, options.data, overrides, machine)
        if options.command == "restore":
            if options.source is None:
                raise UsageError("restore needs --from FOLDER, which `report --to FOLDER` has written")
            print(f"{restore(plan, options.source)} runs restored to {plan.out / plan.name}")
            return 0
        plan.check()
        if options.command == "report":
            return report(options, plan)
        preset = PRESETS[options.preset]
        seeds = options.seeds or tuple(range(preset.seeds))
        runs = [plan.run(row, seed) for row, seed in choose(preset, options.group, options.rows, seeds)]
        if options.command == "run":
            remember(options, plan)
            return run(options, runs)
        print("\n".join(overview(runs)))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
