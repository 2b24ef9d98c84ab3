"""Axes of the fields of encodings (`model.position.cope.p_max`), and overrides that cannot act."""

import itertools
import json
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.config import RunSpec, SpecError, expand, plan_of_recorded, row_of, with_overrides
from cope_sweep.config.points import dimensions_of, parameters_of
from tests.helpers.ablation_texts import BASE, load, located
from tests.helpers.errors import raises

POSITION = "model.position: {CoPE: [cope], RoPE: [rope]}"
P_MAX = "model.position.cope.p_max"


def plan(text, **overrides):
    return expand(with_overrides(load(BASE + textwrap.dedent(text)), **overrides))


def rows(text, **overrides):
    return [row.name for row in plan(text, **overrides).rows]


def error_of(text, **overrides):
    with pytest.raises(SpecError) as caught:
        plan(text, **overrides)
    return caught.value


def positions(found):
    """The encodings of each row: `cope` with its p_max."""
    return [[(each.kind, getattr(each, "p_max", None)) for each in row.runs[0].model.position] for row in found.rows]


# -- axes --


@pytest.mark.parametrize(
    "text",
    [
        f"grid: {{{POSITION}, {P_MAX}: [8, 64]}}",
        f"grid: {{{P_MAX}: [8, 64], {POSITION}}}",
        f"grid: {{{POSITION}}}\nwhen: [{{if: {{model.position: CoPE}}, grid: {{{P_MAX}: [8, 64]}}}}]",
        f"grid: {{{POSITION}}}\nwhen: [{{if: {{}}, grid: {{{P_MAX}: [8, 64]}}}}]",
        f"grid: {{{POSITION}}}\nsearch: {{kind: random, samples: 99, space: {{{P_MAX}: {{choice: [8, 64]}}}}}}",
    ],
)
def test_rows_without_the_encoding_are_not_repeated(text):
    found = plan(text)
    expected = {
        "CoPE · p_max 8": {"model.position": "CoPE", P_MAX: "8"},
        "CoPE · p_max 64": {"model.position": "CoPE", P_MAX: "64"},
        "RoPE": {"model.position": "RoPE"},
    }
    assert {row.name: row.labels for row in found.rows} == expected
    assert sorted(map(str, positions(found))) == sorted(map(str, [[("cope", 8)], [("cope", 64)], [("rope", None)]]))
    assert found.axes == {"model.position": "position", P_MAX: "p_max"}


def test_the_runs_are_those_of_lists():
    fields = plan(f"grid: {{{POSITION}, {P_MAX}: [8, 64, full]}}")
    lists = plan(
        "grid: {model.position: {a: [{kind: cope, p_max: 8}], b: [cope], c: [{kind: cope, p_max: full}], d: [rope]}}"
    )
    assert {run.run_id for run in fields.runs} == {run.run_id for run in lists.runs}


def test_rows_are_in_the_order_of_the_file():
    text = f"grid: {{model.layers: [1, 2], {POSITION}, {P_MAX}: [8, 16], train.lr: [1e-3, 2e-3]}}"
    found = plan(text)
    assert list(found.axes.values()) == ["layers", "position", "p_max", "lr"]
    assert [row.name for row in found.rows][:6] == [
        "1 · CoPE · p_max 8 · 0.001",
        "1 · CoPE · p_max 8 · 0.002",
        "1 · CoPE · p_max 16 · 0.001",
        "1 · CoPE · p_max 16 · 0.002",
        "1 · RoPE · 0.001",
        "1 · RoPE · 0.002",
    ]


def test_labels_and_short_names():
    text = "grid: {model.position: {both: [cope, relative]}, %s: {few: 4}, model.position.relative.std: [0.5, 0.1]}"
    assert rows(text % P_MAX) == ["both · few · std 0.5", "both · few · std 0.1"]
    keys = "model.position.cope.per_head: [true], model.position.relative.per_head: [true]"
    found = plan(f"grid: {{model.position: [[cope, relative]], {keys}}}")
    assert list(found.axes.values()) == ["position", "cope.per_head", "relative.per_head"]
    assert [row.name for row in found.rows] == ["cope+relative · cope.per_head true · relative.per_head true"]


def test_the_list_may_be_in_the_base():
    text = BASE.replace("layers: 1}", "layers: 1, position: [cope, {kind: relative, std: 0.5}]}")
    found = expand(load(f"{text}grid: {{{P_MAX}: [8, 16]}}\n"))
    assert [row.name for row in found.rows] == ["p_max 8", "p_max 16"]
    assert positions(found) == [[("cope", n), ("relative", None)] for n in (8, 16)]
    assert {row.runs[0].model.position[1].std for row in found.rows} == {0.5}


