import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.config.keys import set_key
from cope_sweep.config.source import SpecError, parse_source, read_source


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
    ("text", "message"),
    [
        ("a: [1, 2\nb: 3\n", r"f:\d: not valid YAML"),
        ("a: 1\na: 2\n", "f:2: not valid YAML.*a"),
        ("- 1\n", "f: expected a mapping"),
        ("", "f: expected a mapping"),
        ("a: .nan\n", "f:1: a: .*not text, a number"),
        ("a: 2024-01-01\n", "f:1: a: 2024-01-01 is not text, a number"),
        ("1: x\n", "key 1 is not text"),
        ("a: !!python/object/apply:os.system [ls]\n", "f:1: a: the YAML tag .*is not supported; remove it"),
        ("a: !!python/name:os.system x\n", "f:1: a"),
        (
            "a: &a [1, 2]\n"
            + "".join(f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True)),
            "too large",
        ),
        ("\t\n", "not valid YAML|expected a mapping"),
        ("a: *b\n", "f:1: not valid YAML: found undefined alias 'b'"),
        ("a: &a [*a]\n", "too deep"),
        ("a: 1\n---\nb: 2\n", "f:2: not valid YAML: more than one document"),
        ("a: &a {x: 1}\nb: {<<: *a}\n", "f:2: merge keys .* are not supported"),
        ("? [1]\n: 2\n", "f:1: .*key a sequence is not text"),
        ("a: 1e400\n", "f:1: a: 1e400 is not text, a number"),
        ("a: \udcff\n", "f: not valid YAML: no Unicode text"),
        ("a: \x01\n", "f: not valid YAML: unacceptable character"),
    ],
)
def test_invalid_files_are_refused_with_the_line(text, message):
    with pytest.raises(SpecError, match=message):
        parse_source(text, "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "{b: " * 3000, "test.yaml:1: not valid YAML: more than 30 levels"),
        ("a: " + "[" * 20_000, "test.yaml:1: not valid YAML: more than 30 levels"),
        ("a: " + "1" * 20_000, "test.yaml:1: a: the number has too many digits"),
        ("a: 0x" + "f" * 20_000, "test.yaml:1: a: the number has too many digits"),
        ("a: " + "9" * 4000, "test.yaml:1: a: the number has too many digits"),
        ("a: [" + "1, " * 25_000 + "]", "test.yaml: not valid YAML: more than 30 levels or 20,000 values"),
        ("a: [" + "1, " * 200_000 + "]", "test.yaml: 600,005 characters; a declaration has at most 200,000"),
    ],
)
def test_the_size_of_a_text_is_bounded_before_it_is_parsed(text, message):
    with pytest.raises(SpecError) as refused:
        parse_source(text, "test.yaml")
    assert message in str(refused.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        read_source(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="Is a directory"):
        read_source(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(SpecError, match="not UTF-8"):
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
    for key, message in (("train.lr", "train is 3, which has no keys"), ("model.dim", "model is null")):
        with pytest.raises(ValueError, match=message):
            set_key(data, key, 64)
    assert data == {"task": {"kind": "flip_flop", "length": 64}, "train": 3, "model": None}


@given(st.text(st.sampled_from("-+0123456789abefox_.: ~'\"[]{},&*!<\n#|>%@`\ud800é"), max_size=40))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(SpecError):
        json.dumps(parse_source(text, "f").data, allow_nan=False)
