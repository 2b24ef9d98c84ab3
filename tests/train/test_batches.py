import numpy as np
import pytest
import torch

from cope_sweep.kernels.dropout import sequence_seeds
from cope_sweep.tasks import IGNORED, Batch, SelectiveCopy
from cope_sweep.train import Runtime, Trainer
from cope_sweep.train.batches import AHEAD, Batches, make_share
from tests.helpers.processes import until
from tests.helpers.tiny import tiny_run


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "task", [{"kind": "flip_flop", "pairs": 5}, {"kind": "counting", "operations": 9, "train_sequences": 13}]
)
def test_the_workers_shares_in_order_are_the_batch(world_size, task):
    """To the byte, also in the steps in which a generated block or an epoch ends."""
    run = tiny_run(task=task, **{"train.batch": 5})
    for step in range(14):
        whole = run.task.sequences("train", run.seed, 5 * step, 5)
        shares = [make_share(run, Runtime(rank=rank, world_size=world_size), step) for rank in range(world_size)]
        with_targets = [share for share in shares if share.targets]
        for index, array in enumerate((whole.inputs_NT, whole.targets_NT)):
            parts = [part[index].numpy() for share in with_targets for part in share.parts]
            assert np.concatenate(parts).tobytes() == array.tobytes()
        seeds = [seed for share in with_targets for part in share.parts for seed in part.seeds_N.tolist()]
        assert seeds == sequence_seeds(run.seed, range(5 * step, 5 * step + 5)).tolist()
        assert sum(share.targets for share in shares) == (whole.targets_NT != IGNORED).sum()
        assert {share.tokens for share in shares} == {whole.inputs_NT.size}


def test_a_worker_generates_its_own_share_only(monkeypatch):
    asked = []
    generate = SelectiveCopy.generate
    monkeypatch.setattr(
        SelectiveCopy, "generate", lambda self, *arguments: asked.append(1) or generate(self, *arguments)
    )
    run = tiny_run(**{"train.batch": 256})
    make_share(run, Runtime(), 0)
    assert len(asked) == 4  # blocks of 64
    asked.clear()
    make_share(run, Runtime(rank=1, world_size=4), 0)
    assert len(asked) == 1


def test_batches_are_made_ahead_and_no_further(monkeypatch):
    made = []
    monkeypatch.setattr("cope_sweep.train.batches.make_share", lambda spec, runtime, step: made.append(step) or step)
    batches = Batches(tiny_run(**{"train.steps": 6}), Runtime())
    assert batches.take(0) == 0
    until(lambda: made == list(range(1 + AHEAD)))
    assert [batches.take(step) for step in range(1, 6)] == [1, 2, 3, 4, 5]
    batches.close()
    assert made == list(range(6))  # none after the last step


def test_batches_of_another_step_can_be_taken():
    """As after loading a resume file."""
    run = tiny_run()
    batches = Batches(run, Runtime())
    batches.take(0)
    share = batches.take(4)
    assert torch.equal(share.parts[0][0], make_share(run, Runtime(), 4).parts[0][0])
    batches.close()


def test_an_error_of_the_task_reaches_the_step(monkeypatch):
    trainer = Trainer(tiny_run(), Runtime())
    trainer.train_step()

    def fail(*arguments) -> Batch:
        raise OSError("the disk is gone")

    monkeypatch.setattr(SelectiveCopy, "sequences", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        for _ in range(1 + AHEAD):
            trainer.train_step()
    trainer.close()
