"""Random searches, and searches whose rows are suggested one after another."""

import math

import pytest

from cope_sweep.config import expand, plan_of_recorded, row_of, with_overrides
from cope_sweep.config.points import dimensions_of, parameters_of
from tests.helpers.ablation_texts import TEXT, error_of, load, located
from tests.helpers.errors import raises

SINGLE = TEXT.replace("[1e-3, 2e-3]", "[1e-3]").replace("  train.lr: [1e-3]\n", "")
SPACE = "space: {train.lr: {log_uniform: [1e-4, 1e-2]}, train.warmup: {int_uniform: [0, 6]}}"
RANDOM = f"{SINGLE}search: {{kind: random, samples: 5, seed: 3, {SPACE}}}\n"
OPTUNA = f"{SINGLE.replace('[0, 1]', '[0]')}search: {{kind: optuna, samples: 8, {SPACE}}}\n"


def draws_of(text, **overrides):
    """Position → the labels of the draws, in order."""
    found = {}
    for row in expand(with_overrides(load(text), **overrides)).rows:
        found.setdefault(row.labels["model.position"], []).append((row.labels["train.lr"], row.labels["train.warmup"]))
    return found


def test_every_point_of_the_grid_has_the_same_draws():
    plan, draws = expand(load(RANDOM)), draws_of(RANDOM)
    assert len(plan.rows) == 2 * 5
    assert len(plan.runs) == 2 * 5 * 2
    assert draws["CoPE"] == draws["none"]
    assert len(set(draws["CoPE"])) == 5
    assert {run.seed for run in plan.runs} == {0, 1}


def test_draws_are_reproducible():
    """These draws exist in stores: the same file must name the same runs tomorrow."""
    assert draws_of(RANDOM)["CoPE"] == GOLDEN
    assert draws_of(RANDOM, assignments=["search.seed=4"])["CoPE"] != GOLDEN


GOLDEN = [("0.002894", "4"), ("0.001155", "0"), ("0.002209", "6"), ("0.00215", "6"), ("0.003719", "2")]


def test_more_samples_keep_the_earlier_draws():
    assert draws_of(RANDOM, assignments=["search.samples=9"])["CoPE"][:5] == GOLDEN


def test_another_key_in_the_space_changes_no_draw_of_the_others():
    more = RANDOM.replace("space: {", "space: {train.clip: {uniform: [0.1, 1.0]}, ")
    assert draws_of(more)["CoPE"] == GOLDEN


