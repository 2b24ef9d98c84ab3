import re

import pytest

from cope_sweep.config import expand, with_overrides
from cope_sweep.config.ablation import Asha, Median, NoSchedule
from tests.config.ablations import TEXT, error_of, load

SHORT = TEXT.replace("{steps: 6}", "{steps: 60}\n  evaluate: {every: 5}")
SCHEDULED = SHORT + "schedule: {kind: asha, grace: 10}\n"
LINE = 1 + SHORT.count("\n")


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


def test_the_default_grace_is_at_least_one_evaluation():
    assert schedule_of(SHORT.replace("every: 5", "every: 25") + "schedule: asha\n").grace == 25
    axis = SHORT.replace("[1e-3, 2e-3]", "[1e-3]\n  train.steps: [60, 600]")
    assert schedule_of(axis + "schedule: asha\n").grace == 6


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("hyperband", "schedule: unknown kind 'hyperband'; accepted: none, asha, median"),
        ("{kind: ash}", "schedule: unknown kind 'ash'; did you mean 'asha'?"),
        ("{grace: 10}", 'schedule: {"grace": 10} has no `kind`; accepted: none, asha, median'),
        ("{kind: asha, grce: 10}", "schedule.grce: unknown key 'grce'; did you mean 'grace'?"),
        ("{kind: asha, grace: 0}", "schedule.grace: 0: input should be greater than or equal to 1"),
        ("{kind: asha, reduction: 1}", "schedule.reduction: 1: input should be greater than 1"),
        ("{kind: median, reduction: 3}", "schedule.reduction: unknown key 'reduction'"),
        ("{kind: asha, goal: low}", 'schedule.goal: "low" is not one of the choices'),
        ("{kind: asha, grace: 60}", "schedule.grace: grace = 60 steps is not less than train.steps = 60, so no run would be stopped; lower it"),
        ("{kind: asha, metric: in_dist/tokn_error}", "schedule.metric: the task selective_copy has no metric 'in_dist/tokn_error'; did you mean 'in_dist/token_error'?"),
        ("{kind: asha, metric: facts.wall_s}", "schedule.metric: the task selective_copy has no metric 'facts.wall_s'"),
        ("{kind: asha, metric: dense/loss}", "schedule.metric: 'dense/loss' is no column of the table, so its goal is not known; add `goal: min` or `goal: max`"),
        ("{kind: asha, goal: max}", "schedule.goal: max contradicts the goal of the column 'in_dist/token_error', min; remove one of them"),
    ],
)  # fmt: skip
def test_errors_name_line_key_and_remedy(schedule, message):
    assert f"test.yaml:{LINE}: {message}" in error_of(SHORT + f"schedule: {schedule}\n")


def test_a_schedule_needs_evaluations_before_the_last_step():
    text = SHORT.replace("every: 5", "every: 60") + "schedule: asha\n"
    assert (
        f"test.yaml:{LINE}: schedule: the schedule asha compares runs at evaluations before the last step"
        in error_of(text)
    )
    assert "evaluate.every = 60 is not less than train.steps = 60; evaluate more often" in error_of(text)


def test_a_metric_of_the_last_evaluation_alone_is_refused():
    text = (
        "title: T\nbase:\n  task: {kind: code, tokens: 64}\n  evaluate: {contexts: [64, 128], every: 10}\n"
        'metrics: [{name: "test/perplexity@128"}]\nschedule: asha\n'
    )
    assert "test.yaml:6: schedule: 'validation/perplexity@128' is not measured before the last step" in error_of(text)
    own = text.replace("schedule: asha", 'schedule: {kind: asha, metric: "test/perplexity@128"}')
    assert "test.yaml:6: schedule.metric: 'test/perplexity@128' is not measured" in error_of(own)


def test_the_main_metric_may_be_no_metric_of_an_evaluation():
    text = SHORT.replace("in_dist/token_error", "facts.tokens_per_s") + "schedule: asha\n"
    assert "schedule: 'facts.tokens_per_s' is not measured before the last step" in error_of(text)


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
    assert "--set schedule.kind=ash: schedule: unknown kind 'ash'" in error_of(SHORT, assignments=["schedule.kind=ash"])
    assert "--set schedule.kind=3: schedule" in error_of(SHORT, assignments=["schedule.kind=3"])
    assert "--set schedule.grace=-1: schedule.grace: -1" in error_of(SCHEDULED, assignments=["schedule.grace=-1"])
    message = error_of(SHORT, assignments=["schedule=asha", "evaluate.every=100"])
    assert message.startswith("--set schedule=asha: schedule: the schedule asha compares")


def test_a_scale_may_have_a_schedule_of_its_own():
    text = SCHEDULED.replace("wide: {", "wide: {schedule: {kind: asha, grace: 30}, ")
    assert schedule_of(text, scale="wide").grace == 30
    assert schedule_of(text.replace("grace: 30", "grace: 60")).grace == 10
    assert "test.yaml:13: schedule.grace: grace = 60" in error_of(text.replace("grace: 30", "grace: 60"), scale="wide")


def test_the_example_of_a_search_space_is_valid(request):
    text = (request.config.rootpath / "ablations" / "README.md").read_text()
    example, *_ = re.findall(r"^```yaml\n(search:.*?)^```", text, re.DOTALL | re.MULTILINE)
    plan = expand(load(TEXT[: TEXT.index("grid:")] + TEXT[TEXT.index("seeds:") :] + example))
    assert len(plan.rows) == plan.ablation.content.search.samples
