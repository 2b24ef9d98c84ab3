import pytest

from cope_sweep.spec.source import SpecError, dotted, parse_source, parse_value, read_source


def test_yaml_1_2_scalars():
    data = parse_source("a: 1e-3\nb: on\nc: no\nd: 0o10\ne: true\nf: ~\ng: 1.0\n", "f").data
    assert data == {"a": 0.001, "b": "on", "c": "no", "d": 8, "e": True, "f": None, "g": 1.0}


def test_lines_of_keys_and_items():
    source = parse_source("a:\n  b: 1\n  c:\n    - x\n    - y: 2\n", "f.yaml")
    assert source.place(("a", "b")) == "f.yaml:2"
    assert source.place(("a", "c", 1, "y")) == "f.yaml:5"
    assert source.place(("a", "c", 1, "unknown")) == "f.yaml:5"
    assert source.place(("z",)) == "f.yaml"


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
        ("a: !!python/object/apply:os.system [ls]\n", "f:1: a: the YAML tag .*has no meaning"),
        ("a: !!python/name:os.system x\n", "f:1: a"),
        (
            "a: &a [1, 2]\n"
            + "".join(f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True)),
            "too large",
        ),
        ("\t\n", "not valid YAML|expected a mapping"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_line(text, message):
    with pytest.raises(SpecError, match=message):
        parse_source(text, "f")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SpecError, match="No such file"):
        read_source(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="Is a directory"):
        read_source(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(SpecError, match="not UTF-8"):
        read_source(tmp_path / "latin.yaml")


def test_values_of_options():
    assert parse_value("[cope, {kind: rope}]", "--set x") == ["cope", {"kind": "rope"}]
    assert parse_value("1e-3", "--set x") == 0.001


def test_dotted():
    assert dotted(("model", "position", 0, "p_max")) == "model.position[0].p_max"