def test_encodings_of_one_kind_are_named_by_their_places():
    twice = "[{kind: cope, layers: [0]}, {kind: cope, layers: [1]}]"
    found = plan(f"grid: {{model.layers: [2], model.position: [{twice}], model.position.1.p_max: [8, 16]}}")
    assert positions(found) == [[("cope", 64), ("cope", n)] for n in (8, 16)]
    error = error_of(f"grid: {{model.layers: [2], model.position: [{twice}], {P_MAX}: [8, 16]}}")
    assert (error.code, error.data["key"]) == ("no_effect", P_MAX)


def test_conditions_know_fields():
    grid = f"grid: {{{POSITION}, {P_MAX}: [8, 16, 64]}}\n"
    assert rows(f"{grid}exclude: [{{{P_MAX}: [8, 16]}}]") == ["CoPE · p_max 64", "RoPE"]
    found = plan(f"{grid}when: [{{if: {{{P_MAX}: 8}}, set: {{train.lr: 5e-3}}}}]").rows
    assert [row.runs[0].train.lr for row in found] == [5e-3, 1e-3, 1e-3, 1e-3]
    published = f"published: [{{match: {{{P_MAX}: 16}}, values: {{in_dist/token_error: 1.0}}}}]"
    assert [row.published is not None for row in plan(grid + published).rows] == [False, True, False, False]


def test_conditions_know_fields_of_lists_and_their_defaults():
    grid = "grid: {model.position: {few: [{kind: cope, p_max: 8}], CoPE: [cope], RoPE: [rope]}}\n"
    assert rows(f"{grid}exclude: [{{{P_MAX}: 8}}]") == ["CoPE", "RoPE"]
    assert rows(f"{grid}exclude: [{{{P_MAX}: [64]}}]") == ["few", "RoPE"]
    assert error_of(f"{grid}exclude: [{{model.position.cope.pmax: 8}}]").code == "unknown_axis"


@pytest.mark.parametrize(
    "text",
    [
        BASE.replace("layers: 1}", "layers: 1, position: [{kind: cope, p_max: 8}]}"),
        BASE.replace("  model: {dim: 8, heads: 2, layers: 1}\n", "")
        + "grid: {model: {a: {dim: 8, heads: 2, position: [{kind: cope, p_max: 8}]}}}\n",
    ],
)
def test_conditions_know_fields_of_the_base_and_of_sections(text):
    found = expand(load(f"{text}when: [{{if: {{{P_MAX}: 8}}, set: {{train.lr: 0.5}}}}]\n"))
    assert {run.train.lr for run in found.runs} == {0.5}


def test_a_condition_may_change_which_encodings_a_row_has():
    text = f"""
        grid: {{{POSITION}, {P_MAX}: [8, 16], model.layers: [1, 2]}}
        when:
          - {{if: {{model.position: CoPE, model.layers: 2}}, set: {{model.position: [alibi]}}}}
          - {{if: {{model.position: RoPE, model.layers: 2}}, set: {{model.position: [cope]}}}}
        """
    found = plan(text)
    assert sorted(map(str, positions(found))) == sorted(
        map(str, [[("cope", 8)], [("cope", 16)], [("rope", None)], [("cope", 8)], [("cope", 16)], [("alibi", None)]])
    )


def test_a_field_that_other_rows_have_is_not_proposed_in_its_own_place():
    error = error_of(f"grid: {{{POSITION}}}\nwhen: [{{if: {{model.position: RoPE}}, set: {{{P_MAX}: 8}}}}]")
    assert P_MAX in error.data["allowed"]
    assert "did you mean" not in str(error)


