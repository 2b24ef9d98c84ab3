import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cope_sweep.model import CheckpointError
from cope_sweep.store import Store
from cope_sweep.train import Runtime, Trainer, train_run
from cope_sweep.train.resume import load_resume, save_resume
from tests.tiny import tiny_run
from tests.train.stores import stop_after, text_run, weights


@pytest.mark.parametrize(
    ("dropout", "position", "optimizer"),
    [
        (0.0, ["cope"], "adamw"),
        (0.3, ["absolute"], "adamw"),
        (0.3, ["rope"], "adamw"),
        (0.0, ["absolute"], "muon"),
        (0.3, ["cope"], "muon"),
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, dropout, position, optimizer):
    run = tiny_run(
        **{"train.steps": 23, "model.dropout": dropout, "model.position": position, "train.schedule": "cosine"},
        **{"train.optimizer": optimizer},
    )
    whole, parts = Store(tmp_path / "whole", create=True), Store(tmp_path / "parts", create=True)
    train_run(run, whole, Runtime())
    assert train_run(run, parts, Runtime(), should_stop=stop_after(4)) == "interrupted"
    assert parts.run(run.run_id).status == "interrupted"
    assert train_run(run, parts, Runtime(), should_stop=stop_after(9)) == "interrupted"
    assert train_run(run, parts, Runtime()) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert a.result["metrics"] == b.result["metrics"]
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, weights(b)[name]), name
    assert a.curve() == b.curve()
    assert b.result["facts"]["resumed_from_step"] == 15


@given(
    stops=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    micro_batch=st.sampled_from([None, 1, 3]),
    checkpoint_activations=st.booleans(),
    dropout=st.sampled_from([0.0, 0.4]),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 12),
    position=st.sampled_from([["cope"], ["cope_mlp", "absolute"], [{"kind": "relative", "share_layers": True}]]),
    optimizer=st.sampled_from(["adamw", "muon"]),
    task=st.sampled_from(
        [
            {"kind": "flip_flop", "pairs": 5},
            {"kind": "counting", "operations": 9, "train_sequences": 13},  # an epoch ends every third step
            {"kind": "selective_copy", "tokens": 2, "blanks": 20, "vocabulary": 6},
        ]
    ),
)
@settings(max_examples=12, deadline=None)
@pytest.mark.slow
def test_a_run_stopped_at_any_steps_ends_the_same_to_the_bit(
    tmp_path_factory, stops, micro_batch, checkpoint_activations, dropout, schedule, warmup, position, task, optimizer
):
    """Model, optimiser, schedule, dropout and position in the data: losses, curves and weights are the same."""
    run = tiny_run(
        task=task,
        **{"model.dropout": dropout, "model.layers": 2, "model.position": position, "evaluate.every": 4},
        train={"steps": 12, "batch": 5, "schedule": schedule, "warmup": warmup, "optimizer": optimizer},
    )
    runtime = Runtime(micro_batch=micro_batch, checkpoint_activations=checkpoint_activations)
    folder = tmp_path_factory.mktemp("store")
    whole, parts = Store(folder / "whole", create=True), Store(folder / "parts", create=True)
    train_run(run, whole, runtime)
    done = 0
    for stop in stops:
        if done + stop < 12:
            assert train_run(run, parts, runtime, should_stop=stop_after(stop - 1)) == "interrupted"
            done += stop
    assert train_run(run, parts, runtime) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert b.result["facts"]["resumed_from_step"] == done
    assert a.result["metrics"] == b.result["metrics"]
    assert a.curve() == b.curve()
    for name, tensor in weights(a).items():
        assert torch.equal(tensor, weights(b)[name]), name


def test_a_run_on_a_text_continues_to_the_bit(tmp_path, text):
    """The steps take two epochs of the text."""
    run = text_run(text, **{"train.steps": 60, "train.batch": 8, "model.dropout": 0.1})
    whole, parts = Store(tmp_path / "whole", create=True), Store(tmp_path / "parts", create=True)
    train_run(run, whole, Runtime())
    for stop in (6, 17, 20):
        train_run(run, parts, Runtime(), should_stop=stop_after(stop))
    assert train_run(run, parts, Runtime()) == "finished"
    a, b = whole.run(run.run_id), parts.run(run.run_id)
    assert a.curve() == b.curve()
    assert a.result["metrics"] == b.result["metrics"]


@pytest.fixture(params=["adamw", "muon"])
def trained(request):
    """A trainer after three steps, none of whose losses was reported."""
    trainer = Trainer(tiny_run(**{"train.optimizer": request.param, "model.position": ["cope"]}), Runtime())
    for _ in range(3):
        trainer.train_step()
    return trainer


def test_the_whole_state_is_restored(trained, tmp_path):
    save_resume(tmp_path / "resume", trained, {"note": [1, None]})
    restored = Trainer(trained.spec, Runtime())
    assert load_resume(tmp_path / "resume", restored) == {"note": [1, None]}
    for trainer in (trained, restored):
        trainer.train_step()
    assert restored.step == trained.step == 4
    assert restored.mean_loss() == trained.mean_loss()  # over all four steps
    for (name, value), other in zip(trained.model.named_parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_files_of_the_first_format_can_be_loaded(tmp_path):
    """They know AdamW alone, and name its state `adam/<index>/<name>`."""
    trained = Trainer(tiny_run(), Runtime())
    trained.train_step()
    save_resume(tmp_path / "new", trained, {})
    with safe_open(tmp_path / "new", framework="pt") as file:
        metadata = {name: value for name, value in file.metadata().items() if name != "optimizer_values"}
    tensors = {name.replace("optimizer/0/", "adam/"): value for name, value in load_file(tmp_path / "new").items()}
    assert any(name.startswith("adam/") for name in tensors)
    save_file(tensors, tmp_path / "old", metadata=metadata)
    restored = Trainer(trained.spec, Runtime())
    load_resume(tmp_path / "old", restored)
    for trainer in (trained, restored):
        trainer.train_step()
    for (name, value), other in zip(trained.model.named_parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_optimiser_state_that_is_no_tensor_is_restored(trained, tmp_path):
    """Some torch optimisers count steps with Python numbers."""
    parameter = trained.optimizers[0].param_groups[0]["params"][0]
    trained.optimizers[0].state[parameter]["updates"] = 7
    save_resume(tmp_path / "resume", trained, {})
    restored = Trainer(trained.spec, Runtime())
    load_resume(tmp_path / "resume", restored)
    parameter = restored.optimizers[0].param_groups[0]["params"][0]
    assert restored.optimizers[0].state[parameter]["updates"] == 7


def test_files_of_other_runs_and_damaged_files_are_refused(trained, tmp_path):
    path = tmp_path / "resume"
    save_resume(path, trained, {})
    other = Trainer(tiny_run(seed=1), Runtime())
    with pytest.raises(CheckpointError, match=f"is of run {trained.spec.run_id}, not of run {other.spec.run_id}"):
        load_resume(path, other)
    tensors = load_file(path)
    del tensors["model/embedding.weight"]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CheckpointError, match="does not fit run"):
        load_resume(path, Trainer(trained.spec, Runtime()))
