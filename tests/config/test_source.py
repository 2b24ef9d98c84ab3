import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.config.keys import set_key
from cope_sweep.config.source import SpecError, parse_source, read_source
from tests.helpers.ablation_texts import located
from tests.helpers.errors import raises


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10), ("-0x1f", -31), ("+12", 12), ("0b11", 3), ("1_0.5", 10.5), (".5", 0.5), ("1.", 1.0), ("-.5e3", -500.0),
        ("12:30", "12:30"), ("0o8", "0o8"), ("_1", "_1"), ("1.2.3", "1.2.3"), ("'1'", "1"), ('"true"', "true"), ("", None),
        ("1e-3", 0.001), ("on", "on"), ("no", "no"), ("0o10", 8), ("~", None),
        ("0x_", "0x_"), ("0b__", "0b__"), ("0x_f", 15), ("2024-1-1x", "2024-1-1x"), ("NULL", None), ("True", True), ("yes", "yes"), (".", "."),
    ],
)  # fmt: skip
def test_plain_scalars(text, value):
    found = parse_source(f"a: {text}\n", "f").data["a"]
    assert (found, type(found)) == (value, type(value))


def test_lines_of_keys_and_items():
    source = parse_source("a:\n  b: 1\n  c:\n    - x\n    - y: 2\n", "f.yaml")
    assert source.location(("a", "b")) == "f.yaml:2"
    assert source.location(("a", "c", 1, "y")) == "f.yaml:5"
    assert source.location(("a", "c", 1, "unknown")) == "f.yaml:5"
    assert source.location(("z",)) == "f.yaml"


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("a: 2024-01-01\n", 'quote it: "2024-01-01"'),
        ("1.10: x\n", "key 1.10 is not text; quote it"),
        ("a:\n\tb: 1\n", "a tab; YAML indents with spaces"),
        ("\ta: 1\n", "a tab; YAML indents with spaces"),
        ("a:\n  b: 1\n\tc: 2\n", "a tab; YAML indents with spaces"),
        ("a: {lr: 1,5}\n", "write it with a point: 1.5"),
    ],
)
def test_what_yaml_reads_differently_than_it_looks_comes_with_advice(text, advice):
    with pytest.raises(SpecError) as refused:
        parse_source(text, "f")
    assert advice in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2\nb: 3\n", ("invalid_yaml", "f:2", "")),
        ("a: 1\na: 2\n", ("duplicate_key", "f:2", "")),
        ("- 1\n", ("not_a_mapping", "f", "")),
        ("", ("not_a_mapping", "f", "")),
        ("a: .nan\n", ("not_json", "f:1", "a")),
        ("a: 2024-01-01\n", ("not_json", "f:1", "a")),
        ("1: x\n", ("key_not_text", "f:1", "")),
        ("a: !!python/object/apply:os.system [ls]\n", ("yaml_tag", "f:1", "a")),
        ("a: !!python/name:os.system x\n", ("yaml_tag", "f:1", "a")),
        (
            "a: &a [1, 2]\n"
            + "".join(f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True)),
            ("too_large", "f:1", "e[7][5]"),
        ),
        ("\t\n", ("invalid_yaml", "f:1", "")),
        ("a: {b: 1,5}\n", ("decimal_comma", "f:1", "a")),
        ("a: {b: 1,5, c: 2}\n", ("decimal_comma", "f:1", "a")),
        ("a: {b: 1, 5: x}\n", ("key_not_text", "f:1", "a")),
        ("a: *b\n", ("invalid_yaml", "f:1", "")),
        ("a: &a [*a]\n", ("too_large", "f:1", "a[0][0]")),
        ("a: 1\n---\nb: 2\n", ("invalid_yaml", "f:2", "")),
        ("a: &a {x: 1}\nb: {<<: *a}\n", ("merge_key", "f:2", "")),
        ("? [1]\n: 2\n", ("key_not_text", "f:1", "")),
        ("a: 1e400\n", ("not_json", "f:1", "a")),
        ("a: \udcff\n", ("invalid_yaml", "f", "")),
        ("a: \x01\n", ("invalid_yaml", "f", "")),
    ],
)
def test_invalid_files_are_refused_with_the_line(text, expected):
    with pytest.raises(SpecError) as refused:
        parse_source(text, "f")
    assert located(refused.value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: " + "{b: " * 3000, ("too_large", "test.yaml:1", "")),
        ("a: " + "[" * 20_000, ("too_large", "test.yaml:1", "")),
        ("a: " + "1" * 20_000, ("too_many_digits", "test.yaml:1", "a")),
        ("a: 0x" + "f" * 20_000, ("too_many_digits", "test.yaml:1", "a")),
        ("a: " + "9" * 4000, ("too_many_digits", "test.yaml:1", "a")),
        ("a: [" + "1, " * 25_000 + "]", ("too_large", "test.yaml", "")),
        ("a: [" + "1, " * 200_000 + "]", ("too_large", "test.yaml", "")),
    ],
)
def test_the_size_of_a_text_is_bounded_before_it_is_parsed(text, expected):
    with pytest.raises(SpecError) as refused:
        parse_source(text, "test.yaml")
    assert located(refused.value) == expected


def test_unreadable_files(tmp_path):
    with raises("no_such_file", place=str(tmp_path / "none.yaml")):
        read_source(tmp_path / "none.yaml")
    with raises("unreadable_file", place=str(tmp_path)):
        read_source(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    with raises("not_utf8", place=str(tmp_path / "latin.yaml")):
        read_source(tmp_path / "latin.yaml")


def test_values_are_plain_data():
    """Also of anchors, hexadecimal numbers, quotes and blocks."""
    text = "a: &b true\nc: *b\nd: 0x1F\ne: 1_000\nf: 'x'\ng: |\n  y\nh: &i 2.50\nj: {k: *i}\nl: [&m 3, *m]\n"
    data = parse_source(text, "f").data
    assert data == {
        "a": True,
        "c": True,
        "d": 31,
        "e": 1000,
        "f": "x",
        "g": "y\n",
        "h": 2.5,
        "j": {"k": 2.5},
        "l": [3, 3],
    }
    values = [*data.values(), data["j"]["k"], *data["l"], *data]
    assert all(isinstance(value, (bool, int, float, str, dict, list)) for value in values)


def test_set_key_copies_what_other_data_may_share():
    shared = {"dim": 8}
    data = {"model": shared, "train": 3}
    set_key(data, "model.dim", 16)
    set_key(data, "evaluate.windows.every", 5)
    set_key(data, "seed", 1)
    set_key(data, "train", 4)
    assert data == {"model": {"dim": 16}, "train": 4, "evaluate": {"windows": {"every": 5}}, "seed": 1}
    assert shared == {"dim": 8}


def test_set_key_reads_text_as_a_kind_and_refuses_what_cannot_hold_keys():
    data = {"task": "flip_flop", "train": 3, "model": None}
    set_key(data, "task.length", 64)
    for key, parent, value in (("train.lr", "train", 3), ("model.dim", "model", None)):
        with raises("no_keys", key=parent, value=value):
            set_key(data, key, 64)
    assert data == {"task": {"kind": "flip_flop", "length": 64}, "train": 3, "model": None}


@given(st.text(st.sampled_from("-+0123456789abefox_.: ~'\"[]{},&*!<\n#|>%@`\ud800é"), max_size=40))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(SpecError):
        json.dumps(parse_source(text, "f").data, allow_nan=False)
