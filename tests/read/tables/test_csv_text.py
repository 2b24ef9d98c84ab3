import io

import pandas as pd
import pyarrow as pa
import pytest

from cope_sweep.read.tables.csv_text import csv_column, csv_text, without_formula
from tests.read.tables.ablations import plan_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("=1+1", "'=1+1"),
        ("@x", "'@x"),
        ("-m·p", "'-m·p"),
        ("+RoPE", "'+RoPE"),
        ("\tx", "'\tx"),
        ("-1", "-1"),
        ("+2.5e-3", "+2.5e-3"),
        ("-.5", "-.5"),
        ("CoPE = 1", "CoPE = 1"),
        ("", ""),
        (-1.5, -1.5),
        (None, None),
    ],
)
def test_texts_are_no_formulas_and_numbers_stay(text, shown):
    assert without_formula(text) == shown


def test_frames_and_arrow_columns():
    frame = pd.DataFrame({"=row": ["=A1", "-2", None], "value": [-1.0, 2.0, None]})
    assert csv_text(frame) == "=row,value\n'=A1,-1.0\n-2,2.0\n,\n"
    assert csv_column(pa.array(["=A1", "-2", None])).to_pylist() == ["'=A1", "-2", None]
    assert csv_column(pa.array([["=A1", "b"], ["c"]])).to_pylist() == ["'=A1 b", "c"]
    assert csv_column(pa.array([-1, None])).to_pylist() == [-1, None]


def test_the_table_of_an_ablation(store):
    from cope_sweep.read.tables import table

    plan = plan_of(grid={"model.position": {"=CoPE": ["cope"]}}, published=[])
    results = table(plan, store)
    assert pd.read_csv(io.StringIO(results.to_csv()))["row"].tolist() == ["'=CoPE"]
    assert repr(results) == "<table of copying: 1 rows, 2 runs; print() shows it>"
    assert str(results) == results.to_markdown()
