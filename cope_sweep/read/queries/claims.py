"""The claims of ablations, with verdicts from finished runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cope_sweep.api.ablations import ClaimResult, ClaimTexts, ClaimVerdict
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
from cope_sweep.read.tables.model import hardware_of_rows
from cope_sweep.read.tables.stats import finite

UNTESTED: tuple[ClaimVerdict, ...] = ("too few seeds", "not testable", "not trained")
"""The verdicts on claims that were not tested."""
PAPERS_SIZE = "the paper's size"


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
    return sorted(with_deciding(claims), key=lambda claim: place_in_paper(claim.source))


def deciding(claims: Sequence[ClaimResult]) -> list[ClaimResult]:
    """Those that decide, of the results of one statement about one task: see `ClaimResult.decided_by`.

    Nothing follows from one without a test; if there is no other, all of them decide.
    """
    tested = [claim for claim in claims if claim.verdict not in UNTESTED]
    tuned = [claim for claim in tested if claim.recipe == "tuned"]
    tuned = [claim for claim in tuned if not claim.hardware_follows_rows] or tuned
    return tuned or [claim for claim in tested if claim.model == PAPERS_SIZE] or tested or list(claims)


def report_of(claim: ClaimResult) -> str:
    """The name of the report with this claim: `encodings.small`."""
    return ".".join(filter(None, (claim.ablation, claim.scale)))


def with_deciding(claims: Sequence[ClaimResult]) -> Iterator[ClaimResult]:
    """The claims, with the reports that decide about each."""
    of_statement: dict[tuple[str, str], list[ClaimResult]] = {}
    for claim in claims:
        of_statement.setdefault((claim.claim, claim.task), []).append(claim)
    decided_by = {statement: sorted({*map(report_of, deciding(each))}) for statement, each in of_statement.items()}
    for claim in claims:
        reports = decided_by[claim.claim, claim.task]
        yield claim.model_copy(update={"decided_by": [] if report_of(claim) in reports else reports})


def _findings_about_heads(results: Results) -> tuple[Finding, ...]:
    """From the measures that the store has; measuring the heads of its checkpoints takes too long."""
    from cope_sweep.read.reports.heads import claimed_figures, kept_heads  # pandas

    heads = kept_heads(results)
    if heads is None:
        return ()
    declarations = plan_declarations(results.plan, results.store)
    return head_findings(claimed_figures(results.plan), heads, declarations, results.records)


def _findings_of(results: Results) -> tuple[Finding, ...]:
    model = Table.of(results, reference(results.plan)).model
    declarations = plan_declarations(results.plan, results.store)
    return (*claim_findings(results.plan, model, declarations), *_findings_about_heads(results))


def _result(plan: Plan, finding: Finding, hypothesis: str) -> ClaimResult:
    weakest = finding.weakest
    test = None if weakest is None else weakest.comparison.difference
    rows = {row.row: row for pair in finding.pairs for row in (pair.better, pair.than)}
    runs = [(name, run, record) for name, row in rows.items() for run, record in row.runs]
    return ClaimResult(
        claim=finding.claim,
        task=finding.task or plan.rows[0].runs[0].task.kind,
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
        texts=ClaimTexts(**finding.texts, verdict=finding.verdict_text),
        verdict=finding.verdict,
        meaning=finding.meaning,
        pairs=len(finding.pairs),
        shown=finding.shown,
        hypothesis=hypothesis,
        recipe="tuned" if plan.ablation.content.tuned else "one recipe",
        model=_model_size(plan, finding),
        hardware_follows_rows=bool(hardware_of_rows(runs)),
        decided_by=[],
        declared=finding.declared,
        note=finding.note,
    )


def _model_size(plan: Plan, finding: Finding) -> str:
    """`2 layers of 64`, of the first row; `the paper's size` where no scale and no `--set` replaces values."""
    if not plan.ablation.replaced and finding.published:
        return PAPERS_SIZE
    model = (finding.pairs[0].better.runs[0][0] if finding.pairs else plan.rows[0].runs[0]).model
    return f"{model.layers} layer{'s' * (model.layers > 1)} of {model.dim}"
