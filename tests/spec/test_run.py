import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cope_sweep.positions import CoPE
from cope_sweep.spec import RunSpec
from cope_sweep.tasks import SelectiveCopy
from tests.tiny import tiny_run


def test_golden_ids():
    """These ids are in people's ledgers. If one changes, bump a VERSION, or make the new field's default the old way."""
    assert tiny_run().run_id == "b47662f63f2dfe6f"
    assert tiny_run(seed=1).run_id == "951f3503878e2f29"
    assert tiny_run(**{"model.position": ["cope"]}).run_id == "3a78258c9dae4f92"
    assert tiny_run(**{"model.position": [{"kind": "cope", "p_max": 16}, "rope"]}).run_id == "f5c56ef40fac9781"
    assert RunSpec.model_validate_json('{"task": {"kind": "flip_flop"}}').run_id == "1a9e9ee2afeedda1"


def test_identity_is_what_is_not_default():
    assert RunSpec(task=SelectiveCopy(tokens=8)).identity == {
        "spec": {"task": {"kind": "selective_copy", "tokens": 8}},
        "versions": {"selective_copy": 1},
    }


def test_asking_for_the_id_leaves_the_identity_alone():
    run = tiny_run()
    before = run.identity
    assert run.run_id
    assert run.identity == before


def test_a_default_written_out_changes_nothing():
    assert tiny_run(**{"model.dropout": 0.0, "train.schedule": "constant"}).run_id == tiny_run().run_id
    assert tiny_run(**{"model.position": [{"kind": "cope", "p_max": 64}]}) == tiny_run(**{"model.position": ["cope"]})


def test_a_bumped_version_changes_the_id_of_its_users_only(monkeypatch):
    with_cope, without = tiny_run(**{"model.position": ["cope"]}).run_id, tiny_run().run_id
    monkeypatch.setattr(CoPE, "VERSION", 2)
    assert tiny_run(**{"model.position": ["cope"]}).run_id != with_cope
    assert tiny_run().run_id == without


@given(
    changes=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 3),
            "model.layers": st.integers(1, 3),
            "train.lr": st.sampled_from([1e-3, 0.001, 2e-3]),
            "task.tokens": st.integers(1, 3),
        }
    ),
    others=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 3),
            "model.layers": st.integers(1, 3),
            "train.lr": st.sampled_from([1e-3, 2e-3]),
            "task.tokens": st.integers(1, 3),
        }
    ),
)
@settings(max_examples=80, deadline=None)
def test_ids_are_equal_exactly_where_specs_are(changes, others):
    a, b = tiny_run(**changes), tiny_run(**others)
    assert (a.run_id == b.run_id) == (a == b)


def test_identity_knows_nothing_of_execution():
    text = json.dumps(tiny_run().identity)
    assert not any(word in text for word in ("device", "precision", "store", "host", "workers"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.heads", 3, "does not divide model.dim = 8; heads that do: 1, 2, 4"),
        ("model.context", 3, "shorter than the task's longest sequence, 8 tokens"),
        ("evaluate.contexts", [64], "slides windows over a text, and selective_copy generates sequences"),
        ("evaluate", {"contexts": [64, 32, 64]}, "evaluate.contexts has 64 twice"),
        ("evaluate", {"contexts": [64, 32], "stride": 33}, "stride = 33 leaves out tokens.*32"),
        ("evaluate", {"contexts": [0]}, "greater than or equal to 1"),
        ("train.warmup", 99, "more than train.steps = 6"),
        ("model.layers", 0, "greater than or equal to 1"),
        ("train.lr", float("inf"), "finite|Input should be"),
        ("seed", -1, "greater than or equal to 0"),
        ("model.position", [{"kind": "cope", "p_max": 0}], "greater than or equal to 1"),
        ("model.position", ["learned"], "does not match any of the expected tags"),
        ("model.dim", "8", "valid integer"),
        ("train.steps", 1.5, "valid integer"),
    ],
)
def test_impossible_runs_are_refused(key, value, message):
    with pytest.raises((ValidationError, ValueError), match=message):
        tiny_run(**{key: value})


def test_runs_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        tiny_run().seed = 3
