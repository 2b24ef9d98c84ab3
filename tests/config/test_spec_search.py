import re

import pytest

from cope_sweep.config import expand, with_overrides
from cope_sweep.config.ablation import Asha, Median, NoSchedule
from tests.helpers.ablation_texts import TEXT, error_of, load, located

SHORT = TEXT.replace("{steps: 6}", "{steps: 60}\n  evaluate: {every: 5}")
SCHEDULED = SHORT + "schedule: {kind: asha, grace: 10}\n"


def schedule_of(text, **overrides):
    return expand(with_overrides(load(text), **overrides)).schedule


def test_no_run_is_stopped_early_by_default():
    assert load().content.schedule == NoSchedule()
    assert expand(load()).schedule is None


def test_metric_goal_and_grace_are_filled_in():
    text = SHORT.replace("token_error}", "token_error, goal: max}") + "schedule: asha\n"
    assert schedule_of(text) == Asha(metric="in_dist/token_error", goal="max", grace=6, reduction=4)
    assert schedule_of(SHORT + "schedule: {kind: median, metric: dense/loss, goal: min}\n") == Median(
        metric="dense/loss", goal="min", grace=6
    )


@pytest.mark.parametrize("prefix", ["share_learned", "steps_until"])
def test_searches_and_schedules_measure_what_the_primary_metric_is_computed_from(prefix):
    """A share of learned runs is best where it is largest; the error that says who has learned, where it is smallest."""
    learned = "in_dist/token_error"
    columns = f"metrics: [{{name: {prefix}/{learned}, goal: max}}, {{name: {learned}, learned: 1.0}}]"
    text = SHORT.replace("metrics: [{name: in_dist/token_error}]", columns)
    search = "search: {kind: optuna, samples: 2}\n"
    for plan_text, metric in (
        (text, learned),
        (text.replace("every: 5", "every: 5, validation: true"), "validation/token_error"),
    ):
        plan = expand(load(plan_text + search + "schedule: asha\n"))
        assert (plan.search.metric, plan.search.goal) == (metric, "min")
        assert (plan.schedule.metric, plan.schedule.goal) == (metric, "min")


def test_the_validation_set_is_measured_with_the_variant_of_the_primary_metric():
    variants = "every: 5, validation: true, variants: {capped: {relative: {far: last}}}"
    text = SHORT.replace("every: 5", variants).replace("{name: in_dist", "{name: capped/in_dist")
    text = text.replace("CoPE: [cope], none: []", "Relative: [relative]")
    plan = expand(load(text + "search: {kind: optuna, samples: 2}\n"))
    assert plan.search.metric == "capped/validation/token_error"
    named = "search: {kind: optuna, samples: 2, metric: capped/validation/token_error}\n"
    column = text.replace("metrics: [", "metrics: [{name: capped/validation/token_error}, ")
    assert not expand(load(column + named)).reported_choices


def test_the_metric_of_those_that_learned_has_its_own_goal_without_a_column():
    columns = "metrics: [{name: of_learned/dense/loss, goal: max}, {name: in_dist/token_error, learned: 1.0}]"
    text = SHORT.replace("metrics: [{name: in_dist/token_error}]", columns)
    assert schedule_of(text + "schedule: asha\n") == Asha(metric="dense/loss", goal="max", grace=6)


def test_the_default_grace_is_at_least_one_evaluation():
    assert schedule_of(SHORT.replace("every: 5", "every: 25") + "schedule: asha\n").grace == 25
    axis = SHORT.replace("[1e-3, 2e-3]", "[1e-3]\n  train.steps: [60, 600]")
    assert schedule_of(axis + "schedule: asha\n").grace == 6


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("hyperband", ("unknown_kind", "test.yaml:14", "schedule")),
        ("{kind: ash}", ("unknown_kind", "test.yaml:14", "schedule")),
        ("{grace: 10}", ("missing_kind", "test.yaml:14", "schedule")),
        ("{kind: asha, grce: 10}", ("unknown_key", "test.yaml:14", "schedule.grce")),
        ("{kind: asha, grace: 0}", ("invalid_value", "test.yaml:14", "schedule.grace")),
        ("{kind: asha, reduction: 1}", ("invalid_value", "test.yaml:14", "schedule.reduction")),
        ("{kind: median, reduction: 3}", ("unknown_key", "test.yaml:14", "schedule.reduction")),
        ("{kind: asha, goal: low}", ("unknown_choice", "test.yaml:14", "schedule.goal")),
        ("{kind: asha, grace: 60}", ("grace_too_long", "test.yaml:14", "schedule.grace")),
        ("{kind: asha, metric: in_dist/tokn_error}", ("unknown_metric", "test.yaml:14", "schedule.metric")),
        ("{kind: asha, metric: facts.wall_s}", ("unknown_metric", "test.yaml:14", "schedule.metric")),
        ("{kind: asha, metric: dense/loss}", ("unknown_goal", "test.yaml:14", "schedule.metric")),
        ("{kind: asha, goal: max}", ("contradicting_goal", "test.yaml:14", "schedule.goal")),
    ],
)  # fmt: skip
def test_errors_name_line_and_key(schedule, expected):
    assert located(error_of(SHORT + f"schedule: {schedule}\n")) == expected


