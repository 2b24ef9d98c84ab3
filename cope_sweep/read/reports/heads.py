"""How well attention heads mark what the figures of an ablation claim (`figures.marks`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import pandas as pd

from cope_sweep.config import Plan
from cope_sweep.errors import UserError
from cope_sweep.read.figures.available import declared_figures
from cope_sweep.read.figures.kinds.maps import Maps
from cope_sweep.read.numbers import MISSING, fixed, interval_text
from cope_sweep.read.tables import Results, summarise
from cope_sweep.read.tables.controls import HEAD_COLUMNS, controls_of_figure
from cope_sweep.read.tables.layout import ColumnHeader, Layout, TextCell

MOST_HEADS = 16
"""If a model has more heads than this, only the chosen ones are listed."""
AUC_NOTES = {
    "gates": "AUC: the probability that a marked token has a larger mean gate than an unmarked one. ",
    "position_attention": "AUC: the probability that a key after the last marked token gets more position-only "
    "attention than an earlier key at the same distance. ",
}
"""Quantity that a figure shows → what its AUC means."""
CHOSEN_NOTE = (
    "In each seed, the head is chosen on separate sequences, because heads of different seeds do not correspond. "
    "Controls: the same measure for other tokens (mean ± standard deviation), and the percentile of the mark among "
    "them; – for seeds whose controls were not measured. Untrained: the same measure with the initial weights. In "
    "brackets: the 95 % interval of the mean over seeds."
)


def measured_heads(results: Results) -> pd.DataFrame:
    """How well the heads of finished runs mark what figures claim; the frame of `figures.marks.measure_run`.

    A folder of results has these measures. The heads of other stores are measured now; a run whose checkpoint or text
    cannot be read is left out.
    """
    if (kept := kept_heads(results)) is not None:
        return kept
    parts: list[pd.DataFrame] = []
    for run_id, figures in claimed_figures_by_run(results).items():
        with suppress(UserError):  # `Evidence.missing` counts it
            checkpoint = results.store.run(run_id).fetch_checkpoint()
            from cope_sweep.read.figures.marks import measure_run  # torch

            parts.append(measure_run(checkpoint, figures))
    return (
        pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(HEAD_COLUMNS)).astype(HEAD_COLUMNS)
    )


def kept_heads(results: Results) -> pd.DataFrame | None:
    """The measures of finished runs that a folder of results has; None: it has none, or is another store."""
    kept = results.store.kept(results.plan)
    if kept is None or kept.heads is None:
        return None
    frame: pd.DataFrame = kept.heads.to_pandas()
    finished = {run_id for run_id, record in results.records.items() if record.status == "finished"}
    return frame[frame["run_id"].isin(finished)].reset_index(drop=True)


def claimed_figures(plan: Plan) -> dict[str, Maps]:
    """The figures of a plan that claim something about the heads of its rows, by name."""
    figures = {declared.name: declared.figure for declared in declared_figures(plan)}
    return {name: figure for name, figure in figures.items() if isinstance(figure, Maps) and figure.claim}


def claimed_figures_by_run(results: Results) -> dict[str, dict[str, Maps]]:
    """Id of a finished run → the figures, by name, that claim something about its heads."""
    rows = {row.name: row for row in results.plan.rows}
    rows_of_figure = {declared.name: declared.rows for declared in declared_figures(results.plan)}
    figures_by_run: dict[str, dict[str, Maps]] = {}
    for name, figure in claimed_figures(results.plan).items():
        for run in (run for row in rows_of_figure[name] for run in rows[row].runs):
            if results.records[run.run_id].status == "finished":
                figures_by_run.setdefault(run.run_id, {})[name] = figure
    return figures_by_run


def heads_layout(figures: Mapping[str, Maps], heads: pd.DataFrame) -> Layout:
    """The AUC by head and seed, with mean and interval; only the chosen heads if there are more than MOST_HEADS."""
    seeds = sorted(set(heads["seed"]))
    lines = []
    for name, figure in figures.items():
        of_figure = heads[heads["figure"] == name]
        of_mark = of_figure[of_figure["control"] == ""]
        kinds = [("chosen head", of_mark[of_mark["chosen"]], "auc")]
        kinds.append(("chosen head, untrained", of_mark[of_mark["initial_chosen"]], "initial_auc"))
        by_head = list(of_mark.groupby(["layer", "head"]))
        if len(by_head) <= MOST_HEADS:
            kinds += [(f"layer {layer} · head {head}", measures, "auc") for (layer, head), measures in by_head]
        for place, (label, measures, column) in enumerate(kinds):
            auc_by_seed = dict(zip(measures["seed"], measures[column], strict=True))
            texts = [fixed(auc_by_seed.get(seed), 2) for seed in seeds]
            summary = summarise(auc_by_seed.values())
            mean = fixed(summary.mean, 2)
            if summary.n > 1:
                mean = interval_text(summary.mean, summary.ci_low, summary.ci_high)
            lines.append((figure.mark or "", label, *texts, mean))
            if place == 0:
                lines += [(figure.mark or "", *texts) for texts in _lines_of_controls(of_figure, seeds)]
    headers = [ColumnHeader("mark", numeric=False), ColumnHeader("head", numeric=False)]
    headers += [ColumnHeader(f"seed {seed}") for seed in seeds] + [ColumnHeader("mean")]
    shown_quantities = dict.fromkeys(figure.show for figure in figures.values())
    note = "".join(AUC_NOTES[quantity] for quantity in shown_quantities)
    return Layout(tuple(headers), tuple(tuple(map(TextCell, line)) for line in lines), note + CHOSEN_NOTE)


def _lines_of_controls(heads: pd.DataFrame, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Two lines for each kind of controls: their AUC, and the percentile of the mark; by seed, and the mean of all."""
    for controls in controls_of_figure(heads):
        name = f"{controls.number} {controls.kind}"
        summaries = [controls.summary(seed) for seed in seeds]
        texts = [f"{fixed(each.mean, 2)} ± {fixed(each.std, 2)}" if each.n else MISSING for each in summaries]
        yield name, *texts, fixed(summarise(each.mean for each in summaries).mean, 2)
        places = [controls.percentile_by_seed.get(seed) for seed in seeds]
        mean = summarise(place for place in places if place is not None).mean
        yield f"percentile among {controls.kind}", *(fixed(place, 0) for place in places), fixed(mean, 0)
