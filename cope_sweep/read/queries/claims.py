"""The claims of ablations, with what finished runs say about them."""

from __future__ import annotations

from collections.abc import Iterable

from cope_sweep.api.answers import ClaimResult
from cope_sweep.read.tables import Results, Table
from cope_sweep.read.tables.claims import findings, hypothesis_verdict, place_in_paper
from cope_sweep.read.tables.model import reference
from cope_sweep.read.tables.stats import finite


def claim_results(all_results: Iterable[Results]) -> list[ClaimResult]:
    """The claims about these results, in the order of the paper's tables and figures; others come last."""
    found = [each for results in all_results for each in _of_one(results)]
    return sorted(found, key=lambda each: place_in_paper(each.source))


def _of_one(results: Results) -> Iterable[ClaimResult]:
    plan = results.plan
    found = findings(plan, Table(results, reference(plan)).model)
    hypothesis = hypothesis_verdict(found)
    for each in found:
        yield ClaimResult(
            claim=each.claim.text,
            source=each.claim.source,
            ablation=plan.name,
            title=plan.ablation.content.title,
            scale=plan.ablation.scale,
            measure=each.measure,
            ours=each.ours,
            published=each.published,
            p=finite(each.largest_p),
            verdict=each.verdict,
            pairs=len(each.pairs),
            shown=each.shown,
            hypothesis=hypothesis,
        )
