"""The page of claims: which report decides, and the signs of the paper's tables and figures."""

from dataclasses import replace

import pytest

from cope_sweep.config import expand, load_ablation
from cope_sweep.config.overrides import with_overrides
from cope_sweep.read.tables import read_results
from cope_sweep.read.tables.claims import Finding
from cope_sweep.store import Store
from tests.ablations.claims_page import PAPER, Entry, by_claim, deciding, lines_of_paper, place_of, sign_of
from tests.helpers.finished_runs import finish

CLAIM = "CoPE copies better"
FILE = """
title: Copy
base:
  task: {{kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}}
  model: {{layers: 3, dim: 8, heads: 2}}
  train: {{steps: 4, batch: 2}}
grid:
  model.position: {{CoPE: [cope], RoPE: [rope]}}
seeds: [0]
metrics: [{{name: in_dist/token_error}}]
{tuned}
scales:
  small: {{set: {{model.dim: 4}}}}
"""


@pytest.fixture
def entry(tmp_path):
    """A function (verdict, tuned, scale, published, text) → an entry of a report on a file like `FILE`."""

    def make(verdict, *, tuned=False, scale=None, published="", source="Table 2", text=CLAIM):
        name = f"{'tuned' if tuned else 'plain'}"
        (tmp_path / f"{name}.yaml").write_text(FILE.format(tuned="tuned: other" if tuned else ""))
        (tmp_path / "other.yaml").write_text(FILE.format(tuned=""))
        plan = expand(with_overrides(load_ablation(tmp_path / f"{name}.yaml"), scale=scale))
        store = Store(tmp_path / "store", create=True)
        for row in plan.rows:
            finish(store, row.runs[0], {"in_dist/token_error": 1.0})
        return Entry(read_results(plan, store), Finding(text, source, "OOD (%)", verdict, published=published))

    return make


def test_a_file_with_tuned_rows_decides_then_the_papers_size_then_all(entry):
    tuned, paper = entry("not shown", tuned=True), entry("shown", published="CoPE 1.0")
    small, few = entry("shown", scale="small"), entry("too few seeds", tuned=True)
    assert deciding([small, paper, tuned]) == [tuned]
    assert deciding([small, paper, few]) == [paper]  # nothing follows from few seeds
    opposite = entry("opposite", scale="small")
    assert deciding([small, opposite]) == [small, opposite]
    assert deciding([few]) == [few]
    assert (tuned.recipe, paper.recipe) == ("tuned", "one recipe")
    assert (paper.size, small.size, tuned.size) == ("the paper's size", "3 layers of 4", "3 layers of 8")
    assert (small.stem, small.link) == ("plain.small", "[plain.small](plain.small.md)")


def test_of_tuned_files_one_with_the_same_hardware_for_all_rows_decides(entry, monkeypatch):
    mixed, same = entry("shown", tuned=True), entry("not shown", tuned=True, scale="small")
    assert deciding([mixed, same]) == [mixed, same]
    monkeypatch.setattr(Entry, "hardware", property(lambda self: "differs" if self is mixed else ""))
    assert deciding([mixed, same]) == [same]
    assert deciding([mixed]) == [mixed]


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
def test_signs(entry, verdicts, sign):
    assert sign_of([[entry(verdict)] for verdict in verdicts]) == sign


def test_shown_with_a_large_q_is_in_brackets(entry):
    one = entry("shown")
    sure, weak = (replace(one, finding=replace(one.finding, q=q)) for q in (0.05, 0.051))
    assert (sure.sign, weak.sign, sign_of([[sure], [weak]])) == ("✓", "(✓)", "(✓)")
    assert sign_of([[weak], [entry("not shown")]]) == "~"


def test_a_tuned_file_decides_about_every_table_that_makes_the_claim(entry):
    tuned, other = entry("not shown", tuned=True), entry("shown", source="Table 7", scale="small")
    lines = lines_of_paper(by_claim([tuned, other])).splitlines()[2:]
    signs = {line.split(" | ")[1]: line.strip("| ").split(" | ")[0] for line in lines}
    assert (signs["Table 2"], signs["Table 7"], signs["Table 3"]) == ("✗", "✗", "?")


def test_a_line_for_each_table_and_figure_of_the_paper(entry):
    entries = [
        entry("shown", published="CoPE 1.0"),
        entry("not shown", scale="small"),
        entry("opposite", source="Figure 4 (left)", text="Heads count"),
        entry("shown", source="", text="Beyond"),
    ]
    lines = lines_of_paper(by_claim(entries)).splitlines()[2:]
    cells = {line.split(" | ")[1]: line.strip("| ").split(" | ") for line in lines}
    assert list(cells) == list(PAPER)
    assert len(cells) == 16
    assert (cells["Table 2"][0], cells["Table 2"][3]) == ("✓", "1 of 1")  # the paper's size decides
    assert (cells["Figure 4"][0], cells["Figure 4"][3]) == ("✗", "0 of 1")
    assert (cells["Table 1"][0], cells["Table 1"][3]) == ("?", "0 of 0")
    assert cells["Table 9"][:1] == ["="]


def test_the_numbers_of_a_claim_are_one_sentence(entry):
    one = entry("shown", published="CoPE 1.0")
    one = replace(one, finding=replace(one.finding, ours="CoPE 0.5", declared="after"))
    assert one.evidence == (
        "**shown** OOD (%): CoPE 0.5; published: CoPE 1.0 (one recipe, the paper's size, declared after) [plain](plain.md)"
    )


def test_places_of_the_paper():
    assert [place_of(source) for source in ("Table 10", "Figure 4 (left)", "")] == ["Table 10", "Figure 4", ""]
