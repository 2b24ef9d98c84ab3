"""Two workers of a torch.distributed group, in two processes, against one worker that takes the whole batch."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed

from cope_sweep.errors import CheckpointError
from cope_sweep.model import loss
from cope_sweep.store import Store
from cope_sweep.train import Runtime, Trainer, train_run
from cope_sweep.train.workers import place_steps
from tests.helpers import s3
from tests.helpers.object_stores import object_server  # noqa: F401 - a fixture
from tests.helpers.tiny import tiny_run
from tests.helpers.training import stop_after, text_run, weights
from tests.train.conftest import text_task

pytestmark = pytest.mark.slow  # starts two processes

STEPS = 4
FLIP_FLOP = {"kind": "flip_flop", "pairs": 7}
COUNTING = {"kind": "counting", "variables": 2, "operations": 20, "max_tokens": 24, "train_sequences": None}
SOME_LAYERS = [
    {"kind": "cope", "layers": [0]},
    {"kind": "relative", "layers": [2], "positions": 3},
    {"kind": "cope_mlp", "layers": [1], "share_layers": True},
    "absolute",
]
CASES = {
    "two equal shares": {"train.batch": 8},
    "shares of 4 and 3": {"train.batch": 7},
    "a worker without a sequence": {"train.batch": 1},
    "parts of 2": {"train.batch": 7, "micro_batch": 2},
    "parts of 1, one more on rank 0": {"train.batch": 5, "micro_batch": 1},
    "activations computed again": {"train.batch": 7, "micro_batch": 3, "checkpoint_activations": True},
    "encodings of some layers": {"model.layers": 3, "model.position": SOME_LAYERS, "train.batch": 5, "micro_batch": 2},
    "shared tables, activations computed again": {
        "model.layers": 3,
        "model.position": [{"kind": "cope", "share_layers": True}, {"kind": "relative", "share_layers": True}],
        "checkpoint_activations": True,
        "train.batch": 5,
        "micro_batch": 2,
    },
    "separate gate keys, llama, untied": {
        "model.family": "llama",
        "model.tied": False,
        "model.position": [{"kind": "cope", "gate": "separate"}, "rope"],
    },
    "losses of unequal numbers of targets": {"task": FLIP_FLOP, "train.batch": 6, "micro_batch": 2},
    "units and the most frequent answer": {"task": COUNTING, "train.batch": 5},
    "the loss in chunks of 2 tokens": {"chunk_logits": 12, "train.batch": 5, "micro_batch": 2},
    "dropout": {"model.dropout": 0.3, "train.batch": 7, "model.position": ["cope"]},
    "dropout, parts of 2, activations computed again": {
        "model.dropout": 0.3,
        "model.family": "llama",
        "model.layers": 2,
        "checkpoint_activations": True,
        "train.batch": 7,
        "micro_batch": 2,
    },
    "sampled positions": {"train.batch": 7, "micro_batch": 2, "model.position": [{"kind": "rope", "sampled": 20.0}]},
    "dropout, a worker without a sequence": {"model.dropout": 0.3, "train.batch": 1},
    "the optimiser's state divided": {"shard": True, "train.batch": 5, "model.layers": 2, "model.position": ["cope"]},
}
MUON = {"train.optimizer": "muon", "train.batch": 5, "micro_batch": 1}
RESUMED = {"train.steps": 33, "model.dropout": 0.2, "train.batch": 5, "model.position": ["cope"]}


def case(overrides, rank=0, world_size=1):
    """The trainer of a rank; with one worker the reference: the whole batch at once, activations saved."""
    overrides = {"task": {"kind": "selective_copy", "tokens": 2, "blanks": 9, "vocabulary": 6}} | overrides
    micro_batch = overrides.pop("micro_batch", None)
    checkpoint = overrides.pop("checkpoint_activations", False)
    shard = overrides.pop("shard", False)
    chunk_logits = overrides.pop("chunk_logits", 2**23)
    run = tiny_run(**overrides)
    if world_size == 1:
        return Trainer(run, Runtime())
    loss.CHUNK_LOGITS["cpu"] = chunk_logits
    runtime = Runtime(
        rank=rank, world_size=world_size, micro_batch=micro_batch, checkpoint_activations=checkpoint, shard=shard
    )
    return Trainer(run, runtime)


def trained(trainer):
    """Losses, weights and metrics, which must not depend on the number of workers."""
    losses = []
    for _ in range(STEPS):
        trainer.train_step()
        losses.append(trainer.mean_loss())
    measured = trainer.evaluate(9)
    for context in trainer.spec.evaluate.contexts:
        measured |= trainer.evaluator.evaluate_windows(context, 10_000)
    return losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}, measured


def counting_reductions(trainer):
    """A list that gets an entry whenever the workers' gradients are summed."""
    reductions = []

    def hook(state, bucket):
        reductions.append(bucket.index())
        work = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    trainer._parallel.register_comm_hook(None, hook)
    return reductions


