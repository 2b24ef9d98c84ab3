"""The tables of the paper as it prints them, typed from its source: what the published numbers of ablation files must be.

Each line is a row: the labels of the row in the ablation file, then its cells. A cell is a value, with its standard
deviation in parentheses where the paper has one; `-` is an empty cell. Tables 2 to 4 repeat numbers of tables 7, 9 and 10.
"""

from __future__ import annotations

import re

Cell = tuple[float, float | None]
"""A value and its standard deviation."""

# Parameters (M), validation and test perplexity.
TABLE_5_WIKITEXT = """
    Absolute        | 124.4 | 23.96 | 24.87
    Relative        | 123.7 | 22.90 | 23.81
    CoPE            | 123.7 | 22.55 | 23.46
    CoPE + Relative | 123.7 | 22.31 | 23.23
"""
# Parameters (M) and test perplexity.
TABLE_5_CODE = """
    Absolute    | 20.8 | 4.7
    RoPE        | 19.8 | 4.1
    CoPE        | 20.8 | 3.9
    CoPE + RoPE | 20.8 | 4.0
"""
# Dimension, layers, heads; errors in and out of distribution.
TABLE_7 = """
    Absolute                  | 256 | 4 | 4 |  6.8 (6.9) | 21.7 (7.9)
    Absolute                  | 256 | 2 | 4 | 11.1       | 10.6
    Absolute                  | 256 | 4 | 2 |  0.1       | 18.0
    Absolute                  | 256 | 2 | 2 | 13.9       | 31.5
    Absolute                  | 128 | 4 | 4 |  5.4       | 24.8
    Absolute                  | 128 | 2 | 4 |  0.08      | 19.9
    Absolute                  | 128 | 4 | 2 |  0.07      | 16.5
    Absolute                  | 128 | 2 | 2 | 19.1       | 28.6
    Absolute + hard attention | 256 | 4 | 4 | 50.7       | 49.1
    RoPE                      | 256 | 4 | 4 |  1.8 (3.1) | 20.3 (2.9)
    RoPE                      | 256 | 2 | 4 |  5.1       | 14.7
    RoPE                      | 256 | 4 | 2 |  0.02      | 19.0
    RoPE                      | 256 | 2 | 2 |  5.4       | 19.8
    RoPE                      | 128 | 4 | 4 |  0.1       |  8.9
    RoPE                      | 128 | 2 | 4 |  0.1       | 18.2
    RoPE                      | 128 | 4 | 2 |  0.02      | 17.3
    RoPE                      | 128 | 2 | 2 | 14.4       | 25.2
    CoPE                      | 256 | 4 | 4 |  0.03 (0.06) | 4.9 (4.4)
    CoPE                      | 256 | 2 | 4 |  0.0       | 13.2
    CoPE                      | 256 | 4 | 2 |  0.0       |  3.0
    CoPE                      | 256 | 2 | 2 |  0.0       | 14.6
    CoPE                      | 128 | 4 | 4 |  0.2       | 33.2
    CoPE                      | 128 | 2 | 4 |  0.03      | 22.3
    CoPE                      | 128 | 4 | 2 |  0.03      | 14.5
    CoPE                      | 128 | 2 | 2 |  0.02      | 24.5
    CoPE-MLP                  | 256 | 4 | 4 |  0.03      |  5.9
    CoPE-MLP in the first layer | 256 | 4 | 4 | 0.9      | 24.3
    CoPE-ALiBi, m[0] = 1      | 256 | 4 | 4 |  0.0 (0.0) | 11.4 (3.4)
    CoPE-ALiBi, m[0] = 1/2²   | 256 | 4 | 4 |  0.0 (0.0) |  8.7 (7.6)
    CoPE-ALiBi, m[0] = 1/2⁴   | 256 | 4 | 4 |  0.0 (0.0) | 17.1 (1.5)
    CoPE-ALiBi, m learned     | 256 | 4 | 4 |  0.0 (0.0) | 11.4 (4.0)
"""
# Parameters (M), validation and test perplexity.
TABLE_8 = """
    CoPE (no change)               | 123.7 | 22.55 | 23.46
    val-gates                      | 123.7 | 22.40 | 23.33
    sep-keys                       | 130.8 | 22.39 | 23.18
    Layers do not share embeddings | 123.7 | 22.56 | 23.58
    p_max 16                       | 123.7 | 22.45 | 23.22
    p_max 1024                     | 123.7 | 22.46 | 23.31
    CoPE-ALiBi                     | 123.7 | 24.16 | 25.09
"""
# 1, 3 and 5 variables; then weights of a pass of 50, 100 and 10.
TABLE_9 = """
    Absolute | 5.3 (0.8) | 67.6 (1.5) | 71.5 (1.5) | -         | -         | -
    Relative | 1.1 (0.4) | 17.8 (7.8) | 22.4 (5.1) | 1.1 (0.4) | 8.8 (1.1) | 34.1 (2.5)
    CoPE     | 0.0 (0.0) |  1.2 (2.1) |  7.4 (8.5) | 0.0 (0.0) | 0.0 (0.0) |  4.0 (4.1)
"""
TABLE_10 = """
    Absolute | 16.9 (3.7) |  25.6 (3.8) |  85.2 (8.4)
    RoPE     | 40.1 (3.5) | 100.0 (0.0) | 100.0 (0.0)
    CoPE     |  0.0 (0.0) |   0.0 (0.0) | 0.004 (0.006)
"""


def rows(table: str, labels: int = 1) -> dict[tuple[str, ...], list[Cell | None]]:
    """Labels → cells of each row of a table, of which the first `labels` columns are labels."""
    found = {}
    for line in table.strip().splitlines():
        parts = [part.strip() for part in line.split("|")]
        found[tuple(parts[:labels])] = [_cell(part) for part in parts[labels:]]
    return found


def _cell(text: str) -> Cell | None:
    if text == "-":
        return None
    value, std = re.fullmatch(r"([\d.]+)(?: \(([\d.]+)\))?", text).groups()
    return float(value), float(std) if std else None
