"""The published numbers of ablation files are those of the paper's tables, and belong to the right rows."""

import pytest

from cope_sweep.config import parameter_count
from tests.ablations import paper
from tests.ablations.test_ablation_plans import NAMES, plan

ERRORS = ("in_dist/sequence_error", "dense/sequence_error", "sparse/sequence_error")
PERPLEXITIES = ("facts.parameters", "validation/perplexity", "test/perplexity")
PASSES = ("in_dist/token_error", "longer/token_error", "shorter/token_error")
SEP_KEYS = 130_744_576
"""With tables that layers share. The paper's 130.8 M fits a table per layer, 130,789,632."""


def published(name: str) -> dict[tuple[str, ...], dict[str, paper.Cell]]:
    """Labels of each row with published numbers → metric → value and standard deviation."""
    return {
        tuple(row.labels.values()): {
            metric: (value, row.published.std.get(metric)) for metric, value in row.published.values.items()
        }
        for row in plan(name).rows
        if row.published
    }


def expected(table: str, metrics: tuple[str, ...]) -> dict[tuple[str, ...], dict[str, paper.Cell]]:
    """A table with one column of labels, with these metrics as its columns."""
    return {
        labels: {
            metric: (round(cell[0] * 1e6), None) if metric == "facts.parameters" else cell
            for metric, cell in zip(metrics, cells, strict=True)
            if cell is not None
        }
        for labels, cells in paper.rows(table).items()
    }


def test_flip_flop():
    found = published("flip_flop")
    large = {label: cells for label, cells in architectures().items() if label[1:] == ("256", "4", "4")}
    assert found == {label[:1]: large[label] for label in large if label[0] in ("Absolute", "RoPE", "CoPE")}


def architectures() -> dict:
    """Table 7 by position, dimension, heads and layers, as the axes of the file are."""
    return {
        (position, dim, heads, layers): dict(zip(("in_dist/token_error", "sparse/token_error"), cells, strict=True))
        for (position, dim, layers, heads), cells in paper.rows(paper.TABLE_7, labels=4).items()
    }


def test_flip_flop_architectures():
    found = {labels[:4]: cells for labels, cells in published("flip_flop_architectures").items()}
    assert len(found) == 31
    assert found == architectures()
    others = [row.name for row in plan("flip_flop_architectures").rows if not row.published]
    assert len(others) == 6
    assert all("CoPE-MLP" in name for name in others)


def test_rows_of_the_architectures_are_what_their_labels_say():
    for row in plan("flip_flop_architectures").rows:
        model = row.runs[0].model
        assert (str(model.dim), str(model.heads), str(model.layers)) == tuple(row.labels.values())[1:4]
        assert model.hard_attention == ("hard" in row.name)
        (encoding,) = model.position
        hidden = {"N 32": 32, "N 128": 128, "N 256": 256}
        if encoding.kind == "cope_mlp":
            assert encoding.hidden == next((size for label, size in hidden.items() if label in row.name), 64)
            assert encoding.layers == ((0,) if "first layer" in row.name else None)
        if encoding.kind == "cope_alibi" and "learned" not in row.name:
            first = {"= 1 ": 1, "= 1/2² ": 1 / 4, "= 1/2⁴ ": 1 / 16}
            slope = next(slope for label, slope in first.items() if label in row.name)
            assert encoding.slopes == (slope, slope / 2, slope / 4, slope / 8)


def test_selective_copy():
    assert published("selective_copy") == expected(paper.TABLE_10, ERRORS)


def test_an_error_of_the_selective_copy_can_be_resolved():
    """0.004 % is some sequences of a test set."""
    (smallest,) = {
        value for cells in published("selective_copy").values() for value, _ in cells.values() if 0 < value < 1
    }
    assert all(run.evaluate.final_sequences * smallest / 100 >= 1 for run in plan("selective_copy").runs)


def test_counting():
    found = {}
    for (position,), cells in paper.rows(paper.TABLE_9).items():
        for variables, cell in zip("135", cells[:3], strict=True):
            found[position, variables] = {"in_dist/token_error": cell}
        if position != "Absolute":
            found[position, "1"] |= dict(zip(PASSES, cells[3:], strict=True))
    assert published("counting") == found


