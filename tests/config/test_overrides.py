import itertools
import textwrap

import pytest

from cope_sweep.config import expand, with_overrides
from tests.helpers.ablation_texts import TEXT, error_of, load, located


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("model.dimm=3", ("unknown_key", "--set model.dimm=3", "model.dimm")),
        ("model.dim=wide", ("wrong_type", "--set model.dim=wide", "model.dim")),
        ("modl.dim=3", ("unknown_key", "--set modl.dim=3", "")),
        ("model.dim", ("invalid_assignment", "--set model.dim", "")),
        ("seeds=[]", ("invalid_value", "--set seeds=[]", "seeds")),
        ("seeds=0", ("invalid_value", "--set seeds=0", "")),
        ("seed=3", ("unknown_key", "--set seed=3", "")),
        ("plugins=[os]", ("unknown_key", "--set plugins=[os]", "")),
        ("model.dim=[", ("invalid_yaml", "--set model.dim=[:2", "")),
        ("resources.cpu=1", ("unknown_key", "--set resources.cpu=1", "resources.cpu")),
        ("model.layers.x=3", ("no_keys", "--set model.layers.x=3", "model.layers.x")),
        ("seeds.0=1", ("no_keys", "--set seeds.0=1", "")),
        ("train={lr: 0.5}", ("no_effect", "--set train={lr: 0.5}", "")),
        ("model={dim: 16, position: [rope]}", ("no_effect", "--set model={dim: 16, position: [rope]}", "")),
        ("+model.position=[cope]", ("no_effect", "--set +model.position=[cope]", "")),
        ("+train.batch=8", ("unknown_axis", "--set +train.batch=8", "")),
        ("+model.position", ("invalid_assignment", "--set +model.position", "")),
        ("+model.position=[cop]", ("unknown_kind", "--set +model.position=[cop]", "model.position[0]")),
        ("metrics=[{name: in_dist/los}]", ("unknown_metric", "--set metrics=[{name: in_dist/los}]", "metrics[0].name")),
    ],
)  # fmt: skip
def test_errors_name_the_option(assignment, expected):
    assert located(error_of(TEXT, assignments=[assignment])) == expected


@pytest.mark.parametrize(
    ("assignment", "meant"),
    [("trian.steps=100", "'train.steps'"), ("seed=7", "'seeds'"), ("Model.dim=8", "'model.dim'")],
)
def test_a_misspelt_beginning_of_a_key_is_recognised(assignment, meant):
    assert f"did you mean {meant}?" in str(error_of(TEXT, assignments=[assignment]))


def test_assignments_replace_base_and_axes():
    plan = expand(with_overrides(load(), assignments=["model.dim=16", "train.lr=1e-2", "seeds=[3]"]))
    assert [run.model.dim for run in plan.runs] == [16, 16]
    assert {run.train.lr for run in plan.runs} == {0.01}
    assert {run.seed for run in plan.runs} == {3}
    assert [row.name for row in plan.rows] == ["CoPE", "none"]


def test_values_that_do_not_go_together_name_the_options():
    expected = ("invalid_value", "--set model.dim=10, --set model.heads=4", "base.model")
    assert located(error_of(TEXT, assignments=["model.dim=10", "model.heads=4", "train.batch=8"])) == expected
    assert located(error_of(TEXT, assignments=["train.warmup=7"]))[1] == "--set train.warmup=7"


def test_a_later_assignment_replaces_earlier_ones_of_its_key_and_below():
    def dims(*assignments):
        plan = expand(with_overrides(load(), scale="wide", assignments=assignments))
        return {(run.model.dim, run.model.layers) for run in plan.runs}

    assert dims("model.dim=16", "model.dim=24") == {(24, 1)}
    assert dims("model.dim=16", "model={heads: 2}") == {(64, 2)}
    assert dims("model={heads: 2}", "model.dim=16") == {(16, 2)}


def test_published_numbers_are_those_of_the_row_that_results():
    """Also where the scale alone has a row that the paper does not have."""
    text = CONDITIONS.replace("wide: {set: {", "wide: {set: {train.lr: 5e-3, ").replace(
        ", grid: {train.lr: [5e-3]}", ""
    )
    for assignments, expected in ([], None), (["train.lr=2e-3"], 2.0), (["train.lr=1e-3"], 1.0):
        row = expand(with_overrides(load(text), scale="wide", assignments=assignments)).rows[0]
        assert (row.published and row.published.values["in_dist/token_error"]) == expected


def test_an_assignment_that_a_later_one_leaves_no_row_is_an_error():
    option = "--set model.position.cope.p_max=8"
    error = error_of(TEXT, assignments=["model.position.cope.p_max=8", "model.position=[rope]"])
    assert located(error) == ("no_effect", option, "")