def dropout_mask(rank=0, world_size=1):
    """The elements that dropout sets to 0 in a rank's embeddings, in a step with two sequences in all."""
    trainer, masks = case({"train.batch": 2, "model.dropout": 0.5}, rank, world_size), []
    trainer.model.blocks[0].register_forward_pre_hook(lambda _, inputs: masks.append(inputs[0] == 0))
    trainer.train_step()
    return masks[0]


def work(rank, folder, text, objects):
    """One worker: trains every case and writes the results to a file."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {name: trained(case(dict(overrides), rank, 2)) for name, overrides in CASES.items()}
    os.environ["COPE_SWEEP_CACHE"] = f"{folder}/cache"
    results["text"] = trained(case(text, rank, 2))
    trainer = case({"train.batch": 7, "micro_batch": 1}, rank, 2)
    reductions = counting_reductions(trainer)
    trainer.train_step()
    results["reductions"] = reductions
    results["dropout mask"] = dropout_mask(rank, 2)
    results["muon"] = trained(case(MUON, rank, 2))
    results["muon, divided"] = trained(case(MUON | {"shard": True}, rank, 2))
    divided = case({"shard": True}, rank, 2)
    divided.train_step()
    results["parameters with state"] = sum(len(each.optim.state) for each in divided.optimizers)

    runtime, run = Runtime(rank=rank, world_size=2, micro_batch=2), tiny_run(**RESUMED)
    asked = iter([None, "interrupted"])
    results["outcomes"] = [
        train_run(run, Store(f"{folder}/whole").run(run.run_id), runtime),
        train_run(run, Store(f"{folder}/parts").run(run.run_id), runtime, should_stop=lambda: next(asked)),
        train_run(run, Store(f"{folder}/parts").run(run.run_id), runtime),
    ]
    divided, sharded = tiny_run(**RESUMED | {"seed": 1}), replace(runtime, shard=True)
    asked = iter([None, "interrupted"])
    results["divided outcomes"] = [
        train_run(divided, Store(f"{folder}/whole").run(divided.run_id), runtime),
        train_run(divided, Store(f"{folder}/parts").run(divided.run_id), sharded, should_stop=lambda: next(asked)),
        train_run(divided, Store(f"{folder}/parts").run(divided.run_id), sharded),
    ]
    own = Store(f"{folder}/own{rank}", create=True).run(run.run_id)
    train_run(run, own, runtime, should_stop=lambda: "interrupted")
    torch.distributed.barrier()
    if rank == 1:
        own.path.mkdir(parents=True)
        shutil.copyfile(Store(f"{folder}/own0").run(run.run_id).resume, own.resume)
    train_run(run, own, runtime, should_stop=lambda: "interrupted")
    try:
        train_run(run, own, runtime)
    except CheckpointError as error:
        results["different steps"] = error.data["steps"]
    if rank == 0:
        own.resume.write_bytes(b"damaged")
    results["outcome with damage"] = train_run(run, own, runtime)

    os.environ["COPE_SWEEP_CACHE"] = f"{folder}/machine{rank}"
    asked = iter([None, "interrupted"])
    results["outcomes on two machines"] = [
        train_run(run, Store(objects).run(run.run_id), runtime, should_stop=lambda: next(asked)),
        train_run(run, Store(objects).run(run.run_id), runtime),
    ]
    Path(f"{folder}/rank{rank}.pickle").write_bytes(pickle.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    for name in ("whole", "parts"):
        Store(folder / name, create=True)
    return folder


@pytest.fixture(scope="module")
def text_case(folder):
    return {
        "task": text_task(folder / "text"),
        "train.batch": 5,
        "evaluate.contexts": [8, 40],
        "micro_batch": 2,
        "model.position": ["cope"],
    }


@pytest.fixture(scope="module")
def objects(object_server):  # noqa: F811
    """The URL of a store in an object store."""
    with pytest.MonkeyPatch.context() as patch:
        s3.set_environment(patch, object_server)
        yield f"s3://{s3.make_bucket()}/store"


@pytest.fixture(scope="module")
def ranks(folder, text_case, objects):
    """The results of each of two workers, by case."""
    torch.multiprocessing.spawn(work, (str(folder), text_case, objects), nprocs=2)
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(2)]


def assert_like_one_worker(ranks, name, reference):
    losses, weights, measured = reference
    for rank in ranks:
        assert rank[name][0] == pytest.approx(losses, rel=1e-5)
        for parameter, value in weights.items():
            torch.testing.assert_close(rank[name][1][parameter], value, rtol=1e-3, atol=2e-6, msg=parameter)
        assert rank[name][2] == pytest.approx(measured, rel=1e-4)
    for parameter in weights:
        assert torch.equal(ranks[0][name][1][parameter], ranks[1][name][1][parameter])


@pytest.mark.parametrize("name", CASES)
def test_two_workers_equal_one_with_the_whole_batch(ranks, name):
    assert_like_one_worker(ranks, name, trained(case(dict(CASES[name]))))


def test_two_workers_read_a_text_and_its_windows(ranks, folder, text_case, monkeypatch):
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(folder / "cache"))
    assert_like_one_worker(ranks, "text", trained(case(dict(text_case))))


def test_two_workers_train_with_muon(ranks):
    """Newton–Schulz rounds to bfloat16, so weights agree to its three digits of an update of lr·0.2·√32 a step."""
    losses, weights, _ = trained(case(dict(MUON)))
    for rank in ranks:
        assert rank["muon"][0] == pytest.approx(losses, rel=1e-3)
        for name, value in weights.items():
            torch.testing.assert_close(rank["muon"][1][name], value, rtol=1e-2, atol=1e-4, msg=name)


def test_the_ranks_dropout_masks_are_those_of_one_worker(ranks):
    one, other = (rank["dropout mask"] for rank in ranks)
    assert one.shape == other.shape
    assert not torch.equal(one, other)
    assert torch.equal(torch.cat((one, other)), dropout_mask())


def test_gradients_are_summed_once_a_step(ranks):
    assert [rank["reductions"] for rank in ranks] == [[0], [0]]


def test_two_workers_resume_to_the_bit(ranks, folder):
    assert [rank["outcomes"] for rank in ranks] == [["finished", "interrupted", "finished"]] * 2
    run_id = tiny_run(**RESUMED).run_id
    whole, parts = (Store(folder / name).run(run_id) for name in ("whole", "parts"))
    assert parts.result["facts"]["resumed_from_step"] == 20
    assert parts.result["metrics"] == whole.result["metrics"]
    assert parts.curve() == whole.curve()
    model = "model.safetensors"
    assert (parts.checkpoint / model).read_bytes() == (whole.checkpoint / model).read_bytes()


def test_workers_on_two_machines_resume_to_the_bit_from_an_object_store(ranks, folder, objects, tmp_path, monkeypatch):
    assert [rank["outcomes on two machines"] for rank in ranks] == [["interrupted", "finished"]] * 2
    monkeypatch.setenv("COPE_SWEEP_CACHE", str(tmp_path))
    run_id = tiny_run(**RESUMED).run_id
    whole, parts = (Store(place).run(run_id) for place in (folder / "whole", objects))
    assert parts.result["facts"]["resumed_from_step"] == 20
    assert parts.curve() == whole.curve()
    model = "model.safetensors"
    assert (parts.fetch_checkpoint() / model).read_bytes() == (whole.checkpoint / model).read_bytes()


def test_workers_that_would_continue_after_different_steps_do_not(ranks, folder):
    """A file system that shows an older resume file to one of them."""
    assert [rank["different steps"] for rank in ranks] == [[20, 10]] * 2


def test_if_rank_0_starts_again_the_others_do(ranks, folder):
    """Its resume file is damaged; the other rank has a good one."""
    assert [rank["outcome with damage"] for rank in ranks] == ["finished"] * 2
    run_id = tiny_run(**RESUMED).run_id
    whole, again = (Store(folder / name).run(run_id) for name in ("whole", "own0"))
    assert again.result["facts"]["restarted"]
    assert again.result["metrics"] == whole.result["metrics"]


def test_each_worker_keeps_the_state_of_a_part_of_the_parameters(ranks):
    parameters = sum(1 for _ in case({}).model.parameters())
    kept = [rank["parameters with state"] for rank in ranks]
    assert sum(kept) == parameters
    assert all(0 < each < parameters for each in kept)


def test_a_divided_muon_updates_like_a_whole_one(ranks):
    for (_, whole, _), (_, divided, _) in ((rank["muon"], rank["muon, divided"]) for rank in ranks):
        assert all(torch.equal(value, divided[name]) for name, value in whole.items())


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_counts_of_steps_are_where_the_update_needs_them(fused, device):
    """A `ZeroRedundancyOptimizer` has put them on the CPU; here "meta" stands for a GPU."""
    parameter = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    optimizer.param_groups[0]["fused"] = fused
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2)}
    place_steps(SimpleNamespace(optim=optimizer))
    assert optimizer.state[parameter]["step"].device.type == device
    assert optimizer.state[parameter]["exp_avg"].device.type == "cpu"


def test_a_divided_state_is_saved_whole_and_resumed_to_the_bit(ranks, folder):
    """Against workers that each keep all of the state."""
    assert [rank["divided outcomes"] for rank in ranks] == [["finished", "interrupted", "finished"]] * 2
    run_id = tiny_run(**RESUMED | {"seed": 1}).run_id
    whole, parts = (Store(folder / name).run(run_id) for name in ("whole", "parts"))
    assert parts.curve() == whole.curve()
    tensors, expected = weights(parts), weights(whole)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in expected.items())


def test_a_run_does_not_continue_on_other_data(store, text, tmp_path):
    run = text_run(text, **{"train.steps": 12})
    assert train_run(run, store.run(run.run_id), Runtime(), should_stop=stop_after(3)) == "interrupted"
    (tmp_path / "moved").mkdir()
    for path in (tmp_path / "text").iterdir():
        (tmp_path / "moved" / path.name).write_text(path.read_text().replace("lobster", "crab"))
    moved = text_run(text | {"folder": str(tmp_path / "moved")}, **{"train.steps": 12})
    assert moved.run_id == run.run_id
    assert train_run(moved, store.run(moved.run_id), Runtime()) == "failed"
    message = store.run(run.run_id).state["message"]
    assert run.task.fingerprint() in message
    assert moved.task.fingerprint() in message
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    assert store.run(run.run_id).result["facts"]["resumed_from_step"] == 4


def test_a_text_shorter_than_a_window_is_refused_before_training(store, text):
    run = text_run(text, **{"evaluate.contexts": [100_000]})
    assert train_run(run, store.run(run.run_id), Runtime()) == "failed"
    folder = store.run(run.run_id)
    assert "100,000" in folder.state["message"]
    assert folder.curve() == []
