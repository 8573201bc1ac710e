"""The paper's Table 1 as one sweep: a run for every row and seed, resumable, shared by any number of processes.

    python -m ortho_vit.experiments.table1 run     --preset reduced --root DATA --workers 2
    python -m ortho_vit.experiments.table1 status  --preset reduced [--group all]
    python -m ortho_vit.experiments.table1 report  --preset reduced [--to FOLDER]
    python -m ortho_vit.experiments.table1 restore --preset reduced --from FOLDER

`run` may be stopped, killed and started again at any time, and in several places at once.  What follows `--` goes to
every run, after the preset: -- --trainer.max_epochs 1 --data.limit 256.  `restore` makes the runs of a report finished
runs here, so that a sweep goes on where another machine's ended.
"""

import argparse
import fcntl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import ortho_vit.data
from ortho_vit.errors import UsageError
from ortho_vit.experiments.table1 import figures, tables
from ortho_vit.experiments.table1.progress import Display, overview
from ortho_vit.experiments.table1.records import collect, load, restore
from ortho_vit.experiments.table1.rows import DATA, GROUPS, PRESETS, choose, select
from ortho_vit.experiments.table1.runs import REPOSITORY, Run, Sweep
from ortho_vit.experiments.table1.sweep import HOPELESS, sweep, visible_gpus

MODULE = "python -m ortho_vit.experiments.table1"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {MODULE} --help shows them all")


def make_parser() -> Parser:
    parser = Parser(prog=MODULE, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", nargs="?", choices=("run", "status", "report", "restore"), default="run")
    add("--preset", choices=tuple(PRESETS), default="paper", help="its own size, or one for two cores")
    add("--data", choices=DATA, default="CIFAR10")
    add("--root", type=Path, default=Path("data"), help="where the data lies (default data/)")
    add("--download", action="store_true", help="fetch the data into --root if it is not there")
    add("--seeds", type=_seeds, help="how many, or which: 3, or 0,4,7, or 4, (default 5, reduced 3)")
    add(
        "--group",
        action="append",
        choices=(*GROUPS, "all"),
        default=[],
        help="may be repeated; default table",
    )
    add("--rows", nargs="+", default=[], metavar="PATTERN", help="names of rows, such as 'within_*'")
    add("--out", type=Path, default=Path("runs/table1"), help="folder of the runs (default runs/table1)")
    add("--workers", type=int, help="runs at a time (default: one a GPU, otherwise one)")
    add("--to", type=Path, help="report: folder for tables and figures (default OUT/report)")
    add("--from", type=Path, dest="source", help="restore: folder of a report")
    add("--page", type=Path, help="report: a page whose marked tables are to be replaced")
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
    """The exit code: 0 if all that was tried has a result, 1 if something failed, 130 if it was stopped."""
    workers = options.workers if options.workers is not None else len(visible_gpus()) or 1
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, got {workers}")
    check_data(options)
    display = Display(runs)
    outcome = sweep(runs, workers, display.say, display.show)
    display.say("\n".join(overview(runs)))
    if outcome.stopped:
        display.say("stopped; the same command continues where it was")
        return 130
    if outcome.hopeless:
        display.say(f"gave up: {HOPELESS} runs failed and none succeeded")
    for name, error in outcome.failed.items():
        print(f"error: {name}: {error}", file=sys.stderr)
    return 1 if outcome.failed else 0


def check_data(options: argparse.Namespace) -> None:
    """Fetch the data if that is asked for, once for all runs; raise if it is not there or damaged."""
    data = getattr(ortho_vit.data, options.data)(options.root, download=options.download)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "data.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data.prepare_data()
    data.setup()


def report(options: argparse.Namespace, plan: Sweep) -> int:
    names = {name for group in select(options.group or ["all"], options.rows).values() for name in group}
    runs = [
        run for run in plan.begun() if run.row.name in names and run.seed in (options.seeds or [run.seed])
    ]
    folder = options.to or options.out / "report"
    collect(plan, runs).save(folder)
    result = load(folder, plan.name)
    for path in figures.draw(result, folder):
        print(path)
    tables.write_csv(result, folder / f"{result.name}-rows.csv")
    blocks = tables.blocks(result, ".")
    if options.page:
        tables.update(options.page, result, folder)
    else:
        text = "\n\n".join(f"## {name}\n\n{block}" for name, block in blocks.items())
        (folder / f"{result.name}.md").write_text(text + "\n", encoding="utf-8")
    print(blocks["table"])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        options = make_parser().parse_args(arguments[:split])
        if not (REPOSITORY / "configs" / "paper").is_dir():
            raise UsageError(f"no configs/paper in {REPOSITORY}; run this from a clone of the repository")
        machine = ("--data.root", str(options.root.resolve()))
        plan = Sweep(options.out, options.preset, options.data, tuple(arguments[split + 1 :]), machine)
        if options.command == "restore":
            if options.source is None:
                raise UsageError("restore needs --from FOLDER, which `report --to FOLDER` has written")
            print(f"{restore(plan, options.source)} runs restored to {plan.out / plan.name}")
            return 0
        plan.check()
        if options.command == "report":
            return report(options, plan)
        seeds = options.seeds or tuple(range(PRESETS[options.preset].seeds))
        runs = [plan.run(row, seed) for row, seed in choose(options.group, options.rows, seeds)]
        if options.command == "run":
            return run(options, runs)
        print("\n".join(overview(runs)))
    except (UsageError, ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
