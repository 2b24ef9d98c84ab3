"""A training step does not wait for the device: it reads no value of a tensor, except at logging intervals."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cope_sweep.train import Runtime, Trainer
from tests.helpers.tiny import tiny_run

READS = {
    torch.ops.aten._local_scalar_dense.default,  # item(), float(), bool(), if
    torch.ops.aten.nonzero.default,  # its size is known on the device only; boolean indices
    torch.ops.aten.equal.default,
}


class CountReads(TorchDispatchMode):
    """Counts the operators that have to wait for a device."""

    def __init__(self):
        super().__init__()
        self.reads, self.operators = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        if func in READS:
            self.reads.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("position", [["cope"], ["rope", "relative"], ["cope_mlp", "alibi"], ["absolute", "t5"]])
def test_a_step_reads_no_tensor(optimizer, position, monkeypatch):
    """The losses are read when they are logged. With the reference attention, whose operators are visible here."""
    run = tiny_run(**{"train.optimizer": optimizer, "model.position": position, "train.schedule": "cosine"})
    trainer = Trainer(run, Runtime(attention="reference", micro_batch=3))
    with trainer.runtime.applied(), CountReads() as count:
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"):
                patch.setattr(torch.Tensor, name, lambda *_, **__: pytest.fail("a step reads a tensor"))
            for _ in range(3):
                trainer.train_step()
        assert count.reads == []
        assert count.operators > 100
        trainer.mean_loss()
    assert count.reads == ["aten::_local_scalar_dense"]
    trainer.close()


def test_an_evaluation_reads_its_sums_once_a_test_set(monkeypatch):
    trainer = Trainer(tiny_run(**{"model.position": ["cope"]}), Runtime(attention="reference", micro_batch=3))
    lists = []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda vector: lists.append(vector) or vector.numpy().tolist())
    with trainer.runtime.applied(), CountReads() as count:
        trainer.evaluate(8)
    assert count.reads == []
    assert len(lists) == len(trainer.spec.task.TESTS)


def test_test_sets_of_every_evaluation_are_generated_and_copied_once(monkeypatch):
    trainer = Trainer(tiny_run(), Runtime())
    task, asked = type(trainer.spec.task), []
    sequences = task.sequences
    monkeypatch.setattr(task, "sequences", lambda self, *given: asked.append(given) or sequences(self, *given))
    first = trainer.evaluate(8)
    assert len(asked) == 6  # two batches of three test sets
    assert trainer.evaluate(8) == first
    assert len(asked) == 6
    trainer.evaluate(16)  # the longer final evaluation is not kept
    trainer.evaluate(16)
    assert len(asked) == 6 + 2 * 6
