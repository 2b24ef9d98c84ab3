"""Whether heads mark tokens better than they mark other tokens: the comparison with controls, and the verdict.

In each seed, the AUC of the head chosen for a claim is ranked among the AUCs of its controls, which are the same
procedure for tokens that the claim does not name (`figures.marks`). A control is the same tokens in all seeds, so
the ranks of each control add up over the seeds as those of the mark do. p is the share of the mark and its controls
whose sum of ranks is at least that of the mark, or at most, whichever is smaller, and doubled:

    p = min(1, 2 · min(1 + #{controls: sum ≥ the mark's}, 1 + #{controls: sum ≤ the mark's}) / (1 + #controls))

This is the exact test of the hypothesis that the mark is one like any of the controls (a permutation of the marks).
It does not need seeds to be independent, as a combination of one p per seed does: seeds share their texts, and a token
that all seeds mark well is no news if many others are like it. (In `gates.small`, Fisher's combination of one p per
seed is at most 0.05 for 9 of the 94 controls of line breaks, twice as many as it should be.) With fewer than
LEAST_CONTROLS controls p cannot be 0.05. Where there are controls of two kinds, both have to agree, and the larger p
counts. The claim is

    shown           if p is at most 0.05, the mark ranks above its controls, and its AUC is above MARKS_FROM (by the
                    95 % interval over seeds, Student's): heads tell these tokens from all others
    shown in part   if p is at most 0.05 and the mark ranks above its controls, but its AUC is lower: heads respond to
                    these tokens more than to others, and respond to others, too
    opposite        if p is at most 0.05, and the mark ranks below its controls
    not shown       if p is larger
    too few seeds   if fewer than LEAST_SEEDS seeds are measured
    not testable    if fewer than LEAST_SEEDS seeds have controls, or there are fewer than LEAST_CONTROLS
    not trained     if no seed is measured

Only seeds that have controls are judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cope_sweep.api.ablations import ClaimVerdict
from cope_sweep.api.figures import Show
from cope_sweep.read.tables.stats import SIGNIFICANT_P, Summary, summarise

if TYPE_CHECKING:
    import pandas as pd

HEAD_COLUMNS = {
    "figure": "str", "run_id": "str", "seed": "int64", "layer": "int64", "head": "int64", "chosen": "bool",
    "auc": "float64", "on": "float64", "off": "float64", "with_label": "int64", "without": "int64",
    "initial_chosen": "bool", "initial_auc": "float64", "control": "str", "control_id": "int64", "control_label": "str",
}  # fmt: skip
"""Columns of the frame of `figures.marks.measure_run`."""
TYPES, SHIFTED = "other token types", "shifted marks"
"""The kinds of controls."""
MARKS_FROM = 0.9
"""Heads tell marked tokens from all others if their AUC is at least this."""
LEAST_SEEDS = 3
"""With fewer seeds there is no verdict on heads."""
LEAST_CONTROLS = 39
"""With fewer controls, p is larger than 0.05."""


def percentile(value: float, controls: Sequence[float]) -> float:
    """The percentage of controls that are smaller than a value; equal ones count one half."""
    array = np.asarray(controls, dtype=np.float64)
    return float(100 * ((array < value).mean() + (array == value).mean() / 2))


@dataclass(frozen=True)
class Controls:
    """The controls of one kind, and the AUC of the mark among them."""

    kind: str
    auc_by_seed: dict[int, list[float]]
    """Seed → the AUC of each control that all seeds have."""
    percentile_by_seed: dict[int, float]
    """Seed → the percentile of the mark."""
    p: float
    is_above: bool
    """Whether the mark ranks above the middle of its controls."""

    @property
    def number(self) -> int:
        """The number of controls in each seed."""
        return len(next(iter(self.auc_by_seed.values()), ()))

    def summary(self, seed: int) -> Summary:
        """Mean and standard deviation of the controls in a seed."""
        return summarise(self.auc_by_seed.get(seed, ()))


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim about heads."""

    verdict: ClaimVerdict
    reason: str
    """Why there is no test; empty with one."""
    p: float | None
    seeds: tuple[int, ...]
    """The seeds that the verdict is about."""
    auc: Summary
    """Of the chosen heads, over these seeds."""
    controls: tuple[Controls, ...]
    """Those of each kind."""