@pytest.mark.parametrize(("number", "seeds"), [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3])])
def test_a_number_of_seeds(number, seeds):
    plan = expand(with_overrides(load(), assignments=[f"seeds={number}"]))
    assert [run.seed for run in plan.rows[0].runs] == seeds
    scaled = expand(with_overrides(load(), scale="wide", assignments=[f"seeds={number}"]))
    assert [run.seed for run in scaled.rows[0].runs] == [5 + seed for seed in seeds]


def test_a_mapping_replaces_what_no_row_assigns_below_it():
    plan = expand(with_overrides(load(), assignments=["train={batch: 8, lr: 0.5}", "train.lr=0.1"]))
    assert {(run.train.batch, run.train.lr) for run in plan.runs} == {(8, 0.1)}
    fields = TEXT.replace("model.position: {CoPE: [cope], none: []}", "model.position.cope.p_max: [4, 8]")
    plan = expand(with_overrides(load(fields), assignments=["model={dim: 16, position: [cope]}"]))
    assert {(run.model.dim, run.model.position[0].p_max) for run in plan.runs} == {(16, 4), (16, 8)}


@pytest.mark.parametrize(
    ("axis", "assignment"),
    [
        ("train.optimizer: [adamw, muon]", "train={optimizer: {kind: muon, momentum: 0.5}, batch: 8}"),
        ("train.tokens: [1000, 2000]", "train={steps: 7}"),
    ],
)
def test_a_mapping_with_a_part_that_rows_decide_is_an_error(axis, assignment):
    text = TEXT.replace("train.lr: [1e-3, 2e-3]", axis).replace("      train: {steps: 6}\n", "")
    assert located(error_of(text, assignments=[assignment])) == ("no_effect", f"--set {assignment}", "")


def test_a_plus_adds_a_row_to_those_of_the_axis():
    plan = expand(with_overrides(load(), assignments=["+model.position=[cope, rope]", "+train.lr=4e-3"]))
    labels = [tuple(row.labels.values()) for row in plan.rows]
    assert labels == list(itertools.product(["CoPE", "none", "cope+rope"], ["0.001", "0.002", "0.004"]))
    assert {run.run_id for run in expand(load()).runs} < {run.run_id for run in plan.runs}
    assert plan.ablation.replaced == (), "the rows of the file are as they were"
    without_axes = TEXT[: TEXT.index("grid:")] + TEXT[TEXT.index("seeds:") : TEXT.index("scales:")]
    plan = expand(with_overrides(load(without_axes), assignments=["model.position=[cope]", "+model.position=[rope]"]))
    assert [[each.kind for each in row.runs[0].model.position] for row in plan.rows] == [["cope"], ["rope"]]


def test_scales():
    plan = expand(with_overrides(load(), scale="wide"))
    assert {(run.model.dim, run.seed, run.train.lr) for run in plan.runs} == {(32, 5, 5e-3)}
    for text, allowed in ((TEXT, ["wide"]), (TEXT[: TEXT.index("scales")], [])):
        error = error_of(text, scale="huge")
        assert (error.code, error.data["scale"], error.data["allowed"]) == ("unknown_scale", "huge", allowed)


def test_a_scale_replaces_exclusions_and_published_numbers():
    text = TEXT + (
        "  same: {seeds: [0]}\n"
        "  other: {exclude: [], published: []}\n"
        "  third:\n"
        "    exclude: [{model.position: CoPE}]\n"
        "    published: [{match: {model.position: none}, values: {in_dist/token_error: 7.0}}]\n"
        "exclude: [{model.position: none}]\n"
        "published: [{match: {model.position: CoPE}, values: {in_dist/token_error: 3.0}}]\n"
    )

    def rows(scale):
        found = expand(with_overrides(load(text), scale=scale)).rows
        return [(row.name, row.published and row.published.values["in_dist/token_error"]) for row in found]

    assert rows(None) == rows("same") == [("CoPE · 0.001", 3.0), ("CoPE · 0.002", 3.0)]
    everything = ["CoPE · 0.001", "CoPE · 0.002", "none · 0.001", "none · 0.002"]
    assert rows("other") == [(name, None) for name in everything]
    assert rows("third") == [("none · 0.001", 7.0), ("none · 0.002", 7.0)]