def test_a_schedule_needs_evaluations_before_the_last_step():
    text = SHORT.replace("every: 5", "every: 60") + "schedule: asha\n"
    error = error_of(text)
    assert located(error) == ("no_evaluation", "test.yaml:14", "schedule")
    assert (error.data["every"], error.data["steps"]) == (60, 60)


def test_a_metric_of_the_last_evaluation_alone_is_refused():
    text = (
        "title: T\nbase:\n  task: {kind: code, tokens: 64}\n  evaluate: {contexts: [64, 128], every: 10}\n"
        'metrics: [{name: "test/perplexity@128"}]\nschedule: asha\n'
    )
    error = error_of(text)
    assert located(error) == ("not_evaluated", "test.yaml:6", "schedule")
    assert error.data["metric"] == "validation/perplexity@128"
    own = text.replace("schedule: asha", 'schedule: {kind: asha, metric: "test/perplexity@128"}')
    assert located(error_of(own)) == ("not_evaluated", "test.yaml:6", "schedule.metric")


def test_the_main_metric_may_be_no_metric_of_an_evaluation():
    text = SHORT.replace("in_dist/token_error", "facts.tokens_per_s") + "schedule: asha\n"
    assert error_of(text).code == "not_evaluated"


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["schedule.grace=20"], Asha(metric="in_dist/token_error", goal="min", grace=20)),
        (["schedule=median"], Median(metric="in_dist/token_error", goal="min", grace=6)),
        (["schedule.kind=median"], Median(metric="in_dist/token_error", goal="min", grace=10)),
        (["schedule.kind=none"], None),
        (["schedule=none"], None),
        (["schedule={kind: asha, reduction: 3.0}"], Asha(metric="in_dist/token_error", goal="min", grace=6, reduction=3)),
    ],
)  # fmt: skip
def test_schedules_can_be_assigned(assignments, expected):
    assert schedule_of(SCHEDULED, assignments=assignments) == expected


def test_errors_of_an_assigned_schedule_name_the_option():
    for text, assignment, code, key_path in (
        (SHORT, "schedule.kind=ash", "unknown_kind", "schedule"),
        (SHORT, "schedule.kind=3", "unknown_kind", "schedule"),
        (SCHEDULED, "schedule.grace=-1", "invalid_value", "schedule.grace"),
    ):
        assert located(error_of(text, assignments=[assignment])) == (code, f"--set {assignment}", key_path)
    error = error_of(SHORT, assignments=["schedule=asha", "evaluate.every=100"])
    assert located(error) == ("no_evaluation", "--set schedule=asha", "schedule")


def test_a_scale_may_have_a_schedule_of_its_own():
    text = SCHEDULED.replace("wide: {", "wide: {schedule: {kind: asha, grace: 30}, ")
    assert schedule_of(text, scale="wide").grace == 30
    assert schedule_of(text.replace("grace: 30", "grace: 60")).grace == 10
    error = error_of(text.replace("grace: 30", "grace: 60"), scale="wide")
    assert located(error) == ("grace_too_long", "test.yaml:13", "schedule.grace")


def test_the_examples_of_searches_are_valid(request):
    text = (request.config.rootpath / "docs" / "how-to" / "search.md").read_text()
    file, suggested = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    plan = expand(load(file))
    assert len(plan.rows) == 2 * plan.ablation.content.search.samples
    base = TEXT[: TEXT.index("grid:")].replace("steps: 6", "steps: 600")
    plan = expand(load(base + TEXT[TEXT.index("seeds:") :] + suggested))
    assert plan.open_samples == plan.ablation.content.search.samples
