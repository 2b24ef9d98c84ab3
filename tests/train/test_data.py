from cope_sweep.train import Runtime, train_run
from tests.train.stores import stop_after, text_run


def test_a_run_does_not_continue_on_other_data(store, text, tmp_path):
    run = text_run(text, **{"train.steps": 12})
    assert train_run(run, store, Runtime(), should_stop=stop_after(3)) == "interrupted"
    (tmp_path / "moved").mkdir()
    for path in (tmp_path / "text").iterdir():
        (tmp_path / "moved" / path.name).write_text(path.read_text().replace("lobster", "crab"))
    moved = text_run(text | {"folder": str(tmp_path / "moved")}, **{"train.steps": 12})
    assert moved.run_id == run.run_id
    assert train_run(moved, store, Runtime()) == "failed"
    message = store.run(run.run_id).state["message"]
    assert run.task.fingerprint() in message
    assert moved.task.fingerprint() in message
    assert "bring the files back" in message
    assert train_run(run, store, Runtime()) == "finished"
    assert store.run(run.run_id).result["facts"]["resumed_from_step"] == 4


def test_a_text_shorter_than_a_window_is_refused_before_training(store, text):
    run = text_run(text, **{"evaluate.contexts": [100_000]})
    assert train_run(run, store, Runtime()) == "failed"
    folder = store.run(run.run_id)
    assert "fewer than one context of 100,000" in folder.state["message"]
    assert folder.curve() == []
