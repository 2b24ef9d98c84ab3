"""`inherit`: what a file takes from another, and what is refused."""

import textwrap
from pathlib import Path

import pytest

from cope_sweep.config import SpecError, expand, load_ablation, with_overrides
from cope_sweep.config.loading import validate
from cope_sweep.config.source import parse_source, read_source
from tests.helpers.ablation_texts import TEXT, located
from tests.helpers.errors import raises

FIGURE = "figures: [{kind: curves, metrics: [in_dist/token_error]}]\n"


@pytest.fixture
def load(tmp_path):
    """Writes ablation files and loads the first of them."""

    def write_and_load(**texts):
        for name, text in {"parent": TEXT + FIGURE, **texts}.items():
            (tmp_path / f"{name}.yaml").write_text(textwrap.dedent(text))
        return load_ablation(tmp_path / f"{next(iter(texts))}.yaml")

    return write_and_load


def error_of(load, **texts):
    with pytest.raises(SpecError) as caught:
        expand(load(**texts))
    return caught.value


def test_everything_but_the_description_is_inherited(load):
    child = load(child="title: Mine\ninherit: parent\n")
    parent = load(parent=TEXT + FIGURE)
    assert child.content == parent.content.model_copy(update={"title": "Mine", "inherit": "parent", "figures": []})
    assert (child.name, [path.name for path in child.source.parents]) == ("child", ["parent.yaml"])


def test_runs_of_both_files_are_the_same_runs(load):
    """So they are trained once: a run is found by its id."""
    child = load(child="title: Mine\ninherit: parent\ngrid: {train.lr: [2e-3, 4e-3]}\nseeds: [1, 2]\n")
    parent = expand(load(parent=TEXT))
    common = {run.run_id for run in expand(child).runs} & {run.run_id for run in parent.runs}
    assert common == {run.run_id for run in parent.runs if run.train.lr == 2e-3 and run.seed == 1}
    assert len(common) == 2
    wide = {run.run_id for run in expand(with_overrides(child, scale="wide")).runs}
    assert wide == {run.run_id for run in expand(with_overrides(load(parent=TEXT), scale="wide")).runs}


def test_mappings_merge_by_key_and_the_rest_is_replaced(load):
    content = load(
        child="""\
            title: Mine
            inherit: parent
            base: {model: {dim: 16}, train: {clip: null}}
            grid: {model.position: {none: []}, model.layers: [1, 2]}
            metrics: [{name: sparse/token_error}]
            scales:
              wide: {set: {train.batch: 8}}
              tiny: {set: {train.steps: 1}}
        """
    ).content
    assert content.base["model"] == {"dim": 16, "heads": 2, "layers": 1}
    assert content.base["train"] == {"steps": 6, "clip": None}
    assert content.grid == {"model.position": {"none": []}, "train.lr": [1e-3, 2e-3], "model.layers": [1, 2]}
    assert [metric.name for metric in content.metrics] == ["sparse/token_error"]
    assert content.scales["wide"].set == {"model.dim": 32, "train.batch": 8}
    assert content.scales["wide"].seeds == [5]
    assert content.scales["tiny"].set == {"train.steps": 1}


def test_a_mapping_of_another_kind_is_replaced(load):
    content = load(child="title: T\ninherit: parent\nbase: {task: {kind: flip_flop, pairs: 4}}\n").content
    assert content.base["task"] == {"kind": "flip_flop", "pairs": 4}
    content = load(child="title: T\ninherit: parent\nbase: {task: {kind: selective_copy, blanks: 3}}\n").content
    assert content.base["task"] == {
        "kind": "selective_copy", "tokens": 2, "blanks": 3, "dense_blanks": 1, "sparse_blanks": 4,
    }  # fmt: skip


def test_null_removes_an_axis_or_a_scale(load):
    content = load(child="title: T\ninherit: parent\ngrid: {train.lr: null}\nscales: {wide: null}\n").content
    assert list(content.grid) == ["model.position"]
    assert content.scales == {}
    content = load(child="title: T\ninherit: parent\nscales: {wide: {grid: {train.lr: null}}}\n").content
    assert content.scales["wide"].grid == {}


@pytest.mark.parametrize("key", ["grid: {train.lrs", "scales: {wied", "scales: {wide: {grid: {model.dim"])
def test_null_for_what_is_not_inherited_is_an_error(load, tmp_path, key):
    error = error_of(load, child=f"title: T\ninherit: parent\n{key}: null{'}' * key.count('{')}\n")
    path = key.replace("{", "").replace(": ", ".")
    assert located(error) == ("unknown_key", f"{tmp_path / 'child.yaml'}:3", path)


