from __future__ import annotations

import re

import pytest
from cope_services.mcp.answers import MAX_TOKENS, markdown, page, table_lines, token_bound
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.api.runs import MetricTest
from tests.helpers.errors import raises

CL100K = re.compile(r"[^\r\n\w]?[^\W\d_]+|\d{1,3}| ?[^\s\w]+[\r\n]*|_|\s*[\r\n]+|\s+(?!\S)|\s+")


@pytest.mark.parametrize(
    ("shown", "tokens"), [("", 0), ("CoPE", 2), ("1234", 2), ("0.25", 3), ("| a |", 3), ("ä", 1), ("日本", 2)]
)
def test_a_bound_by_hand(shown: str, tokens: int) -> None:
    assert token_bound(shown) == tokens


def test_the_bound_is_not_below_the_pieces_that_tokenizers_begin_with() -> None:
    lines = table_lines(("row", "difference", "p"), [("CoPE + RoPE", -1.2345, 0.0002), ("Absolute", 43.46, 1e-9)])
    written = "\n".join(lines)
    assert token_bound(written) >= len([piece for piece in CL100K.findall(written) if piece.strip()])


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=3000), min_size=1, max_size=60)
)
def test_pages_have_all_lines_once_and_fit(lines: list[str]) -> None:
    start, seen = 0, 0
    while True:
        shown = page(lines, start)
        assert token_bound(shown) <= MAX_TOKENS
        more = re.search(r"^next: start=(\d+) \((\d+) more lines\)\Z", shown, re.MULTILINE)
        if more is None:
            break
        seen += 1
        assert int(more[1]) > start
        assert int(more[1]) + int(more[2]) == len(lines)
        start = int(more[1])
    assert seen < len(lines)


def test_a_page_within_a_table_repeats_its_head() -> None:
    lines = ["before", *table_lines(("row", "value"), [(f"row {i}", i) for i in range(1000)])]
    first = page(lines)
    start = int(first.rpartition("start=")[2].partition(" ")[0])
    second = page(lines, start).splitlines()
    assert second[:2] == ["| row | value |", "|---|---|"]
    assert second[2] == f"| row {start - 3} | {start - 3} |"


def test_a_line_beyond_the_end() -> None:
    with raises("beyond_the_end", start=7, lines=1):
        page(["one"], 7)


def test_numbers_and_missing_values() -> None:
    answer = MetricTest(n=(5, 5), difference=-1.23456789, ci_low=None, ci_high=None, p=0.0079, smallest_p=None)
    assert markdown(answer) == ["n: 5, 5", "difference: -1.235", "p: 0.0079"]


def test_a_cell_cannot_leave_its_table() -> None:
    assert table_lines(("a",), [("x | y\n| z |",)])[2] == "| x \\| y \\| z \\| |"