def test_counting_ood():
    found = {labels[0]: cells for labels, cells in published("counting_ood").items()}
    table_9 = {position: cells for (position,), cells in paper.rows(paper.TABLE_9).items()}
    assert found.pop("Absolute") == {"in_dist/token_error": table_9["Absolute"][0]}
    assert found == {name: dict(zip(PASSES, table_9[name][3:], strict=True)) for name in ("Relative", "CoPE")}


def test_wikitext_and_its_changes():
    # The row of relative positions has a second label, a variant of its evaluation.
    found = {labels[:1]: cells for labels, cells in published("wikitext").items()}
    assert found == expected(paper.TABLE_5_WIKITEXT, PERPLEXITIES)
    changes = published("wikitext_changes")
    assert changes.pop(("Absolute",)) == found["Absolute",]  # for the comparison with slopes
    assert changes == expected(paper.TABLE_8, PERPLEXITIES)


def test_code():
    of_paper = expected(paper.TABLE_5_CODE, ("facts.parameters", "test/perplexity"))
    # Its perplexities are those of another text, so they do not stand beside ours.
    assert published("code") == {
        row: {"facts.parameters": cells["facts.parameters"]} for row, cells in of_paper.items()
    }


PATH_TABLE_1 = {
    "RoPE": (6.9, 40.3, 0.01),
    "Stick-breaking": (9.6, 38.9, 0.0),
    "FoX": (8.3, 36.3, 0.0),
    "PaTH": (0.0, 0.0001, 0.0),
}
"""Yang et al. 2025, arXiv 2505.16381: error in distribution, sparse and dense, %."""


MAPFORMER_TABLE_2 = {
    "1D · None": (0.14, 0.20, 0.12),
    "1D · RoPE": (0.25, 0.40, 0.16),
    "1D · CoPE": (0.63, 0.71, 0.47),
    "1D · PaTH": (0.99, 0.99, 0.98),
    "1D · MapFormer-WM, rank 1": (1.0, 1.0, 1.0),
    "1D · MapFormer-WM, rank 2": (1.0, 1.0, 1.0),
    "1D · MapFormer-EM": (1.0, 1.0, 1.0),
    "2D · None": (0.16, 0.08, 0.08),
    "2D · RoPE": (0.46, 0.52, 0.39),
    "2D · CoPE": (0.65, 0.71, 0.56),
    "2D · PaTH": (0.64, 0.70, 0.53),
    "2D · MapFormer-WM, rank 1": (0.66, 0.74, 0.62),
    "2D · MapFormer-WM, rank 2": (1.0, 1.0, 0.99),
    "2D · MapFormer-EM": (1.0, 1.0, 1.0),
}
"""Rambaud et al. 2025, arXiv 2511.19279v4: accuracy in distribution, dense and sparse, of one layer."""


@pytest.mark.parametrize("name", NAMES)
def test_every_published_number_is_in_the_paper(name):
    """Also those of ablations that ask what the paper leaves open, which repeat numbers of its tables."""
    tables = [text for key, text in vars(paper).items() if key.startswith("TABLE_") and key != "TABLE_7"]
    cells = {cell for text in tables for row in paper.rows(text).values() for cell in row}
    cells |= {cell for row in paper.rows(paper.TABLE_7, labels=4).values() for cell in row}
    known = cells | {(value, None) for value, _ in filter(None, cells)}
    for row in plan(name).rows:
        if row.published and row.published.source == "PaTH, Table 1":
            assert tuple(row.published.values.values()) == PATH_TABLE_1[row.name]
        elif row.published and row.published.source == "MapFormer, Table 2":
            accuracies = [1 - error / 100 for error in row.published.values.values()]
            assert accuracies == pytest.approx(MAPFORMER_TABLE_2[row.name])
        elif row.published:
            assert row.published.source.startswith("Table")
            for metric, value in row.published.values.items():
                in_table = round(value / 1e6, 1) if metric == "facts.parameters" else value
                assert (in_table, row.published.std.get(metric)) in known


@pytest.mark.parametrize("name", NAMES)
def test_published_parameters_are_those_of_the_model(name):
    """To the 0.1 M that the paper prints. One row differs, and its file says so."""
    for row in plan(name).rows:
        wanted = row.published and row.published.values.get("facts.parameters")
        if wanted is not None:
            counted = parameter_count(row.runs[0])
            assert round(counted / 1e6, 1) * 1e6 == pytest.approx(wanted) or counted == SEP_KEYS, row.name