def test_conditions_apply_to_drawn_values():
    text = (
        SINGLE + "search: {kind: random, samples: 50, space: {model.layers: {choice: [1, 2, 3]}}}\n"
        "exclude: [{model.position: CoPE, model.layers: 3}]\nwhen: [{if: {model.layers: 2}, set: {train.lr: 5e-3}}]\n"
    )
    rows = expand(load(text)).rows
    assert sorted(row.name for row in rows) == ["CoPE · 1", "CoPE · 2", "none · 1", "none · 2", "none · 3"]
    assert {row.runs[0].train.lr for row in rows if row.labels["model.layers"] == "2"} == {5e-3}


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ("{kind: random, samples: 3}", ("missing_key", "test.yaml:12", "search")),
        (f"{{kind: random, {SPACE}}}", ("missing_key", "test.yaml:12", "search")),
        ("{kind: random, samples: 3, space: {}}", ("invalid_value", "test.yaml:12", "search.space")),
        (f"{{kind: random, samples: 0, {SPACE}}}", ("invalid_value", "test.yaml:12", "search.samples")),
        ("{kind: rnd, samples: 3}", ("unknown_kind", "test.yaml:12", "search")),
        ("{kind: random, samples: 3, space: {train.lr: {loguniform: [1e-4, 1e-2]}}}", ("unknown_key", "test.yaml:12", "search.space.train.lr.loguniform")),
        ("{kind: random, samples: 3, space: {train.lr: {log_uniform: [0, 1]}}}", ("invalid_value", "test.yaml:12", "search.space.train.lr")),
        ("{kind: random, samples: 3, space: {train.lr: [1e-4, 1e-2]}}", ("wrong_type", "test.yaml:12", "search.space.train.lr")),
        ("{kind: random, samples: 3, space: {model.dim: {uniform: [8, 16]}}}", ("wrong_type", "test.yaml:12", "model.dim")),
        ("{kind: random, samples: 3, space: {train.lr: {uniform: [-2, -1]}}}", ("invalid_value", "test.yaml:12", "train.lr")),
        ("{kind: random, samples: 3, space: {train.lrr: {uniform: [1, 2]}}}", ("unknown_key", "test.yaml:12", "train.lrr")),
        ("{kind: random, samples: 3, space: {model.position: {choice: [[cope]]}}}", ("axis_in_space", "test.yaml:12", "search.space.model.position")),
        ("{kind: random, samples: 3, space: {seed: {int_uniform: [1, 2]}}}", ("seed_in_row", "test.yaml:12", "search.space.seed")),
        ("{kind: optuna, samples: 3, seeds_per_sample: 9, space: {train.lr: {uniform: [1, 2]}}}", ("too_few_seeds", "test.yaml:12", "search.seeds_per_sample")),
    ],
)  # fmt: skip
def test_errors_name_line_and_key(search, expected):
    assert located(error_of(SINGLE + f"search: {search}\n")) == expected


def test_assignments_fix_drawn_keys():
    fixed = expand(with_overrides(load(RANDOM), assignments=["train.lr=3e-3"]))
    assert {run.train.lr for run in fixed.runs} == {3e-3}
    assert [row.labels["train.warmup"] for row in fixed.rows] == 2 * list(dict.fromkeys(warmup for _, warmup in GOLDEN))
    all_fixed = expand(with_overrides(load(RANDOM), assignments=["train.lr=3e-3", "train.warmup=1"]))
    assert [row.name for row in all_fixed.rows] == ["CoPE", "none"]


def test_distributions_and_kinds_can_be_assigned():
    names = draws_of(RANDOM, assignments=["search.space.train.lr={choice: [5e-3]}"])["none"]
    assert [lr for lr, _ in names] == ["0.005"] * len(names)
    grid = expand(with_overrides(load(RANDOM), assignments=["search.kind=grid"]))
    assert [row.name for row in grid.rows] == ["CoPE", "none"]
    optuna = expand(with_overrides(load(RANDOM), assignments=["search.kind=optuna", "seeds=[0]"]))
    assert (optuna.search.samples, optuna.search.seed, len(optuna.search.space)) == (5, 3, 2)


def test_a_scale_may_have_a_search_of_its_own():
    text = RANDOM.replace(
        "wide: {", "wide: {search: {kind: random, samples: 2, space: {train.clip: {uniform: [0.1, 1]}}}, "
    )
    text = text.replace(", grid: {train.lr: [5e-3]}", "")
    assert len(expand(with_overrides(load(text), scale="wide")).rows) == 4


# -- suggestions --


def test_a_search_by_suggestions_has_no_rows_before():
    plan = expand(load(OPTUNA))
    assert (plan.rows, plan.runs, plan.open_samples) == ((), (), 8)
    assert (plan.search.metric, plan.search.goal) == ("in_dist/token_error", "min")
    assert plan.axes == {"model.position": "position", "train.lr": "lr", "train.warmup": "warmup"}
    assert [row.name for row in plan.examples] == ["CoPE · 0.0001 · 0", "none · 0.01 · 6"]
    assert (expand(load(RANDOM)).search, expand(load(RANDOM)).examples) == (None, ())


