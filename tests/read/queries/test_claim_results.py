"""Claims of committed results."""

from dataclasses import replace
from pathlib import Path

from cope_sweep.api.ablations import ClaimResult
from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.read.queries import Queries
from cope_sweep.read.queries.ablations import AblationFiles
from cope_sweep.read.queries.claims import claim_results, with_deciding
from cope_sweep.read.reports.evidence import evidence
from cope_sweep.read.tables import Results, read_results
from cope_sweep.store import ParquetStore
from tests.helpers.claims import claim_result

ABLATIONS = Path(__file__).parents[3] / "ablations"


def gates() -> Results:
    plan = expand(with_overrides(load_ablation(ABLATIONS / "gates.yaml"), scale="small"))
    return read_results(plan, ParquetStore(ABLATIONS / "results"))


def test_figures_of_heads_have_their_claims() -> None:
    results = gates()
    assert results.plan.ablation.content.has_claims
    assert not results.plan.ablation.content.claims
    claims = claim_results([results])
    assert [(claim.source, claim.verdict) for claim in claims] == [
        ("Figure 6 (top)", "not shown"),
        ("Figure 6 (bottom)", "not shown"),
    ]
    for claim in claims:
        assert (claim.difference, claim.size, claim.n, claim.texts.n) == (None, None, 5, "5"), "seeds with controls"
        assert claim.q >= claim.p > 0.05, "its p is one of those of the page"


def test_reports_with_measures_of_heads_have_one_scale() -> None:
    assert AblationFiles(ABLATIONS).committed("gates") == ["small"]


def test_a_report_says_how_many_runs_have_heads_that_were_not_measured() -> None:
    report = evidence(gates())
    assert report.missing == ()
    without_two = report.heads[report.heads["seed"] > 1]
    (line,) = replace(report, heads=without_two).missing
    assert line.startswith("heads of 2 finished runs")


def test_numbers_of_claims_have_their_texts() -> None:
    plan = expand(with_overrides(load_ablation(ABLATIONS / "code.yaml"), scale="small"))
    claims = claim_results([read_results(plan, ParquetStore(ABLATIONS / "results"))])
    assert len(claims) > 1
    for claim in claims:
        seeds = len(plan.ablation.content.seeds)
        assert (claim.n, claim.paired, claim.texts.n) == (seeds, True, f"{seeds} pairs")
        assert (claim.p is None) == (claim.q is None) == (claim.says != "better")  # others are judged by a margin
        assert (claim.p or 0.0) <= (claim.q or 1.0)
        assert claim.difference is not None
        assert claim.ci_low is not None
        assert claim.ci_high is not None
        assert claim.ci_low <= claim.difference <= claim.ci_high
        numbers, _, names = claim.texts.difference.partition(" (")
        assert numbers == f"{claim.difference:+.2f} [{claim.ci_low:.2f}, {claim.ci_high:.2f}]"
        assert bool(names) == (claim.pairs > 1), "which pair it is"


def test_tuned_rows_decide_about_a_claim_in_the_same_words() -> None:
    queries = Queries(ParquetStore(ABLATIONS / "results"), AblationFiles(ABLATIONS))
    reports = [("flip_flop", "small"), ("flip_flop", None), ("encodings", "small"), ("code", "small")]
    claims = claim_results([queries.results(name, scale) for name, scale in reports])
    same = (
        "Where more instructions are ignored than in training, CoPE makes fewer errors than absolute positions and RoPE"
    )
    found = {(each.ablation, each.scale): each for each in claims if each.claim == same}
    tuned = found.pop(("encodings", "small"))
    assert (tuned.recipe, tuned.decided_by) == ("tuned", [])
    for claim in (found["flip_flop", "small"], found["flip_flop", None]):
        assert (claim.recipe, claim.decided_by) == ("one recipe", ["encodings.small"])
    assert all(each.decided_by == [] for each in claims if each.ablation == "code")


def test_the_papers_size_is_what_no_scale_and_no_option_replaces() -> None:
    queries = Queries(ParquetStore(ABLATIONS / "results"), AblationFiles(ABLATIONS))
    results = queries.results("flip_flop", None)
    assert {each.model for each in claim_results([results])} == {"the paper's size"}
    plan = results.plan
    smaller = replace(plan, ablation=with_overrides(plan.ablation, assignments=["train.clip=0.5"]))
    assert "the paper's size" not in {each.model for each in claim_results([replace(results, plan=smaller)])}


def decided_by(*claims: ClaimResult) -> list[list[str]]:
    return [claim.decided_by for claim in with_deciding(claims)]


def test_tuned_rows_decide_then_the_papers_size_then_all() -> None:
    paper = claim_result("shown", model="the paper's size")
    small = claim_result("shown", scale="small")
    tuned = claim_result("not shown", ablation="many", recipe="tuned")
    assert decided_by(small, paper, tuned) == [["many"], ["many"], []]
    assert decided_by(small, paper) == [["copy"], []]
    opposite = claim_result("opposite", ablation="other")
    assert decided_by(small, opposite) == [[], []], "they have to agree"


def test_what_was_not_tested_decides_nothing_but_alone() -> None:
    few = claim_result("too few seeds", ablation="many", recipe="tuned")
    assert decided_by(few, claim_result("shown")) == [["copy"], []]
    assert decided_by(few, claim_result("not trained")) == [[], []]


def test_of_reports_with_tuned_rows_those_with_the_same_hardware_decide() -> None:
    mixed = claim_result("shown", ablation="mixed", recipe="tuned", hardware_follows_rows=True)
    same = claim_result("not shown", ablation="same", recipe="tuned")
    assert decided_by(mixed, same) == [["same"], []]
    assert decided_by(mixed, claim_result("shown")) == [[], ["mixed"]]


def test_reports_decide_about_one_task_whatever_table_the_claim_names() -> None:
    tuned = claim_result("not shown", ablation="many", recipe="tuned")
    others = [claim_result("shown", source="Table 7"), claim_result("shown", task="flip_flop")]
    assert decided_by(tuned, *others) == [[], ["many"], []]
