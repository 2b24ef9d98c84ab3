"""Claims of committed results."""

from pathlib import Path

from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.read.queries.claims import claim_results
from cope_sweep.read.reports.runs import read_report

ABLATIONS = Path(__file__).parents[3] / "ablations"


def test_figures_of_heads_have_their_claims() -> None:
    plan = expand(with_overrides(load_ablation(ABLATIONS / "gates.yaml"), scale="small"))
    assert plan.ablation.content.has_claims
    assert not plan.ablation.content.claims
    results = read_report(plan, ABLATIONS / "results" / "gates.small.parquet")
    claims = claim_results([results])
    assert [(claim.source, claim.verdict) for claim in claims] == [
        ("Figure 6 (top)", "shown in part"),
        ("Figure 6 (bottom)", "shown in part"),
    ]
