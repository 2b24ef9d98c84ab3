"""A longer run continues a shorter one: its curve and weights are those of a run from the start, to the bit."""

import pytest

from cope_sweep.config.run import parent_ids
from cope_sweep.store import RunFolder, Store
from cope_sweep.train import Runtime, train_run
from tests.tiny import tiny_run
from tests.train.stores import stop_after, weights

MUON = {"train.optimizer": "muon", "train.warmup": 2, "model.dropout": 0.1, "model.position": ["cope"]}


@pytest.mark.parametrize("options", [{"evaluate.every": 3}, {"evaluate.every": 4}, {"evaluate.every": 5}, MUON])
@pytest.mark.parametrize("shorter", [7, 12])
def test_a_longer_run_continues_a_shorter_one(tmp_path, options, shorter):
    short, long = (tiny_run(**options | {"train.steps": steps}) for steps in (shorter, 20))
    assert short.run_id in parent_ids(long, [shorter])
    store, plain = Store(tmp_path / "a", create=True), Store(tmp_path / "b", create=True)
    train_run(short, store, Runtime())
    assert train_run(long, store, Runtime(), parent_id=short.run_id) == "finished"
    train_run(long, plain, Runtime())
    folder, expected = store.run(long.run_id), plain.run(long.run_id)
    assert folder.result["facts"]["parent_id"] == short.run_id
    assert folder.result["facts"]["resumed_from_step"] == shorter
    assert folder.curve() == expected.curve()
    assert folder.result["metrics"] == expected.result["metrics"]
    for name, tensor in weights(expected).items():
        assert (tensor == weights(folder)[name]).all(), name


def test_a_run_that_was_begun_continues_from_its_own_state(store):
    short, long = (tiny_run(**{"train.steps": steps}) for steps in (6, 20))
    train_run(short, store, Runtime())
    assert train_run(long, store, Runtime(), parent_id=short.run_id, should_stop=stop_after(3)) == "interrupted"
    assert train_run(long, store, Runtime(), parent_id=short.run_id) == "finished"
    assert store.run(long.run_id).result["facts"]["resumed_from_step"] == 10


@pytest.mark.parametrize("damage", ["gone", "cut", "curve"])
def test_where_the_parent_s_state_is_lost_the_run_starts_at_the_first_step(store, tmp_path, damage):
    short, long = (tiny_run(**{"train.steps": steps}) for steps in (6, 12))
    train_run(short, store, Runtime())
    parent = store.run(short.run_id)
    if damage == "gone":
        parent.final_state.unlink()
    elif damage == "cut":
        parent.final_state.write_bytes(parent.final_state.read_bytes()[:50])
    else:
        (parent.path / "curve.jsonl").write_text("")
    assert train_run(long, store, Runtime(), parent_id=short.run_id) == "finished"
    facts = store.run(long.run_id).result["facts"]
    assert (facts["resumed_from_step"], "parent_id" in facts) == (0, False)
    assert ("final_state" in facts["restarted"]) or ("curve.jsonl" in facts["restarted"])
    plain = Store(tmp_path / "plain", create=True)
    train_run(long, plain, Runtime())
    assert store.run(long.run_id).curve() == plain.run(long.run_id).curve()


def test_no_state_is_kept_where_it_is_of_no_use(store):
    falling = tiny_run(**{"train.schedule": "linear"})
    train_run(falling, store, Runtime())
    train_run(tiny_run(), store, Runtime(keep_final_state=False))
    assert not store.run(falling.run_id).final_state.exists()
    assert not store.run(tiny_run().run_id).final_state.exists()


@pytest.mark.parametrize("schedule", ["constant", "linear"])
@pytest.mark.parametrize("dies_in", ["writing_checkpoint", "finish"])
def test_a_run_that_is_killed_after_its_last_step_loses_nothing(store, tmp_path, monkeypatch, schedule, dies_in):
    run = tiny_run(**{"train.steps": 12, "train.schedule": schedule})

    def die(*arguments, **options):
        raise SystemExit  # as a signal does: nothing is recorded

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, dies_in, die)
        with pytest.raises(SystemExit):
            train_run(run, store, Runtime(checkpoint_every_s=0))
    assert train_run(run, store, Runtime()) == "finished"
    plain = Store(tmp_path / "plain", create=True)
    train_run(run, plain, Runtime())
    folder, expected = store.run(run.run_id), plain.run(run.run_id)
    assert folder.result["facts"]["resumed_from_step"] >= 11
    assert folder.curve() == expected.curve()
    assert folder.result["metrics"] == expected.result["metrics"]