def test_axes_and_space_are_dimensions():
    text = OPTUNA.replace("space: {", "space: {train.clip: {choice: [0.5, 1]}, ")
    dimensions = dimensions_of(load(text))
    assert [(dimension.name, dimension.choices, dimension.size) for dimension in dimensions] == [
        ("model.position", ("CoPE", "none"), 2),
        ("train.clip", ("0.5", "1"), 2),
        ("train.lr", (), math.inf),
        ("train.warmup", (), 7),
    ]


def test_a_space_of_few_points_has_no_more_samples():
    text = OPTUNA.replace("train.lr: {log_uniform: [1e-4, 1e-2]}, ", "")
    assert expand(load(text.replace("samples: 8", "samples: 80"))).open_samples == 2 * 7


PARAMETERS = [
    {"model.position": "none", "train.lr": 3.00001e-4, "train.warmup": 2},
    {"model.position": "CoPE", "train.lr": 1e-3, "train.warmup": 0},
]


def recorded(text, parameters=PARAMETERS):
    """The plan of what sweeps have recorded."""
    rows = [row_of(load(text), each) for each in parameters]
    return plan_of_recorded(load(text), [(row.runs[0].run_id, row.labels) for row in rows])


def test_the_plan_of_suggestions_has_their_rows_in_order():
    plan = recorded(OPTUNA, [*PARAMETERS, PARAMETERS[0]])
    assert [row.name for row in plan.rows] == ["none · 0.0003 · 2", "CoPE · 0.001 · 0"]
    assert [(run.train.lr, run.train.warmup, len(run.model.position)) for run in plan.runs] == [
        (3e-4, 2, 0),
        (1e-3, 0, 1),
    ]
    assert plan.open_samples == 6
    assert plan.axes == {"model.position": "position", "train.lr": "lr", "train.warmup": "warmup"}


def test_what_is_recorded_of_another_ablation_is_left_out():
    known = [(run.run_id, recorded(OPTUNA).row_of(run.run_id).labels) for run in recorded(OPTUNA).runs]
    for before, after, rows in [
        ("none: []", "none: [rope]", ["CoPE · 0.001 · 0"]),
        ("none: []", "rope: [rope]", ["CoPE · 0.001 · 0"]),
        ("[1e-4, 1e-2]", "[5e-4, 1e-2]", ["CoPE · 0.001 · 0"]),
        ("train.warmup: {int_uniform: [0, 6]}", "train.batch: {int_uniform: [1, 6]}", []),
    ]:
        assert before in OPTUNA
        assert [row.name for row in plan_of_recorded(load(OPTUNA.replace(before, after, 1)), known).rows] == rows


def test_a_condition_is_no_part_of_the_labels():
    text = OPTUNA + "when: [{if: {model.position: CoPE}, set: {train.batch: 32}}]\n"
    row = recorded(text).rows[1]
    assert row.labels == {"model.position": "CoPE", "train.lr": "0.001", "train.warmup": "0"}
    assert row.runs[0].train.batch == 32


def test_a_suggested_run_is_the_run_of_a_grid():
    suggested = recorded(OPTUNA).runs[1]
    grid = expand(with_overrides(load(SINGLE), assignments=["train.lr=1e-3", "train.warmup=0"]))
    assert suggested.run_id in {run.run_id for run in grid.runs}


