"""Functions for notebooks and scripts.

    from cope_sweep import notebook

    ablation = notebook.load_ablation("quickstart")
    notebook.run(ablation)                          # trains the runs that are not finished, in this process
    notebook.table(ablation, compare="CoPE")        # draws itself as the last expression of a notebook's cell
    notebook.frame(ablation)                        # pandas: one line per run
    notebook.curves(ablation)                       # pandas: one line per logged value
    notebook.figure(ablation, "summary")
    notebook.predictor(ablation, row="CoPE").perplexity(…)
    notebook.probe(ablation, row="CoPE")            # heatmaps of gates, positions and attention

Each takes an ablation, its name, or the path of its file, and `store`: a folder or URL, by default ./store. Errors that
you can correct are `cope_sweep.errors.UserError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from cope_sweep.api.figures import GetFigure
from cope_sweep.api.question import checked
from cope_sweep.config import LoadedAblation, Plan, expand, with_overrides
from cope_sweep.config import load_ablation as _load_file
from cope_sweep.config.loading import find_ablation
from cope_sweep.config.source import ablations_folder
from cope_sweep.read.figures.available import draw_figure
from cope_sweep.read.queries import finished_run, recorded_plan
from cope_sweep.read.tables import Table, read_results
from cope_sweep.store import Store, open_store
from cope_sweep.sweep.local_executor import run_local
from cope_sweep.sweep.sweep import Sweep, SweepOutcome

if TYPE_CHECKING:
    from cope_sweep.inference import Predictor, TokenIds
    from cope_sweep.inference.probe import Probe
    from cope_sweep.read.figures.figure import Figure

STORE = "store"

AnyAblation = LoadedAblation | Plan | str | Path
AnyStore = Store | str | Path


def load_ablation(
    name: str | Path,
    *,
    scale: str | None = None,
    set: str | Sequence[str] = (),  # noqa: A002 - named after `--set`
) -> LoadedAblation:
    """An ablation file, at a scale, with the values of `set`: `"train.steps=100"`, or a list of such texts.

    `name` is the path of a file, or the name of an ablation in ./ablations; if that folder does not exist, of an
    installed ablation. Raises UserError.
    """
    path = find_ablation(name, ablations_folder(), "give the path of its file")
    return with_overrides(_load_file(path), scale=scale, assignments=[set] if isinstance(set, str) else list(set))


def plan(ablation: AnyAblation) -> Plan:
    """The runs of an ablation, in rows. Raises UserError."""
    if isinstance(ablation, Plan):
        return ablation
    return expand(ablation if isinstance(ablation, LoadedAblation) else load_ablation(ablation))


def run(ablation: AnyAblation, store: AnyStore = STORE) -> SweepOutcome:
    """Train the runs that are not finished, one after another in this process, and record them in the store.

    Ctrl-C, or a kernel's interrupt, stops it; the next call continues. For several workers, machines and MLflow use
    `cope-sweep run`. Raises UserError.
    """
    planned, opened = _recorded(ablation, store, create=True)
    # Before the sweep, so that a text is tokenised, and its errors are raised, before a run starts.
    for task in {run.task for run in planned.runs}:
        task.prepare()
    return Sweep(planned, opened, run_local, executor_name="local").run()


def table(ablation: AnyAblation, store: AnyStore = STORE, *, compare: str | None = None) -> Table:
    """The table of an ablation from its finished runs; notebooks show it as HTML.

    `compare`: `paper`, the name of a row, or `model.position=CoPE`, see `read.tables.comparisons`. Raises UserError.
    """
    result_table = Table.of(read_results(*_recorded(ablation, store)), compare)
    result_table.check()
    return result_table


def frame(ablation: AnyAblation, store: AnyStore = STORE) -> pd.DataFrame:
    """One line per run, with its labels, metrics and facts: `Results.frame`. Raises UserError."""
    return read_results(*_recorded(ablation, store)).frame


def curves(ablation: AnyAblation, store: AnyStore = STORE) -> pd.DataFrame:
    """The learning curves: run_id, row, seed, step, metric, value, status, time_s. Raises UserError."""
    return read_results(*_recorded(ablation, store)).curves


def figure(
    ablation: AnyAblation, kind: str = "curves", store: AnyStore = STORE, *, style: str | None = None, **options: Any
) -> Figure:
    """A figure; notebooks show it, and `.write("curves.svg")` saves it.

    `kind` is one of `cope_sweep.read.figures.FIGURES`, or the name of a figure that the ablation declares: `maps-2`.
    `options` are the same as for `cope-sweep figure`: metrics and rows (lists of names), x, panels, log, size
    (`3.25x2.5`) and style. Raises UserError.
    """
    fields = {{"metrics": "metric", "rows": "row"}.get(name, name): value for name, value in options.items()}
    results = read_results(*_recorded(ablation, store))
    return draw_figure(results, checked(GetFigure, name=results.plan.name, figure=kind, **fields), style)


def predictor(
    ablation: AnyAblation, store: AnyStore = STORE, *, row: str | None = None, seed: int | None = None
) -> Predictor:
    """The trained model of a run, by default of the first row and its first finished seed.

    Raises UserError if that run is not finished.
    """
    from cope_sweep.inference import Predictor

    planned, opened = _recorded(ablation, store)
    rows = [first.name for first in planned.rows[:1]] if row is None else [row]
    return Predictor.load(opened.run(finished_run(planned, opened, rows, seed).run_id).fetch_checkpoint())


def probe(
    ablation: AnyAblation,
    store: AnyStore = STORE,
    *,
    row: str | None = None,
    seed: int | None = None,
    tokens: TokenIds | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Probe:
    """Gates, positions and attention of a trained model's heads; notebooks show them as heatmaps.

    `row` and `seed` are as in `predictor`. `tokens` are token ids; by default the first sequence of the task's first
    test set. `layers` and `heads` are numbers from 0; None: all. Raises UserError.
    """
    from cope_sweep.inference import probe as probing
    from cope_sweep.read.figures.probed import DrawnProbe

    model = predictor(ablation, store, row=row, seed=seed)
    task = model.run.task
    found = probing.probe(model, probing.split_sequences(task, None, 0)[0] if tokens is None else tokens, layers, heads)
    marks = probing.token_marks(model, found.tokens_T)
    return DrawnProbe(
        found.tokens_T,
        found.layers,
        labels=probing.token_labels(model, found.tokens_T),
        marks=marks,
        statistics=probing.head_statistics(model, [found.tokens_T], [marks], layers=layers, heads=heads),
        run_id=model.run.run_id,
    )


def _recorded(ablation: AnyAblation, store: AnyStore, *, create: bool = False) -> tuple[Plan, Store]:
    """The plan with the runs that its search has suggested, and the store."""
    opened = store if isinstance(store, Store) else open_store(store, create=create)
    return recorded_plan(plan(ablation), opened), opened