def test_a_deeper_key_refines_whatever_the_order():
    text = "grid: {task.tokens: [3, 4], task: {copy: {kind: selective_copy, blanks: 5, dense_blanks: 1, sparse_blanks: 9}}}"
    base = BASE.replace("  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}\n", "")
    found = expand(load(f"{base}{text}\n"))
    assert [(run.task.tokens, run.task.blanks) for run in found.runs] == [(3, 5), (4, 5)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"grid: {{{POSITION}, model.position.cop.p_max: [8]}}", ("no_effect", "test.yaml:6", "grid.model.position.cop.p_max")),
        (f"grid: {{{POSITION}, model.position.0.p_max: [8]}}", ("no_effect", "test.yaml:6", "grid.model.position.0.p_max")),
        (f"grid: {{{POSITION}}}\nwhen: [{{if: {{model.position: RoPE}}, set: {{{P_MAX}: 8}}}}]", ("no_effect", "test.yaml:7", "when[0].set.model.position.cope.p_max")),
        (f"grid: {{{P_MAX}: [8]}}", ("no_effect", "test.yaml:6", "grid.model.position.cope.p_max")),
        (f"grid: {{{POSITION}, model.position.cope.pmax: [8]}}", ("unknown_key", "test.yaml:6", "model.position.cope.pmax")),
        (f"grid: {{{POSITION}, {P_MAX}: [8, many]}}", ("wrong_type", "test.yaml:6", "model.position.cope.p_max")),
        (f"grid: {{{POSITION}, {P_MAX}.x: [8]}}", ("wrong_type", "test.yaml:6", "model.position.cope.p_max")),
        (f"grid: {{{POSITION}, model.position.cope: [8]}}", ("no_field", "test.yaml:6", "model.position.cope")),
        (f"grid: {{{POSITION}}}\nsearch: {{kind: random, samples: 2, space: {{model.position.alibi.learned: {{choice: [true]}}}}}}", ("no_effect", "test.yaml:7", "search.space.model.position.alibi.learned")),
    ],
)  # fmt: skip
def test_errors_name_line_and_key(text, expected):
    assert located(error_of(text)) == expected


def test_an_error_about_a_field_lists_those_there_are():
    error = error_of(f"grid: {{{POSITION}, model.position.cop.p_max: [8]}}")
    assert P_MAX in error.data["allowed"]
    assert P_MAX in str(error)


ENCODINGS = [["cope"], ["rope"], ["cope", "relative"], [{"kind": "cope", "p_max": 4}, "rope"], []]
FIELDS = {
    "model.position.cope.p_max": [2, 8, "full"],
    "model.position.cope.gate": ["keys", "values", "separate"],
    "model.position.relative.per_head": [True, False],
    "model.position.rope.base": [100.0, 1000.0],
    "train.lr": [1e-3, 2e-3],
    "model.layers": [1, 2],
}


@given(
    lists=st.lists(st.sampled_from(ENCODINGS), min_size=1, max_size=3, unique_by=json.dumps),
    axes=st.lists(st.sampled_from(list(FIELDS)), max_size=4, unique=True),
    place=st.integers(0, 4),
    excluded=st.lists(st.sampled_from(list(FIELDS)), max_size=1),
)
@settings(max_examples=60, deadline=None)
def test_expansion_is_that_of_every_combination(lists, axes, place, excluded):
    """Reference: each list with each value of the fields that it has, as a list of mappings; each configuration once."""
    expected = {}
    for encodings in lists:
        items = [item if isinstance(item, dict) else {"kind": item} for item in encodings]
        own = [
            key
            for key in axes
            if not key.startswith("model.position.") or key.split(".")[2] in [i["kind"] for i in items]
        ]
        for values in itertools.product(*(FIELDS[key] for key in own)):
            model, train, listed = {"dim": 8, "heads": 2, "layers": 1}, {}, [dict(item) for item in items]
            for key, value in zip(own, values, strict=True):
                if key == "train.lr":
                    train["lr"] = value
                elif key == "model.layers":
                    model["layers"] = value
                else:
                    _, _, kind, field = key.split(".")
                    next(item for item in listed if item["kind"] == kind)[field] = value
            if excluded and dict(zip(own, values, strict=True)).get(excluded[0]) == FIELDS[excluded[0]][0]:
                continue
            task = {"kind": "selective_copy", "tokens": 2, "blanks": 2, "dense_blanks": 1, "sparse_blanks": 4}
            run = RunSpec.model_validate({"task": task, "model": model | {"position": listed}, "train": train})
            expected[run.run_id] = expected.get(run.run_id, 0) + 1

    grid = [(key, FIELDS[key]) for key in axes]
    grid.insert(min(place, len(grid)), ("model.position", {f"list {index}": each for index, each in enumerate(lists)}))
    exclude = [{key: FIELDS[key][0]} for key in excluded if key in axes]
    text = json.dumps(dict(grid))
    if not expected:
        return
    unused = [
        key
        for key in axes
        if key.startswith("model.position.") and not any(key.split(".")[2] in json.dumps(each) for each in lists)
    ]
    if unused or any(count > 1 for count in expected.values()):
        with pytest.raises(SpecError):  # a field that no row has; two labels of one configuration
            plan(f"grid: {text}\nexclude: {json.dumps(exclude)}\n")
        return
    if excluded and not exclude:
        return
    found = plan(f"grid: {text}\nexclude: {json.dumps(exclude)}\n")
    assert sorted(run.run_id for run in found.runs) == sorted(expected)
    assert len({row.name for row in found.rows}) == len(found.rows)
    turned = plan(f"grid: {json.dumps(dict(reversed(grid)))}\nexclude: {json.dumps(exclude)}\n")
    assert {run.run_id for run in turned.runs} == set(expected)


