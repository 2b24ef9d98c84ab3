"""Benchmark of the read side: a synthetic store of many finished runs is indexed, asked, compared and tabulated.

Times are medians, wall clock; the CPU time is beside them: on a machine that runs other work, trust it. A report is a
command in a process of its own; what it takes to report one run of the same store is subtracted.
"""

from __future__ import annotations

import subprocess
import tempfile
from functools import partial
from pathlib import Path

from cope_benchmarks.report import Measured, Rows
from cope_benchmarks.synthetic import RUNS_PER_RATE, command, environment, write_ablation, write_grid, write_store
from cope_benchmarks.timing import Run, Times, times
from cope_sweep.api.ablations import ListAblations
from cope_sweep.api.runs import ListRuns
from cope_sweep.api.sweeps import ListSweeps
from cope_sweep.config import expand, load_ablation
from cope_sweep.errors import UserError
from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.tables import table as result_table
from cope_sweep.store import Store
from cope_sweep.store.damage import find_differences

RUNS, SMALL, MEDIUM = 100_000, 1_000, 10_000
"""Runs of the store, of the smaller table, and of the smaller plan."""
REPETITIONS = 3


def measure(runs: int = RUNS) -> Measured:
    """Write a store of `runs` runs (a multiple of 100, at least 10,000) and measure it: about eight minutes for 100,000."""
    if runs < MEDIUM or runs % RUNS_PER_RATE:
        raise UserError(f"--runs {runs}: a multiple of {RUNS_PER_RATE}, and at least {MEDIUM:,}")
    rows = Rows("store")
    with tempfile.TemporaryDirectory(prefix="cope-sweep-bench-") as name:
        root = Path(name)
        files = {number: root / "ablations" / f"runs{number}.yaml" for number in (SMALL, MEDIUM, runs)}
        plans = {number: write_grid(root, path.stem, number) for number, path in files.items()}
        write_ablation(root, "one", seeds=[0])
        store = write_store(root, plans[runs])
        rebuilt = times({"": lambda: store.index}, 1, warm=False)[""]
        rows.add("rebuild the index", 1e3 * runs / rebuilt["median_ms"], "runs/s")

        queries = Queries(Store(root / "store"), AblationFiles(root / "ablations"))
        by_model = ListRuns(filter=("model.layers>=3", "model.position=cope"))
        by_metric, sorted_by_metric = ListRuns(filter=("in_dist/token_error<10",)), ListRuns(sort="in_dist/token_error")
        questions: dict[str, Run] = {
            "list of ablations": lambda: queries.ask(ListAblations()),
            "status of sweeps": lambda: queries.ask(ListSweeps()),
            "page, filtered by model": lambda: queries.ask(by_model),
            "page, filtered by metric": lambda: queries.ask(by_metric),
            "page, sorted by metric": lambda: queries.ask(sorted_by_metric),
            f"table of {SMALL:,} runs": lambda: result_table(plans[SMALL], store).to_markdown(),
        }
        _add(rows, times(questions, REPETITIONS))

        sizes = {f"{MEDIUM:,}": files[MEDIUM], "all": files[runs]}
        plan = {
            f"plan of {size} runs: expand, hash, compare": partial(_compare, at, store) for size, at in sizes.items()
        }
        _add(rows, times(plan, 1, warm=False))

        start, small, whole = ("one", files[SMALL].stem, files[runs].stem)
        taken = times({each: partial(_report, root, each) for each in (start, small, whole)}, REPETITIONS, warm=False)
        beyond = {name: {key: taken[name][key] - taken[start][key] for key in taken[name]} for name in (small, whole)}
        _add(rows, {
            f"report of {SMALL:,} runs, beyond its start": beyond[small],
            "report of all runs, beyond its start": beyond[whole],
            "start of a report": taken[start],
        })  # fmt: skip
        if difference := next(find_differences(store), None):
            raise RuntimeError(f"the store is not what its index says: {difference}")
    return rows.measured(runs=runs)


def _add(rows: Rows, taken: dict[str, Times]) -> None:
    for what, each in taken.items():
        rows.add(what, each["median_ms"] / 1e3, "s", **{"CPU s": round(each["cpu_ms"] / 1e3, 4)})


def _compare(path: Path, store: Store) -> None:
    store.index.statuses([run.run_id for run in expand(load_ablation(path)).runs])


def _report(root: Path, name: str) -> None:
    """`cope-sweep table`, in a process of its own."""
    subprocess.run(command("table", name), check=True, capture_output=True, env=environment(root))