@pytest.mark.parametrize(
    ("inherited", "own", "merged"),
    [
        ("{kind: muon, momentum: 0.5}", "muon", {"kind": "muon", "momentum": 0.5}),
        ("muon", "{momentum: 0.5}", {"kind": "muon", "momentum": 0.5}),
        ("{kind: muon, momentum: 0.5}", "adamw", "adamw"),
    ],
)
def test_a_text_is_a_kind(load, inherited, own, merged):
    parent = TEXT.replace("steps: 6", f"optimizer: {inherited}")
    child = f"title: T\ninherit: parent\nbase: {{train: {{optimizer: {own}}}}}\n"
    assert load(child=child, parent=parent).content.base["train"]["optimizer"] == merged


def test_an_inherited_error_names_both_files(load, tmp_path):
    error = error_of(
        load, child="title: C\ninherit: middle\n", middle="title: M\ninherit: parent\nbase: {model: {dims: 16}}\n"
    )
    middle, child = tmp_path / "middle.yaml", tmp_path / "child.yaml"
    assert located(error) == ("unknown_key", f"{middle}:3 (inherited by {child}:2)", "base.model.dims")


def test_an_error_of_the_merged_file_names_the_line_that_was_written(load, tmp_path):
    """The value of the child is not valid with the rest, which is inherited."""
    error = error_of(load, child="title: C\ninherit: parent\nbase:\n  model:\n    heads: 3\n")
    assert located(error) == ("invalid_value", f"{tmp_path / 'child.yaml'}:4", "base.model")
    assert (error.data["key"], error.data["value"]) == ("model.heads", 3)


def test_the_line_of_a_replaced_key_is_that_of_the_child(load, tmp_path):
    child = load(child="title: C\ninherit: parent\nseeds: [1]\n")
    assert child.source.location(("seeds", 0)) == f"{tmp_path / 'child.yaml'}:3"
    assert child.source.location(("seeds", 1)) == f"{tmp_path / 'child.yaml'}:3"


@pytest.mark.parametrize(
    ("value", "code"), [("parents", "no_such_file"), ("../parent", "invalid_name"), ("child", "invalid_name")]
)
def test_the_ablation_that_chose_the_recipe_is_a_file_in_the_folder(load, tmp_path, value, code):
    assert load(child="title: C\ninherit: parent\ntuned: parent\n").content.tuned == "parent"
    error = error_of(load, child=f"title: C\ninherit: parent\ntuned: {value}\n")
    assert located(error) == (code, f"{tmp_path / 'child.yaml'}:3", "tuned")


@pytest.mark.parametrize(
    ("value", "code", "data"),
    [
        ("parents", "no_such_file", {"allowed": ["child", "parent"]}),
        ("../parent", "invalid_name", {"name": "../parent"}),
        ("/etc/passwd", "invalid_name", {"name": "/etc/passwd"}),
        ("parent.yaml", "invalid_name", {"name": "parent.yaml"}),
        ("''", "invalid_name", {"name": ""}),
        ("[parent]", "invalid_name", {"name": ["parent"]}),
        ("child", "circular_inheritance", {"names": ["child", "child"]}),
    ],
)
def test_other_names_are_refused(load, tmp_path, value, code, data):
    error = error_of(load, child=f"title: C\ninherit: {value}\n")
    assert located(error) == (code, f"{tmp_path / 'child.yaml'}:2", "inherit")
    assert error.data | data == error.data


def test_a_circle_is_refused(load, tmp_path):
    error = error_of(load, a="title: A\ninherit: b\n", b="title: B\ninherit: c\n", c="title: C\ninherit: a\n")
    assert located(error) == ("circular_inheritance", f"{tmp_path / 'c.yaml'}:2", "inherit")
    assert error.data["names"] == ["a", "b", "c", "a"]


def test_a_faulty_parent_is_named_with_its_heir(load, tmp_path):
    error = error_of(load, child="title: C\ninherit: broken\n", broken="title: [\n")
    assert located(error) == ("invalid_yaml", f"{tmp_path / 'broken.yaml'}:2", "")
    assert error.data["heir"] == f"{tmp_path / 'child.yaml'}:2"


def test_a_text_without_folder_reads_no_file():
    source = parse_source("title: C\ninherit: parent\n", "request")
    with raises("no_folder", place="request:2", key_path="inherit", name="parent"):
        validate(source, "sent")


def test_plugins_are_inherited_and_can_be_refused(load, tmp_path):
    text = TEXT.replace("seeds: [0, 1]", "plugins: [no_such_plugin]")
    (tmp_path / "parent.yaml").write_text(text)
    (tmp_path / "child.yaml").write_text("title: C\ninherit: parent\n")
    source = read_source(tmp_path / "child.yaml")
    place = f"{tmp_path / 'parent.yaml'}:9 (inherited by {tmp_path / 'child.yaml'}:2)"
    with raises("plugins_refused", place=place, plugins=["no_such_plugin"]):
        validate(source, "child", folder=tmp_path, allow_plugins=False)


def test_a_relative_path_is_found_from_its_folder(load, tmp_path, monkeypatch):
    load(child="title: C\ninherit: parent\n")
    monkeypatch.chdir(tmp_path)
    assert load_ablation(Path("child.yaml")).content.seeds == [0, 1]