# -- searches --

SPACE = f"grid: {{{POSITION}}}\nsearch: {{kind: KIND, samples: 6, space: {{{P_MAX}: DISTRIBUTION}}}}\n"


@pytest.mark.parametrize(
    "distribution", ["{int_uniform: [2, 99]}", "{log_int_uniform: [2, 99]}", "{choice: [2, 8, full]}"]
)
def test_random_draws_of_fields(distribution):
    found = plan(SPACE.replace("KIND", "random").replace("DISTRIBUTION", distribution))
    assert [row.name for row in found.rows].count("RoPE") == 1
    assert len(found.rows) > 2
    assert all((P_MAX in row.labels) == (row.labels["model.position"] == "CoPE") for row in found.rows)


OPTUNA = SPACE.replace("KIND", "optuna")


def test_suggestions_of_fields():
    loaded = load(BASE + OPTUNA.replace("DISTRIBUTION", "{int_uniform: [2, 9]}"))
    cope, rope = {"model.position": "CoPE", P_MAX: 5}, {"model.position": "RoPE"}
    found = [row_of(loaded, parameters) for parameters in (cope, rope)]
    assert [row.name for row in found] == ["CoPE · p_max 5", "RoPE"]
    assert [parameters_of(loaded, row.labels) for row in found] == [cope, rope]
    assert [each.name for each in dimensions_of(loaded)] == ["model.position", P_MAX]
    recorded = plan_of_recorded(loaded, [(row.runs[0].run_id, row.labels) for row in found])
    assert [row.name for row in recorded.rows] == ["CoPE · p_max 5", "RoPE"]
    assert [row.name for row in recorded.examples] == ["CoPE · p_max 2", "CoPE · p_max 9", "RoPE"]
    assert recorded.samples == 6
    few = OPTUNA.replace("DISTRIBUTION", "{int_uniform: [2, 3]}").replace("samples: 6", "samples: 60")
    assert plan(few).samples == 3


# -- overrides --

FIELD_AXIS = f"grid: {{{POSITION}, {P_MAX}: [8, 64]}}\n"


def test_an_override_acts_in_the_rows_with_the_encoding():
    found = plan(f"grid: {{{POSITION}}}", assignments=[f"{P_MAX}=4"])
    assert [row.name for row in found.rows] == ["CoPE", "RoPE"]
    assert positions(found) == [[("cope", 4)], [("rope", None)]]
    assert rows(FIELD_AXIS, assignments=[f"{P_MAX}=4"]) == ["CoPE", "RoPE"]
    assert positions(plan("", assignments=["model.position=[cope]", f"{P_MAX}=4"])) == [[("cope", 4)]]
    assert positions(plan("", assignments=[f"{P_MAX}=4", "model.position=[cope]"])) == [[("cope", 4)]]


def test_an_override_of_the_list_removes_axes_of_lost_fields():
    assert rows(FIELD_AXIS, assignments=["model.position=[rope]"]) == ["base"]
    assert rows(FIELD_AXIS, assignments=["model.position=[cope, rope]"]) == ["p_max 8", "p_max 64"]
    scales = "scales: {small: {grid: {model.position: {RoPE: [rope], none: []}}}}\n"
    published = f"published: [{{match: {{{P_MAX}: 8}}, values: {{in_dist/token_error: 1.0}}}}]\n"
    assert rows(FIELD_AXIS + scales + published, scale="small") == ["RoPE", "none"]