def test_a_scale_keeps_the_figures_over_an_axis_that_it_sets_and_has():
    """The key is set by the scale that is inherited, and its axis comes from the scale that inherits."""
    figures = "figures: [{kind: values, x: train.lr, metrics: [in_dist/token_error]}]\n"
    text = TEXT.replace("wide: {set: {", "wide: {set: {train.lr: 3e-3, ") + figures
    assert "train.lr: 3e-3" in text
    wide = expand(with_overrides(load(text), scale="wide"))
    assert [figure.x for figure in wide.ablation.content.figures] == ["train.lr"]
    assert {run.train.lr for run in wide.runs} == {5e-3}
    fixed = expand(with_overrides(load(text), scale="wide", assignments=["train.lr=1e-2"]))
    assert fixed.ablation.content.figures == []


def test_assignments_win_over_the_scale():
    plan = expand(with_overrides(load(), scale="wide", assignments=["model.dim=16", "seeds=[7]"]))
    assert {(run.model.dim, run.seed, run.train.lr) for run in plan.runs} == {(16, 7, 5e-3)}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("grid: {train.lr: [5e-3]}", "grid: {train.lr: [5e-3, -1.0]}", ("invalid_value", "test.yaml:12", "train.lr")),
        ("model.dim: 32", "model.layers.x: 32", ("no_keys", "test.yaml:12", "model.layers.x")),
        ("model.dim: 32", "model.dimm: 32", ("unknown_key", "test.yaml:12", "model.dimm")),
        ("model.dim: 32", "seeds: [3]", ("seed_in_row", "test.yaml:12", "scales.wide.set.seeds")),
        ("model.dim: 32", "train: {steps: 3, lr: 1}", ("no_effect", "test.yaml:12", "scales.wide.set.train")),
        ("wide: {", "wide: {metrics: [{name: dense/los}], ", ("unknown_metric", "test.yaml:12", "metrics[0].name")),
    ],
)  # fmt: skip
def test_errors_in_a_scale_name_its_line(before, after, expected):
    assert located(error_of(TEXT.replace(before, after), scale="wide")) == expected


CONDITIONS = TEXT.replace("train.lr: [1e-3, 2e-3]", "train.lr: {slow: 1e-3, fast: 2e-3}") + textwrap.dedent("""\
    published:
      - {match: {train.lr: slow, model.position: CoPE}, values: {in_dist/token_error: 1.0}}
      - {match: {train.lr: fast, model.position: CoPE}, values: {in_dist/token_error: 2.0}}
    exclude: [{train.lr: fast, model.position: none}]
    when: [{if: {train.lr: [slow, fast]}, set: {train.steps: 7}}, {if: {train.lr: slow}, set: {train.batch: 3}}]
    """)


@pytest.mark.parametrize(
    ("lr", "rows", "published", "steps", "batch"),
    [("2e-3", ["CoPE"], [2.0], 7, 64), ("1e-3", ["CoPE", "none"], [1.0], 7, 3), ("5e-3", ["CoPE", "none"], [], 6, 64)],
)
def test_conditions_on_an_axis_apply_where_its_key_is_assigned(lr, rows, published, steps, batch):
    plan = expand(with_overrides(load(CONDITIONS), assignments=[f"train.lr={lr}"]))
    assert [row.labels["model.position"] for row in plan.rows] == rows
    assert [each for row in plan.rows if row.published for each in row.published.values.values()] == published
    assert {(run.train.steps, run.train.batch) for run in plan.runs} == {(steps, batch)}


@pytest.mark.parametrize("value", ["[cope]", "[{kind: cope}]"])
def test_a_value_in_any_spelling_is_the_row_of_the_file(value):
    text = TEXT + "when: [{if: {model.position: CoPE}, set: {train.batch: 3}}]\n"
    plan = expand(with_overrides(load(text), assignments=[f"model.position={value}"]))
    assert {run.train.batch for run in plan.runs} == {3}


def test_errors_about_later_conditions_keep_their_line():
    text = CONDITIONS + "  - {if: {model.positoin: CoPE}, set: {train.batch: 5}}\n"
    text = text.replace(
        "when: [{if: {train.lr: [slow, fast]}, set: {train.steps: 7}}, {if: {train.lr: slow}, set: {train.batch: 3}}]",
        "when:\n  - {if: {train.lr: slow}, set: {train.batch: 3}}",
    )
    line = 1 + text[: text.index("model.positoin")].count("\n")
    error = error_of(text, assignments=["train.lr=2e-3"])
    assert located(error) == ("unknown_axis", f"test.yaml:{line}", "when[1].if.model.positoin")


def test_the_loaded_ablation_is_left_alone():
    loaded = load(CONDITIONS)
    before = loaded.content.model_dump()
    with_overrides(loaded, scale="wide", assignments=["model.heads=4", "train.lr=2e-3", "resources.cpus=3"])
    assert loaded.content.model_dump() == before
    assert loaded.content == load(CONDITIONS).content
    assert loaded.source == load(CONDITIONS).source
