"""The claims of ablations, with verdicts from finished runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cope_sweep.api.ablations import ClaimResult, ClaimTexts
from cope_sweep.config import Plan
from cope_sweep.read.tables import Results, Table
from cope_sweep.read.tables.claims import (
    Finding,
    claim_findings,
    head_findings,
    hypothesis_verdict,
    place_in_paper,
    with_q,
)
from cope_sweep.read.tables.comparisons import reference
from cope_sweep.read.tables.declared import plan_declarations
from cope_sweep.read.tables.stats import finite


def claim_results(all_results: Iterable[Results]) -> list[ClaimResult]:
    """The claims about these results, in the order of the paper's tables and figures; other claims come last."""
    findings: list[tuple[Plan, Finding, str]] = []
    for results in all_results:
        of_results = _findings_of(results)
        hypothesis = hypothesis_verdict(of_results)
        findings += [(results.plan, finding, hypothesis) for finding in of_results]
    of_page = with_q([finding for _, finding, _ in findings])
    claims = [
        _result(plan, finding, hypothesis) for (plan, _, hypothesis), finding in zip(findings, of_page, strict=True)
    ]
    return sorted(_with_deciding(claims), key=lambda claim: place_in_paper(claim.source))


def _with_deciding(claims: Sequence[ClaimResult]) -> Iterator[ClaimResult]:
    """The claims; those of files with one recipe name the reports with tuned rows that judge the same statement."""
    deciding: dict[str, list[str]] = {}
    for claim in claims:
        if claim.recipe == "tuned" and claim.verdict not in ("too few seeds", "not trained"):
            report = ".".join(filter(None, (claim.ablation, claim.scale)))
            deciding.setdefault(claim.claim, []).append(report)
    for claim in claims:
        others = [] if claim.recipe == "tuned" else deciding.get(claim.claim, [])
        yield claim.model_copy(update={"decided_by": others})


def _findings_about_heads(results: Results) -> tuple[Finding, ...]:
    """From the measures that the store has; measuring the heads of its checkpoints takes too long."""
    kept = results.store.kept(results.plan)
    if kept is None or kept.heads is None:
        return ()
    from cope_sweep.read.reports.heads import claimed_figures  # pandas

    figures, heads = claimed_figures(results.plan), kept.heads.to_pandas()
    return head_findings(figures, heads, plan_declarations(results.plan, results.store), results.records)


def _findings_of(results: Results) -> tuple[Finding, ...]:
    model = Table.of(results, reference(results.plan)).model
    declarations = plan_declarations(results.plan, results.store)
    return (*claim_findings(results.plan, model, declarations), *_findings_about_heads(results))


def _result(plan: Plan, finding: Finding, hypothesis: str) -> ClaimResult:
    weakest, texts = finding.weakest, dict(finding.texts)
    del texts["size"]
    test = None if weakest is None else weakest.comparison.difference
    return ClaimResult(
        claim=finding.claim,
        source=finding.source,
        ablation=plan.name,
        title=plan.ablation.content.title,
        scale=plan.ablation.scale,
        measure=finding.measure,
        ours=finding.ours,
        headline=finding.headline,
        published=finding.published,
        p=finite(finding.p),
        q=finite(finding.q),
        n=finding.n and finding.n[0],
        paired=finding.is_paired,
        difference=test and finite(test.difference),
        ci_low=test and finite(test.ci_low),
        ci_high=test and finite(test.ci_high),
        says=finding.says,
        margin=weakest and weakest.margin,
        size=weakest and weakest.size,
        texts=ClaimTexts(**texts),
        verdict=finding.verdict,
        meaning=finding.meaning,
        pairs=len(finding.pairs),
        shown=finding.shown,
        hypothesis=hypothesis,
        recipe="tuned" if plan.ablation.content.tuned else "one recipe",
        decided_by=[],
        declared=finding.declared,
        note=finding.note,
    )
