"""The claims of ablations, with verdicts from finished runs."""

from __future__ import annotations

from collections.abc import Iterable

from cope_sweep.api.ablations import ClaimResult
from cope_sweep.read.tables import Results, Table
from cope_sweep.read.tables.claims import (
    Finding,
    claim_findings,
    head_findings,
    hypothesis_verdict,
    place_in_paper,
)
from cope_sweep.read.tables.comparisons import reference
from cope_sweep.read.tables.stats import finite


def claim_results(all_results: Iterable[Results]) -> list[ClaimResult]:
    """The claims about these results, in the order of the paper's tables and figures; other claims come last."""
    claims = [claim for results in all_results for claim in _claims_of(results)]
    return sorted(claims, key=lambda claim: place_in_paper(claim.source))


def _findings_about_heads(results: Results) -> tuple[Finding, ...]:
    """From the measures that the store has; measuring the heads of its checkpoints takes too long."""
    kept = results.store.kept(results.plan)
    if kept is None or kept.heads is None:
        return ()
    from cope_sweep.read.reports.heads import claimed_figures  # pandas

    return head_findings(claimed_figures(results.plan), kept.heads.to_pandas())


def _claims_of(results: Results) -> Iterable[ClaimResult]:
    plan = results.plan
    findings: list[Finding] = [*claim_findings(plan, Table.of(results, reference(plan)).model)]
    findings += _findings_about_heads(results)
    hypothesis = hypothesis_verdict(findings)
    for finding in findings:
        yield ClaimResult(
            claim=finding.claim,
            source=finding.source,
            ablation=plan.name,
            title=plan.ablation.content.title,
            scale=plan.ablation.scale,
            measure=finding.measure,
            ours=finding.ours,
            published=finding.published,
            p=finite(finding.largest_p),
            verdict=finding.verdict,
            meaning=finding.meaning,
            pairs=len(finding.pairs),
            shown=finding.shown,
            hypothesis=hypothesis,
        )
