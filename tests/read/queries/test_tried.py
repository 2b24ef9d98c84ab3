"""What a store has of some values of a key, in all of its ablations."""

import statistics

import pytest

from cope_sweep.api.runs import ListRuns, ListTried
from cope_sweep.read.queries import Queries
from tests.helpers.errors import raises
from tests.helpers.finished_runs import fail, finish, plan_of
from tests.helpers.sweeps import write_sweep

ERROR = "in_dist/token_error"


def ask(store, values, **options):
    return Queries(store).ask(ListTried(values=values, **options))


@pytest.fixture
def tried(store):
    """Two ablations with CoPE and no encoding in common: one of 6 steps, one of 9. `longer` has another rate of CoPE."""
    short = plan_of("short")
    longer = plan_of(
        "longer",
        base={**short.ablation.content.base, "train": {**short.ablation.content.base["train"], "steps": 9}},
        grid={"model.position": {"CoPE": [{"kind": "cope", "p_max": 3}], "None": []}},
    )
    errors = {}
    for plan, level in ((short, 10.0), (longer, 20.0)):
        write_sweep(store, plan, sweep_id=f"20260730-12000{int(level / 10)}-abcd")
        for place, row in enumerate(plan.rows):
            for run in row.runs:
                errors[run.run_id] = level + place + run.seed / 4
                finish(store, run, {ERROR: errors[run.run_id], "dense/loss": 1.0})
    return short, longer, errors


def test_values_are_compared_within_groups_of_equal_settings(store, tried):
    short, longer, errors = tried
    answer = ask(store, "model.position=CoPE,none")
    assert (answer.key, answer.metric, answer.runs, answer.total) == ("model.position", ERROR, 8, 2)
    assert {group.settings["train.steps"]: group.ablations for group in answer.groups} == {
        "6": ["short"],
        "9": ["longer"],
    }
    assert all(group.settings.keys() == {"train.steps"} for group in answer.groups)
    assert answer.same["model.dim"] == "8"
    for group, plan in ((g, p) for p in (short, longer) for g in answer.groups if p.name in g.ablations):
        cope, none = group.values
        assert (cope.value.split(",")[0], none.value) == ("cope", "none")
        expected = [errors[run.run_id] for run in plan.rows[0].runs]
        assert cope.mean == pytest.approx(statistics.mean(expected))
        assert cope.std == pytest.approx(statistics.stdev(expected))
        assert (cope.n, set(cope.run_ids)) == (2, {run.run_id for run in plan.rows[0].runs})
    assert {value for value in answer.values if value.startswith("cope")} == {"cope, p_max=3", "cope, p_max=64"}
    assert answer.values[-1] == "none"  # in the order in which they were asked for


def test_a_key_alone_has_all_values_in_order_of_size(store, tried):
    answer = ask(store, "train.steps", filter=["model.position=none"])
    assert answer.values == ["6", "9"]
    (group,) = answer.groups
    assert [value.text for value in group.values] == ["12.12 ± 0.18 (2)", "21.12 ± 0.18 (2)"]
    assert group.ablations == ["longer", "short"]


def test_a_value_that_is_a_mapping_is_named_by_its_fields(store):
    grid = {"model.position": [[{"kind": "cope", "gate_bias": {"span": 3}}], ["cope"]]}
    plan = plan_of("biased", grid=grid)
    for row in plan.rows:
        for run in row.runs:
            finish(store, run, {ERROR: 1.0, "dense/loss": 1.0})
    assert ask(store, "model.position.cope.gate_bias").values == ["0", "span=3"]


def test_a_part_with_options_is_named_by_its_kind_and_by_what_differs(store):
    plan = plan_of(
        grid={"train.optimizer": ["adamw", *({"kind": "muon", "momentum": number} for number in (0.5, 0.9))]}
    )
    for run in plan.runs:
        finish(store, run, {ERROR: 1.0})
    answer = ask(store, "train.optimizer=muon,adamw")
    assert sorted(answer.values) == ["adamw", "muon, momentum=0.5", "muon, momentum=0.9"]
    found = Queries(store).ask(ListRuns(filter=["train.optimizer=muon"])).runs
    assert [run.values for run in found] == [{"train.optimizer": "muon"}] * 4


def test_runs_that_are_not_finished_are_counted(store, tried):
    other = plan_of("other", seeds=[7])
    fail(store, other.rows[0].runs[0])
    answer = ask(store, "model.position=cope", filter=["train.steps=6"])
    assert [(value.n, value.unfinished) for group in answer.groups for value in group.values] == [(2, 1)]


def test_pages_and_metrics(store, tried):
    first = ask(store, "model.position", limit=1, metric="dense/loss")
    assert (first.total, first.next, len(first.groups)) == (2, 1, 1)
    assert {value.mean for value in first.groups[0].values} == {1.0}
    last = ask(store, "model.position", limit=1, offset=1, metric="dense/loss")
    assert last.next is None
    assert first.groups + last.groups == ask(store, "model.position", metric="dense/loss").groups
    assert ask(store, "model.position", metric="none/such").groups[0].values[0].mean is None


def test_what_cannot_be_answered(store, tried):
    assert ask(store, "model.position=rope").groups == []
    for text in ("model.position=", "=cope", "=", " = , "):
        with raises("invalid_values", values=text):
            ask(store, text)
    with raises("unknown_key"):
        ask(store, "model.positon=cope")
    for key in ("tags.row", ERROR, "status"):  # of a condition, and nothing that was varied
        with raises("not_a_setting", key=key):
            ask(store, key)
    with raises("invalid_condition", condition="x"):
        ask(store, "model.position=cope", filter=["x"])
