"""Benchmark of rules by which an agent keeps a change: false and missed discoveries in simulated searches.

A search compares a base with ten candidates, in random order. Runs are not trained: the value of a run is drawn, with
replacement, from the committed results of a row of flip_flop (14 seeds, its primary metric). So the simulation has the
spread, the skew and the ties of real results, and nothing is assumed about their distribution. In every search the base
and all candidates but one are RoPE. In some, one candidate really differs: it is CoPE, or RoPE with a part of its
errors.

Three agents search. Only the last one asks whether a difference could be chance.

one seed     One run each. Keep a candidate if it is better than what was kept last: the rule of loops that change one
             thing, train once, and keep or discard.
better mean  The mean of 8 seeds, by the same rule.
our verdict  8 seeds for all rows, declared in advance. Keep a candidate if the table calls it better: the exact
             permutation test against the base, corrected for ten comparisons (Holm), p ≤ 0.05.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cope_benchmarks.report import Measured, Rows
from cope_sweep.config.expand import Row
from cope_sweep.read.numbers import percent_range
from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.tables.stats import SIGNIFICANT_P, Proportion, holm, mean_of, two_rows
from cope_sweep.store import ParquetStore

ABLATIONS = Path(__file__).resolve().parents[3] / "ablations"
ABLATION, SCALE = "flip_flop", "small"
BASE, OTHER = "RoPE", "CoPE"
CANDIDATES = 10
SEEDS = 8
SEARCHES = 20

Draw = Callable[[int], Sequence[float]]
"""The values of so many runs of a row; smaller is better."""


@dataclass(frozen=True)
class Search:
    """A base and its candidates, in the order in which they are tried."""

    base: Draw
    candidates: Sequence[Draw]
    better: frozenset[int]
    """The candidates that really are better than the base."""


Agent = Callable[[Search], set[int]]
"""Returns the candidates that it has kept."""


def keep_the_better_mean(seeds: int) -> Agent:
    """Keep a candidate if the mean of its seeds is smaller than that of what was kept last."""

    def search(searched: Search) -> set[int]:
        best, kept = mean_of(searched.base(seeds)), set()
        for index, draw in enumerate(searched.candidates):
            value = mean_of(draw(seeds))
            if value < best:
                best = value
                kept.add(index)
        return kept

    return search


def follow_the_verdict(seeds: int) -> Agent:
    """Keep a candidate if its difference from the base is significant after Holm's correction, and a smaller value."""

    def search(searched: Search) -> set[int]:
        base = dict(enumerate(searched.base(seeds)))
        tests = [two_rows(dict(enumerate(draw(seeds))), base) for draw in searched.candidates]
        corrected = holm([test.p for test in tests])
        pairs = enumerate(zip(tests, corrected, strict=True))
        return {index for index, (test, p) in pairs if p <= SIGNIFICANT_P and test.difference < 0}

    return search


AGENTS: Mapping[str, tuple[Agent, int]] = {
    "keep what is better on one seed": (keep_the_better_mean(1), 1),
    f"keep the better mean of {SEEDS} seeds": (keep_the_better_mean(SEEDS), SEEDS),
    f"follow the verdict, {SEEDS} seeds": (follow_the_verdict(SEEDS), SEEDS),
}


def committed_values(ablation: str = ABLATION, scale: str = SCALE) -> dict[str, list[float]]:
    """Row → the values of the primary metric of its committed runs, by seed."""
    results = Queries(ParquetStore(ABLATIONS / "results"), AblationFiles(ABLATIONS)).results(ablation, scale)
    metric = results.plan.ablation.content.primary_metric.name

    def values(row: Row) -> list[float]:
        found = (results.records[run.run_id].value(metric) for run in row.runs)
        return [value for value in found if value is not None]

    return {row.name: values(row) for row in results.plan.rows}


def measure(searches: int) -> Measured:
    """Let each agent search, in the same kinds of searches: seconds."""
    committed = committed_values()
    rows = Rows("agents")
    kinds: dict[str, tuple[Sequence[float], bool]] = {
        "nothing differs": (committed[BASE], False),
        f"one row is {OTHER}": (committed[OTHER], True),
        f"one row has half of {BASE}'s errors": ([value / 2 for value in committed[BASE]], True),
    }
    for kind, (values, is_better) in kinds.items():
        for name, (agent, seeds) in AGENTS.items():
            false, missed = Proportion(0, searches), Proportion(0, searches)
            for number in range(searches):
                searched = _search(committed[BASE], values, is_better, random.Random(f"{kind} {number}"))
                kept = agent(searched)
                false = Proportion(false.k + bool(kept - searched.better), searches)
                missed = Proportion(missed.k + bool(searched.better - kept), searches)
            rows.rows[f"{kind}: {name}"] = {
                "searches with a false discovery": _text(false),
                "searches that missed the better row": _text(missed) if is_better else "–",
                "runs of a search": (CANDIDATES + 1) * seeds,
                "counts": {"false": false.k, "missed": missed.k, "searches": searches},
            }
    return rows.measured(ablation=f"{ABLATION} {SCALE}", base=BASE, seeds_committed=len(committed[BASE]))


def _search(base: Sequence[float], other: Sequence[float], is_better: bool, rng: random.Random) -> Search:
    """A search whose runs are drawn by `rng`."""
    place = rng.randrange(CANDIDATES)
    sources = [other if index == place else base for index in range(CANDIDATES)]
    draws = [_drawing(values, rng) for values in sources]
    return Search(_drawing(base, rng), draws, frozenset({place} if is_better else ()))


def _drawing(values: Sequence[float], rng: random.Random) -> Draw:
    return lambda number: rng.choices(values, k=number)


def _text(share: Proportion) -> str:
    """`3/20 (5–36 %)`: the number, and Wilson's 95 % interval of the share."""
    return f"{share.k}/{share.n} ({percent_range(*share.interval)})"
