"""The page of claims: which report decides, and the signs of the paper's tables and figures."""

import pytest

from cope_sweep.api.ablations import ListClaims
from cope_sweep.read.queries.claims import with_deciding
from tests.ablations.claims_page import (
    PAPER,
    by_claim,
    evidence_of,
    lines_of_claims,
    lines_of_paper,
    link_of,
    place_of,
    sign_of,
)
from tests.ablations.update_readme import our_claims, our_queries
from tests.helpers.claims import claim_result


def test_the_service_answers_claims_in_the_order_of_this_page():
    """So both show the same claim of a table first."""
    assert our_queries().ask(ListClaims()) == our_claims()


@pytest.mark.parametrize(
    ("verdicts", "sign"),
    [
        (["shown"], "✓"),
        (["shown", "too few seeds"], "✓"),
        (["shown", "not shown"], "~"),
        (["not shown", "shown in part"], "~"),
        (["mixed"], "~"),
        (["not shown", "opposite"], "✗"),
        (["too few seeds", "not testable"], "?"),
        ([], "?"),
    ],
)
def test_signs(verdicts, sign):
    assert sign_of([[claim_result(verdict)] for verdict in verdicts]) == sign


def test_shown_with_a_large_q_is_in_brackets():
    sure, weak = (claim_result("shown", q=q) for q in (0.05, 0.051))
    assert (sign_of([[sure]]), sign_of([[weak]]), sign_of([[sure], [weak]])) == ("✓", "(✓)", "(✓)")
    assert sign_of([[weak], [claim_result("not shown")]]) == "~"


def cells_of_paper(*claims):
    """The cells of the lines of the paper by table or figure."""
    lines = lines_of_paper(by_claim(list(with_deciding(claims)))).splitlines()[2:]
    return {line.split(" | ")[1]: line.strip("| ").split(" | ") for line in lines}


def test_the_report_that_decides_does_so_for_every_table_that_makes_the_claim():
    tuned = claim_result("not shown", ablation="many", recipe="tuned")
    cells = cells_of_paper(tuned, claim_result("shown", source="Table 7"))
    assert [cells[name][0] for name in ("Table 2", "Table 7", "Table 3")] == ["✗", "✗", "?"]


def test_a_line_for_each_table_and_figure_of_the_paper():
    cells = cells_of_paper(
        claim_result("shown", model="the paper's size"),
        claim_result("not shown", scale="small"),
        claim_result("shown", scale="small", source="Table 2 (left)"),
        claim_result("opposite", source="Figure 4 (left)", claim="Heads count"),
        claim_result("shown", source="", claim="Beyond"),
    )
    assert list(cells) == list(PAPER)
    assert len(cells) == 16
    assert (cells["Table 2"][0], cells["Table 2"][3]) == ("✓", "1 of 1"), "the paper's size decides"
    assert (cells["Figure 4"][0], cells["Figure 4"][3]) == ("✗", "0 of 1")
    assert (cells["Table 1"][0], cells["Table 1"][3]) == ("?", "0 of 0")
    assert cells["Table 9"][:1] == ["="]


def test_the_same_claim_about_two_tasks_has_two_lines():
    claims = [claim_result("shown"), claim_result("not shown", task="flip_flop")]
    assert cells_of_paper(*claims)["Table 2"][3] == "1 of 2"
    first, second = lines_of_claims(by_claim(list(with_deciding(claims)))).splitlines()[2:4]
    assert first.startswith("| Table 2 | CoPE copies better (selective\\_copy) | **shown**")
    assert second.startswith("| Table 2 | CoPE copies better (flip\\_flop) | **not shown**")


def test_the_numbers_of_a_claim_are_one_sentence():
    one = claim_result(
        "shown", ours="CoPE 0.5", published="CoPE 1.0", declared="after", texts={"n": "5", "p": "0.01"},
        hardware_follows_rows=True,
    )  # fmt: skip
    assert evidence_of(one) == (
        "**shown** OOD (%): CoPE 0.5; published: CoPE 1.0 (n = 5, one recipe, 2 layers of 64, hardware follows the "
        "row, p = 0.01, declared after) [copy](copy.md)"
    )
    assert link_of(claim_result("shown", ablation="few_positions", scale="small")) == (
        "[few\\_positions.small](few_positions.small.md)"
    )


def test_places_of_the_paper():
    assert [place_of(source) for source in ("Table 10", "Figure 4 (left)", "")] == ["Table 10", "Figure 4", ""]
