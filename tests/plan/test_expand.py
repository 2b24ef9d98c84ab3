import itertools
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.plan import expand
from cope_sweep.spec import SpecError, load_ablation
from cope_sweep.spec.ablation import validate
from cope_sweep.spec.source import parse_source

BASE = textwrap.dedent("""\
    title: A test
    base:
      task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
      model: {dim: 8, heads: 2, layers: 1}
    metrics: [{name: in_dist/token_error}]
    """)


def plan(text):
    return expand(validate(parse_source(BASE + textwrap.dedent(text), "test.yaml"), "test"))


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


def test_runs_come_seed_by_seed():
    order = plan("grid: {model.layers: [1, 2]}\nseeds: [0, 1]").runs
    assert [(run.seed, run.model.layers) for run in order] == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_zip_moves_axes_together():
    text = """
        grid: {model.layers: [1, 2]}
        zip: [{model.dim: [8, 16], model.heads: [2, 4]}]
        """
    assert rows(text) == ["1 · 8 · 2", "1 · 16 · 4", "2 · 8 · 2", "2 · 16 · 4"]


def test_when_opens_axes_and_sets_values_for_some_rows_only():
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
        {"model.position": "RoPE", "model.layers": "2", "train.lr": "0.001"},
        {"model.position": "RoPE", "model.layers": "2", "train.lr": "0.002"},
    ]
    assert [row.runs[0].model.layers for row in unfolded] == [1, 2, 2]


def test_exclude_by_label_value_or_any_of_several():
    grid = "grid:\n  model.position: {CoPE: [cope], RoPE: [rope], none: []}\n  model.layers: [1, 2, 3]\n"
    assert len(rows(grid + "exclude: [{model.position: CoPE, model.layers: 1}]")) == 8
    assert len(rows(grid + "exclude: [{model.position: [cope]}]")) == 6
    assert len(rows(grid + "exclude: [{model.position: [CoPE, none], model.layers: [1, 2]}]")) == 5


def test_include_adds_rows():
    text = "grid: {model.layers: [1, 2]}\ninclude: [{model.layers: 3, model.dim: 16}]"
    assert rows(text) == ["1", "2", "3 · 16"]


def test_rows_of_equal_labels_are_told_apart():
    text = "include: [{model.layers: 2}, {model.dim: 2}]\nseeds: [0]\n"
    assert rows("grid: {model.layers: [1]}\n" + text) == ["1", "layers=2", "dim=2"]


def test_a_row_named_twice_is_there_once():
    text = "grid: {model.layers: [1, 2]}\ninclude: [{model.layers: 2}]"
    assert rows(text) == ["1", "2"]
    assert len(plan(text).runs) == 2


def test_two_labels_of_the_same_run_share_it():
    text = "grid:\n  model.position: {A: [cope], B: [{kind: cope, p_max: 64}]}"
    assert rows(text) == ["A"]


def test_published_numbers_find_their_row():
    text = """
        grid: {model.position: {CoPE: [cope], RoPE: [rope]}}
        published:
          - {match: {model.position: RoPE}, values: {in_dist/token_error: 40.1}, source: Table 1}
        """
    assert [row.published and row.published.values for row in plan(text).rows] == [None, {"in_dist/token_error": 40.1}]


TEXT = "base: {task: {kind: code, tokens: 64}, evaluate: {contexts: [64, 128]}}\n"


@pytest.mark.parametrize("name", ["test/perplexity@128", "validation/loss@64", "test/perplexity", "facts.tokens_per_s"])
def test_a_metric_may_be_of_a_longer_context_or_a_fact(name):
    assert expand(validate(parse_source(f'title: T\n{TEXT}metrics: [{{name: "{name}"}}]', "t"), "t")).rows


@pytest.mark.parametrize("name", ["test/perplexity@256", "test/token_error@64", "facts.speed"])
def test_a_metric_that_no_run_has_is_refused(name):
    with pytest.raises(SpecError, match=f"the task code has no metric '{name}'.* did you mean"):
        expand(validate(parse_source(f'title: T\n{TEXT}metrics: [{{name: "{name}"}}]', "t"), "t"))


def test_a_run_s_problem_names_its_row():
    with pytest.raises(SpecError, match=r"test\.yaml:\d: model.heads = 3 does not divide|model.heads = 3"):
        plan("grid: {model.heads: [2, 3]}")


@given(
    layers=st.lists(st.integers(1, 3), min_size=1, max_size=3, unique=True),
    lrs=st.lists(st.sampled_from([1e-3, 2e-3, 5e-3]), min_size=1, max_size=3, unique=True),
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
)
@settings(max_examples=40, deadline=None)
def test_every_combination_once(layers, lrs, seeds):
    runs = plan(f"grid: {{model.layers: {layers}, train.lr: {lrs}}}\nseeds: {seeds}").runs
    found = [(run.model.layers, run.train.lr, run.seed) for run in runs]
    assert sorted(found) == sorted(itertools.product(layers, lrs, seeds))
    assert len({run.run_id for run in runs}) == len(runs)


def test_every_ablation_of_the_project_plans(request):
    paths = sorted((request.config.rootpath / "ablations").glob("*.yaml"))
    assert paths
    for path in paths:
        assert expand(load_ablation(path)).runs, path