def kinds_of_controls(show: Show) -> tuple[str, ...]:
    """The kinds of controls that a claim about this quantity needs."""
    return (TYPES, SHIFTED) if show == "position_attention" else (TYPES,)


def controls_of_figure(heads: pd.DataFrame) -> tuple[Controls, ...]:
    """The controls of each kind, given the lines of one figure. Only for seeds that have them."""
    auc_of_mark = heads[heads["chosen"]].set_index("seed")["auc"].dropna()
    found = []
    for kind, lines in heads[heads["control"] != ""].groupby("control", sort=False):
        table = lines.pivot_table(index="seed", columns="control_id", values="auc")
        table = table[table.index.isin(auc_of_mark.index)].dropna(axis="columns")
        if table.empty:
            continue
        auc = auc_of_mark[table.index].to_numpy()
        values_SC = table.to_numpy()
        with_mark = table.assign(mark=auc)
        sums = with_mark.rank(axis="columns").sum(axis="index").to_numpy()  # halves of integers, so that ties are exact
        of_mark, of_controls = sums[-1], sums[:-1]
        above = int((of_controls >= of_mark).sum())
        below = int((of_controls <= of_mark).sum())
        found.append(
            Controls(
                kind=str(kind),
                auc_by_seed={int(seed): values_SC[place].tolist() for place, seed in enumerate(table.index)},
                percentile_by_seed={
                    int(seed): percentile(float(auc[place]), values_SC[place]) for place, seed in enumerate(table.index)
                },
                p=min(1.0, 2 * (1 + min(above, below)) / (1 + len(of_controls))),
                is_above=above < below,
            )
        )
    return tuple(found)


def judge(heads: pd.DataFrame, kinds: Sequence[str]) -> Judgement:
    """The verdict on a claim.

    Args:
        heads: The lines of its figure.
        kinds: The kinds of controls that it needs.
    """
    chosen = heads[heads["chosen"]].set_index("seed")["auc"].dropna()
    controls = controls_of_figure(heads)
    by_kind = {each.kind: each for each in controls}
    missing = [kind for kind in kinds if kind not in by_kind]
    judged = chosen
    if controls and not missing:
        judged = chosen[chosen.index.isin(set.intersection(*(set(by_kind[kind].auc_by_seed) for kind in kinds)))]
    seeds, auc = tuple(int(seed) for seed in judged.index), summarise(judged)

    def untested(verdict: ClaimVerdict, reason: str) -> Judgement:
        return Judgement(verdict, reason, None, seeds, auc, controls)

    if chosen.empty:
        return untested("not trained", "")
    if len(chosen) < LEAST_SEEDS:
        return untested("too few seeds", f"{len(chosen)} of at least {LEAST_SEEDS} seeds are measured")
    if missing:
        return untested("not testable", f"no seed has controls ({' and '.join(missing)})")
    if len(judged) < LEAST_SEEDS:
        return untested("not testable", f"{len(judged)} of at least {LEAST_SEEDS} seeds have controls")
    fewest = min((by_kind[kind] for kind in kinds), key=lambda each: each.number)
    if fewest.number < LEAST_CONTROLS:
        return untested("not testable", f"{fewest.number} of at least {LEAST_CONTROLS} controls ({fewest.kind})")
    p = max(by_kind[kind].p for kind in kinds)
    sides = {by_kind[kind].is_above for kind in kinds}
    verdict: ClaimVerdict = "not shown"
    if p <= SIGNIFICANT_P and len(sides) == 1:
        verdict = "opposite"
        if sides == {True}:
            verdict = "shown" if auc.ci_low > MARKS_FROM else "shown in part"
    return Judgement(verdict, "", p, seeds, auc, controls)
