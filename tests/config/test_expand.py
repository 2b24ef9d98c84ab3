import hashlib
import json
import textwrap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.config import RunSpec, SpecError, expand, load_ablation, points
from tests.helpers.ablation_texts import BASE, load
from tests.helpers.errors import raises


def plan(text):
    return expand(load(BASE + textwrap.dedent(text)))


def rows(text):
    return [row.name for row in plan(text).rows]


def test_no_grid_is_one_row():
    only = plan("seeds: [4, 5]")
    assert [row.name for row in only.rows] == ["base"]
    assert [run.seed for run in only.runs] == [4, 5]


def test_grid_is_the_product_in_order():
    text = """
        grid:
          model.position: {CoPE: [cope], RoPE: [rope]}
          model.layers: [1, 2]
        """
    assert rows(text) == ["CoPE · 1", "CoPE · 2", "RoPE · 1", "RoPE · 2"]
    assert plan(text).axes == {"model.position": "position", "model.layers": "layers"}


def test_runs_are_ordered_by_seed():
    order = plan("grid: {model.layers: [1, 2]}\nseeds: [0, 1]").runs
    assert [(run.seed, run.model.layers) for run in order] == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_an_axis_of_sections_varies_keys_together():
    """A section replaces the whole section of the base; an axis of a deeper key refines it."""
    base = BASE.replace("  model: {dim: 8, heads: 2, layers: 1}\n", "")
    text = """\
        grid:
          model: {small: {layers: 2, dim: 8, heads: 2}, large: {layers: 4, dim: 16}}
          model.position: {CoPE: [cope], RoPE: [rope]}
        """
    found = expand(load(base + textwrap.dedent(text))).rows
    assert [row.name for row in found] == ["small · CoPE", "small · RoPE", "large · CoPE", "large · RoPE"]
    assert [(row.runs[0].model.layers, row.runs[0].model.dim) for row in found] == [(2, 8), (2, 8), (4, 16), (4, 16)]


def test_when_adds_axes_and_values_to_some_rows():
    text = """
        grid:
          model.position: {CoPE: [cope], RoPE: [rope]}
        when:
          - if: {model.position: RoPE}
            grid: {train.lr: [1e-3, 2e-3]}
            set: {model.layers: 2}
        """
    unfolded = plan(text).rows
    assert [row.labels for row in unfolded] == [
        {"model.position": "CoPE"},
        {"model.position": "RoPE", "train.lr": "0.001"},
        {"model.position": "RoPE", "train.lr": "0.002"},
    ]
    assert [row.runs[0].model.layers for row in unfolded] == [1, 2, 2]


def test_exclusions_by_label_by_value_and_by_any_of_a_list():
    grid = "grid:\n  model.position: {CoPE: [cope], RoPE: [rope], none: []}\n  model.layers: [1, 2, 3]\n"
    only = rows(grid + "exclude: [{model.position: CoPE, model.layers: 1}]")  # an exclusion needs all its keys
    assert len(only) == 8
    assert "CoPE · 1" not in only
    assert len(rows(grid + "exclude: [{model.position: [cope]}]")) == 6
    assert len(rows(grid + "exclude: [{model.position: [CoPE, none], model.layers: [1, 2]}]")) == 5
    any_of_two = "exclude: [{model.position: [CoPE, none]}, {model.layers: 1}]"
    assert rows(grid + any_of_two) == ["RoPE · 2", "RoPE · 3"]


def test_when_replaces_the_value_of_an_axis():
    text = """
        grid: {model.position: {CoPE: [cope], RoPE: [rope]}, model.layers: [1, 2]}
        when: [{if: {model.position: RoPE, model.layers: 2}, set: {model.layers: 3}}]
        """
    assert rows(text) == ["CoPE · 1", "CoPE · 2", "RoPE · 1", "RoPE · 3"]
    assert [row.runs[0].model.layers for row in plan(text).rows] == [1, 2, 1, 3]


def test_rows_with_equal_labels_have_different_names():
    text = "grid: {model.position: {CoPE: [cope], ALiBi: [alibi]}}\nwhen:\n"
    text += "  - {if: {model.position: CoPE}, set: {model.position: [rope]}, grid: {model.layers: [4]}}\n"
    text += "  - {if: {model.position: ALiBi}, set: {model.position: [rope]}, grid: {model.dim: [4]}}\n"
    assert rows(text) == ["position=rope · layers=4", "position=rope · dim=4"]