@pytest.mark.parametrize(
    ("text", "assignment", "expected"),
    [
        (f"grid: {{{POSITION}}}", "model.position.p_max=4", ("no_effect", "--set model.position.p_max=4", "")),
        (f"grid: {{{POSITION}}}", "model.position.alibi.learned=true", ("no_effect", "--set model.position.alibi.learned=true", "")),
        (f"grid: {{{POSITION}}}", "model.position.cope.pmax=4", ("unknown_key", "--set model.position.cope.pmax=4", "model.position.cope.pmax")),
        ("", f"{P_MAX}=4", ("no_effect", "--set model.position.cope.p_max=4", "")),
        ("grid: {task: [{kind: counting, operations: 8}]}", "task.bogus=8", ("unknown_key", "--set task.bogus=8", "task.bogus")),
        ("", "seeds=[0]\ngrid={}", ("line_break", "--set seeds=[0]\ngrid={}", "")),
    ],
)  # fmt: skip
def test_an_override_that_cannot_act_is_an_error(text, assignment, expected):
    if "task:" in text:
        base = BASE.replace(
            "  task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}\n", ""
        )
        with pytest.raises(SpecError) as caught:
            expand(with_overrides(load(base + text + "\n"), assignments=[assignment]))
        assert located(caught.value) == expected
    else:
        assert located(error_of(text, assignments=[assignment])) == expected


def test_an_override_below_an_axis_acts_in_each_row():
    text = "grid: {model: {small: {dim: 8, heads: 2}, large: {dim: 16, heads: 2}}, train.lr: [1e-3]}\n"
    base = BASE.replace("  model: {dim: 8, heads: 2, layers: 1}\n", "")
    found = expand(with_overrides(load(base + text), assignments=["model.layers=3"]))
    assert [(row.name, row.runs[0].model.dim, row.runs[0].model.layers) for row in found.rows] == [
        ("small · 0.001", 8, 3),
        ("large · 0.001", 16, 3),
    ]
    scaled = load(base + text + "scales: {deep: {set: {model.layers: 3}}, bad: {set: {model.bogus: 3}}}\n")
    assert {run.model.layers for run in expand(with_overrides(scaled, scale="deep")).runs} == {3}
    with raises("unknown_key", key="bogus"):
        expand(with_overrides(scaled, scale="bad"))


def test_an_override_wins_over_conditions():
    text = f"""
        grid: {{{POSITION}}}
        when:
          - {{if: {{model.position: RoPE}}, set: {{train.lr: 5e-3}}}}
          - {{if: {{model.position: CoPE}}, grid: {{train.lr: [6e-3, 7e-3]}}}}
        """
    assert len({run.train.lr for run in plan(text).runs}) == 3
    found = plan(text, assignments=["train.lr=1e-2"])
    assert [row.name for row in found.rows] == ["CoPE", "RoPE"]
    assert {run.train.lr for run in found.runs} == {1e-2}


def test_base_values_below_an_axis_are_an_error():
    text = BASE + "grid: {task: [{kind: counting}]}\n"
    with pytest.raises(SpecError) as caught:
        load(text)
    assert located(caught.value) == ("no_effect", "test.yaml:3", "base.task.kind")
    assert "test.yaml:6" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("exclude: [{model.position: CoPEE}]", "exclude[0].model.position"),
        ("exclude: [{model.position: CoPE, train.lr: 2e-3}]", "exclude[0].train.lr"),
        ("when: [{if: {model.position: [CoPE, RoPEE]}, set: {train.batch: 3}}]", "when[0].if.model.position"),
        ("published: [{match: {train.lr: 1e-4}, values: {in_dist/token_error: 1}}]", "published[0].match.train.lr"),
        ("figures: [{kind: curves, metrics: [in_dist/token_error], rows: {model.position: [CoPE, RoPEE]}}]", "figures[0].rows.model.position"),
        ("claims: [{text: x, source: y, better: {model.position: [CoPE, none]}, than: {model.position: RoPE}}]", "claims[0].better.model.position"),
    ],
)  # fmt: skip
def test_a_value_that_no_row_has_is_an_error_at_its_line(line, path):
    grid = "grid:\n  model.position: {CoPE: [cope], RoPE: [rope]}\n  train.lr: [1e-3, 3e-3]\n"
    error = error_of(f"{grid}{line}\n")
    assert (error.code, error.data["key_path"]) == ("unknown_value", path)
    assert error.data["value"] not in error.data["allowed"]


def test_conditions_on_values_that_a_scale_or_an_option_leaves_without_a_row_change_nothing():
    text = """
        grid: {model.position: {CoPE: [cope], RoPE: [rope], FIRE: [fire]}}
        exclude: [{model.position: [FIRE, T5]}]
        when: [{if: {model.position: RoPE}, set: {train.batch: 3}}]
        scales: {small: {grid: {model.position: {CoPE: [cope], T5: [t5]}}}}
        """
    assert rows(text) == ["CoPE", "RoPE"]
    assert rows(text, scale="small") == ["CoPE"]
    assert rows(text, assignments=["model.position=[cope]"]) == ["base"]
