import pytest
import torch

from cope_sweep.config import Resources
from cope_sweep.train import Runtime, Trainer, compiled
from tests.tiny import tiny_run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Traces and differentiates without generating code."""
    calls = []

    def counting(graph, inputs):
        calls.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(compiled, "BACKEND", counting)
    yield calls
    torch.compiler.reset()


def losses(run, runtime):
    trainer, values = Trainer(run, runtime), []
    while not trainer.done:
        trainer.train_step()
        values.append(trainer.mean_loss())
    values.append(trainer.evaluate(8)["in_dist/loss"])
    trainer.close()
    return values


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"model.position": ["cope"], "model.layers": 2}, marks=pytest.mark.thorough),
        pytest.param(
            {"model.position": [{"kind": "rope", "sampled": 20.0}, {"kind": "alibi", "sampled": 9.0}]},
            marks=pytest.mark.thorough,
        ),
        pytest.param({"model.position": ["rope", "relative"], "model.family": "llama"}, marks=pytest.mark.thorough),
        pytest.param(
            {"model.position": ["absolute"], "model.dropout": 0.2, "model.family": "post_norm"},
            marks=pytest.mark.thorough,
        ),
        {"model.position": ["cope"], "model.dropout": 0.2, "model.layers": 2, "task.blanks": 30},
    ],
)
def test_compiled_steps_have_the_losses_of_eager_ones(overrides, backend):
    """With dropout, too: its masks are a function of seeds, which are a tensor."""
    run = tiny_run(**overrides)
    eager = losses(run, Runtime(micro_batch=3))
    assert not backend
    assert losses(run, Runtime(micro_batch=3, compile=True)) == pytest.approx(eager, rel=1e-5)
    # Parts of 3 sequences and of 1, each as one graph.
    assert len(backend) == 2


def test_what_cannot_be_compiled_runs_uncompiled(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    run = tiny_run()
    eager = losses(run, Runtime())
    monkeypatch.setattr(compiled, "BACKEND", broken)
    assert losses(run, Runtime(compile=True)) == eager
    with pytest.raises(Exception, match="no compiler here"):  # other compilations of the process still say so
        torch.compile(lambda x: x + 1, backend=broken)(torch.ones(2))


@pytest.mark.parametrize(
    ("setting", "cuda", "expected"), [("auto", True, True), ("off", True, False), ("auto", False, False)]
)
def test_auto_compiles_on_cuda_only(setting, cuda, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert Runtime.of(Resources(compile=setting), worker_id="here").compile is expected