def test_duplicate_rows_are_merged():
    text = "search: {kind: random, samples: 9, space: {model.layers: {choice: [1, 2]}}}"
    assert sorted(rows(text)) == ["1", "2"]
    assert len(plan(text).runs) == 2


def test_two_labels_of_the_same_configuration_are_an_error():
    with raises("same_rows", rows=["A", "B"]):
        rows("grid:\n  model.position: {A: [cope], B: [{kind: cope, p_max: 64}]}")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('grid: {model.dim: {"small · wide": 16, small: 8}, train.lr: {slow: 1e-3, "wide · slow": 0.1}}', "small · wide · slow"),
        ('grid: {model.position: {CoPE: [cope], "CoPE · 8": [rope]}}\nwhen: [{if: {model.position: CoPE}, grid: {model.dim: [8]}}]', "CoPE · 8"),
    ],
)  # fmt: skip
def test_two_rows_of_one_name_are_an_error(text, name):
    """Tables, claims and `--rows` know a row by its name."""
    with raises("same_names", rows=[name, name]):
        rows(text)


LISTS = "grid: {model.position: [[cope], [rope], [cope, rope]], model.dim: [8, 16]}\n"


def test_a_list_that_is_a_value_and_names_others_is_an_error():
    with raises("ambiguous_value", key_path="exclude[0].model.position", labels=["cope+rope", "cope", "rope"]):
        rows(f"{LISTS}exclude: [{{model.position: [cope, rope], model.dim: 16}}]")
    for composition in ("cope+rope", "[[cope, rope]]"):
        left = rows(f"{LISTS}exclude: [{{model.position: {composition}, model.dim: 16}}]")
        assert left == ["cope · 8", "cope · 16", "rope · 8", "rope · 16", "cope+rope · 8"]
    left = rows(f"{LISTS}exclude: [{{model.position: [[cope], [rope]]}}]")
    assert left == ["cope+rope · 8", "cope+rope · 16"]


def test_a_value_that_a_rule_sets_has_the_label_of_its_axis():
    text = """
        grid: {model.position: {CoPE: [cope], RoPE: [rope]}, model.dim: {small: 8, large: 16}}
        when:
          - {if: {model.position: CoPE, model.dim: small}, set: {model.dim: 16}}
          - {if: {model.dim: large}, set: {train.lr: 0.5}}
        exclude: [{model.position: RoPE, model.dim: small}]
        claims: [{text: X, better: {model.position: CoPE}, than: {model.position: RoPE}}]
        """
    assert [(row.name, row.runs[0].train.lr) for row in plan(text).rows] == [
        ("CoPE · large", 0.5),
        ("RoPE · large", 0.5),
    ]


def test_published_numbers_of_an_unknown_metric_are_refused():
    entry = "published: [{match: {}, values: {%s: 1.5}}]"
    with raises("unknown_metric", key_path="published[0].values.in_dist/los", metric="in_dist/los"):
        plan(entry % "in_dist/los")
    assert plan(entry % "in_dist/loss").rows[0].published, "a metric that is no column"


def test_the_first_matching_entry_of_published_is_shown():
    text = """
        grid: {model.position: {CoPE: [cope], RoPE: [rope]}, model.layers: [1, 2]}
        published:
          - {match: {model.position: RoPE, model.layers: 1}, values: {in_dist/token_error: 1.0}}
          - {match: {model.position: RoPE}, values: {in_dist/token_error: 2.0}}
          - {match: {model.layers: [1, 2]}, values: {in_dist/token_error: 3.0}}
        """
    assert [row.published.values["in_dist/token_error"] for row in plan(text).rows] == [3.0, 3.0, 1.0, 2.0]


def test_every_field_of_an_encoding_reaches_its_parameters():
    text = "grid: {model.position: {default: [relative], wide: [{kind: relative, std: 0.5}]}}"
    default, wide = (row.runs[0] for row in plan(text).rows)
    stds = [
        {parameter.std for parameter in run.model.position[0].parameters(run.dims).values()} for run in (default, wide)
    ]
    assert stds[1] == {0.5} != stds[0]