@pytest.mark.parametrize(
    ("labels", "data"),
    [
        ({"model.position": "RoPE"}, {"key": "model.position", "value": "RoPE"}),
        ({"train.lr": "0.5"}, {"value": "0.5", "bounds": [0.0001, 0.01]}),
        ({"train.lr": None}, {"key": "train.lr", "value": None}),
    ],
)
def test_labels_of_another_search_are_refused(labels, data):
    with raises("another_search", **data):
        parameters_of(load(OPTUNA), recorded(OPTUNA).rows[0].labels | labels)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("int_uniform: [0, 6]", "int_uniform: [0, 7]", ("invalid_value", "test.yaml:2", "base")),
        ("none: []", "none: [ropey]", ("unknown_kind", "test.yaml:7", "model.position[0]")),
        ("{log_uniform: [1e-4, 1e-2]}", "{uniform: [0, 1]}", ("invalid_value", "test.yaml:12", "train.lr")),
        ("samples: 8", "samples: 8, metric: in_dist/los", ("unknown_metric", "test.yaml:12", "search.metric")),
        ("samples: 8", "samples: 8, metric: in_dist/loss", ("unknown_goal", "test.yaml:12", "search.metric")),
        ("samples: 8", "samples: 8, goal: max", ("contradicting_goal", "test.yaml:12", "search.goal")),
        ("seeds: [0]", "figures: [{kind: maps, show: gates, mark: data, claim: Gates open}]", ("not_with_suggestions", "test.yaml:8", "figures[0].claim")),
        ("seeds: [0]", "exclude: [{model.position: CoPE}]", ("not_with_suggestions", "test.yaml:8", "exclude")),
        ("seeds: [0]", "when: [{if: {model.position: CoPE}, grid: {train.batch: [8, 16]}}]", ("not_with_suggestions", "test.yaml:8", "when[0].grid")),
        ("seeds: [0]", "when: [{if: {model.position: CoPE}, set: {train.lr: 1e-3}}]", ("not_with_suggestions", "test.yaml:8", "when[0].set.train.lr")),
        ("seeds: [0]", "when: [{if: {model.positn: CoPE}, set: {train.batch: 8}}]", ("unknown_axis", "test.yaml:8", "when[0].if.model.positn")),
        ("{CoPE: [cope], none: []}", "[[cope], cope]", ("same_labels", "test.yaml:7", "grid.model.position")),
        ("seeds: [0]", "claims: [{text: X, better: {model.position: CoPE}, than: {model.position: none}, metric: foo/bar}]", ("unknown_column", "test.yaml:8", "claims[0].metric")),
        ("seeds: [0]", "figures: [{kind: box, metrics: [foo/bar]}]", ("unknown_metric", "test.yaml:8", "figures[0].metrics[0]")),
        ("seeds: [0]", "figures: [{kind: values, x: model.nothing, metrics: [in_dist/loss]}]", ("unknown_axis", "test.yaml:8", "figures[0].x")),
    ],
)  # fmt: skip
def test_impossible_searches_are_refused_before_anything_is_suggested(before, after, expected):
    assert before in OPTUNA
    assert located(error_of(OPTUNA.replace(before, after))) == expected


def test_claims_and_figures_may_be_about_rows_that_are_not_suggested_yet():
    text = OPTUNA.replace("seeds: [0]", "claims: [{text: X, better: {model.position: CoPE, train.warmup: 3}, than: {model.position: none}}]\n"
                          "figures: [{kind: maps, show: gates, rows: {model.position: CoPE}}]")  # fmt: skip
    assert len(expand(load(text)).ablation.content.claims) == 1


def test_no_row_can_be_added_to_what_a_search_suggests():
    text = OPTUNA[: OPTUNA.index("grid:")] + OPTUNA[OPTUNA.index("seeds:") :]
    error = error_of(text, assignments=["+model.position=[rope]"])
    assert (error.code, error.data["place"]) == ("not_with_suggestions", "--set +model.position=[rope]")


def test_a_search_needs_a_dimension():
    text = OPTUNA[: OPTUNA.index("grid:")] + OPTUNA[OPTUNA.index("seeds:") :]
    assert error_of(text.replace(SPACE, "space: {}")).code == "empty_space"


def test_the_objective_may_be_a_metric_of_the_last_evaluation():
    text = (
        "title: T\nbase:\n  task: {kind: code, tokens: 64}\n  evaluate: {contexts: [64, 128], every: 10}\n"
        'metrics: [{name: "test/perplexity@128"}]\nsearch: {kind: optuna, samples: 3, space: {train.lr: {log_uniform: [1e-4, 1e-2]}}}\n'
    )
    assert expand(load(text)).search.metric == "validation/perplexity@128"