@pytest.mark.parametrize(
    ("text", "line", "key_path"),
    [
        ("grid: {seed: [1, 2]}", 6, "grid.seed[0]"),
        ("grid: {model.layers: [1, 2]}\nwhen: [{if: {model.layers: 2}, set: {seed: 1}}]", 7, "when[0].set.seed"),
    ],
)
def test_seeds_are_not_part_of_a_row(text, line, key_path):
    with raises("seed_in_row", place=f"test.yaml:{line}", key_path=key_path):
        plan(text)


def test_a_seed_in_the_base_is_refused():
    text = BASE.replace("  model: {", "  seed: 3\n  model: {")
    with raises("seed_in_row", place="test.yaml:4", key_path="base.seed"):
        expand(load(text))


def test_rows_are_found_by_run():
    whole = plan("grid: {model.layers: [1, 2]}\nseeds: [0, 1]")
    for row in whole.rows:
        for run in row.runs:
            assert whole.row_of(run.run_id) is row
            assert whole.row_name(run.run_id) == row.name
    assert whole.row_of("0" * 16) is None
    assert whole.row_name("0" * 16) == ""


TEXT = "base: {task: {kind: code, tokens: 64}, evaluate: {contexts: [64, 128]}}\n"


@pytest.mark.parametrize("name", ["test/perplexity@128", "validation/loss@64", "test/perplexity", "facts.tokens_per_s"])
def test_metrics_can_name_contexts_and_facts(name):
    assert expand(load(f'title: T\n{TEXT}metrics: [{{name: "{name}"}}]')).rows


@pytest.mark.parametrize("name", ["test/perplexity@256", "test/token_error@64", "facts.speed"])
def test_unknown_metrics_are_refused(name):
    with raises("unknown_metric", metric=name, task="code"):
        expand(load(f'title: T\n{TEXT}metrics: [{{name: "{name}"}}]'))


def test_a_column_needs_one_row_that_reports_it():
    text = (
        "title: T\nbase: {evaluate: {lengths: [2]}}\ngrid: {task: {Copy: {kind: selective_copy}, Text: {kind: code}}}\n"
    )
    text += "when: [{if: {task: Text}, set: {evaluate.lengths: []}}]\n"
    names = ["test/perplexity", "sparse/token_error", "in_dist/token_error@2x"]
    assert expand(load(text + f"metrics: [{', '.join(f'{{name: {name}}}' for name in names)}]")).rows
    with raises("unknown_metric", metric="in_dist/token_error@4x", task="selective_copy, code"):
        expand(load(text + "metrics: [{name: in_dist/token_error@4x}]"))


def test_the_primary_metric_must_be_one_that_rows_are_compared_by():
    def expanded(text):
        return expand(load(f"title: T\n{TEXT}{text}"))

    text = "metrics: [{name: test/perplexity, compared: false}, {name: test/loss}]"
    with raises("not_compared", key_path="metrics[0].compared"):
        expanded(text)
    assert expanded(f"{text}\nprimary: test/loss").ablation.content.primary_metric.name == "test/loss"
    with raises("unknown_column", key_path="primary", column="test/los"):
        expanded(f"{text}\nprimary: test/los")


def test_a_claim_must_be_about_a_metric_that_rows_are_compared_by():
    claim = "claims: [{text: X, better: {train.lr: [0.1]}, than: {train.lr: [0.2]}, metric: test/loss}]"
    metrics = "metrics: [{name: test/perplexity}, {name: test/loss, compared: false}]"
    with raises("not_compared", key_path="claims[0]", column="test/loss"):
        expand(load(f"title: T\n{TEXT}grid: {{train.lr: [0.1, 0.2]}}\n{metrics}\n{claim}\n"))


def test_errors_of_a_combination_name_its_row():
    with raises("invalid_value", key="train.warmup", largest=5, combination="train.steps = 5, train.warmup = 9"):
        plan("grid: {train.steps: [5], train.warmup: [9]}")


def test_an_error_of_several_rows_comes_once():
    with pytest.raises(SpecError) as caught:
        plan("grid: {model.layers: [1, 2, 3], train.warmup: [9], train.steps: [5]}")
    (line,) = str(caught.value).splitlines()
    assert caught.value.data["combination"] == "model.layers = 1, train.warmup = 9, train.steps = 5"
    assert "2" in line.partition(caught.value.data["combination"])[2]  # the number of other rows


@given(
    position=st.lists(st.sampled_from(["cope", "rope", "absolute"]), max_size=2, unique=True),
    lr=st.sampled_from([1e-3, 2e-3]),
    steps=st.integers(20, 22),
    every=st.sampled_from([10, 100]),
    seed=st.sampled_from([0, 1, 2**31 - 1]),
)
@settings(max_examples=40, deadline=None)
def test_runs_of_a_plan_are_those_that_are_validated_alone(position, lr, steps, every, seed):
    text = f"grid: {{model.position: [[cope], {position}], train.lr: [{lr}, 5e-3], train.steps: [{steps}], evaluate.every: [{every}]}}\nseeds: [7, {seed}]\n"
    for run in plan(text).runs:
        alone = RunSpec.model_validate_json(run.model_dump_json())
        assert (alone, alone.run_id) == (run, run.run_id)
        assert alone.identity == run.identity
        canonical = json.dumps(run.identity, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(canonical.encode()).hexdigest()[:16] == run.run_id


@pytest.mark.parametrize("where", ["grid: {AXES}", "when: [{if: {}, grid: {AXES}}]"])
def test_more_points_than_can_be_meant_are_refused(where, monkeypatch):
    monkeypatch.setattr(points, "MAX_POINTS", 1000)
    values = list(range(1, 101))
    keys = ("train.steps", "train.batch", "model.layers", "model.dim", "model.heads")
    axes = ", ".join(f"{key}: {values}" for key in keys)
    with raises("too_many_points", key_path="grid", limit=1000):
        plan(where.replace("AXES", axes))


@pytest.mark.slow
def test_a_plan_of_20_000_runs():
    """A bound on CPU time far above what it takes (½ s), so that a quadratic step is noticed."""
    lrs = [round(1e-5 * (1 + index), 8) for index in range(1000)]
    text = f"grid: {{model.position: [[cope], [rope], [absolute], []], train.lr: {lrs}}}\nseeds: [0, 1, 2, 3, 4]\n"
    loaded = load(BASE + text)
    started_s = time.process_time()
    whole = expand(loaded)
    rows = {run.run_id: whole.row_name(run.run_id) for run in whole.runs}
    assert time.process_time() - started_s < 5
    assert len(rows) == 20_000
    assert len(set(rows.values())) == 4_000


VARIANTS = """
base: {task: {kind: code, tokens: 64}, evaluate: {contexts: [64, 128]}}
grid: {model.position: {Relative: [relative], CoPE: [cope]}}
when: [{if: {model.position: Relative}, set: {evaluate.variants: {capped: {relative.far: last}}}}]
"""


def test_a_variant_of_some_rows_can_be_a_column():
    """Cells of the rows without it stay empty; a name that no row has is refused."""
    text = f'title: T\n{VARIANTS}metrics: [{{name: "%s"}}]'
    relative, cope = expand(load(text % "capped/test/perplexity@128")).rows
    assert relative.runs[0].variant_metrics
    assert not cope.runs[0].variant_metrics
    with raises("unknown_metric", metric="caped/test/perplexity"):
        expand(load(text % "caped/test/perplexity"))
    schedule = "\nschedule: {kind: asha, metric: capped/test/perplexity}"
    with raises("unknown_metric", metric="capped/test/perplexity"):
        expand(load(text % "capped/test/perplexity" + schedule))


@pytest.mark.parametrize(
    ("more", "accepted"),
    [("seeds: [0, 1]\ngrid: {model.dim: [8, 16]}\n", 4), ("search: {kind: optuna, samples: 9, space: {train.lr: {uniform: [0.1, 1]}}}\n", 9),
     ("search: {kind: random, samples: 9, space: {train.lr: {uniform: [0.1, 1]}}}\n", 9)],
)  # fmt: skip
def test_the_number_of_runs_is_limited(tmp_path, more, accepted):
    base = "title: x\nbase: {task: counting}\nmetrics: [{name: train/loss}]\n"
    (tmp_path / "many.yaml").write_text(base + more)
    loaded = load_ablation(tmp_path / "many.yaml")
    expand(loaded, max_runs=accepted)
    with raises("too_many_runs", runs=accepted, limit=accepted - 1):
        expand(loaded, max_runs=accepted - 1)
