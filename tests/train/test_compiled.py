import pytest
import torch

from cope_sweep.config import Resources
from cope_sweep.model import Transformer
from cope_sweep.train import Runtime, Trainer, compiled
from tests.tiny import tiny_run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    """Traces and differentiates without generating code; restores what `compiled_hidden` sets for the process."""
    calls = []

    def counting(graph, inputs):
        calls.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(compiled, "BACKEND", counting)
    with torch._dynamo.config.patch(suppress_errors=False):
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
        {"model.position": ["cope"], "model.layers": 2},
        {"model.position": ["rope", "relative"], "model.family": "llama"},
        {"model.position": ["absolute"], "model.dropout": 0.2, "model.family": "post_norm"},
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


def test_small_models_on_a_gpu_run_as_cuda_graphs(monkeypatch):
    """By stand-ins: what torch.compile is asked for, and that each step begins a new generation of graphs."""
    asked, order = [], []

    def compile_(function, **options):
        asked.append(options)
        return lambda tokens, **seeds: order.append("compiled") or function(tokens)

    monkeypatch.setattr(compiled, "_on_cuda", lambda model: True)
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: order.append("begin"))
    model, tokens = Transformer(tiny_run()), torch.zeros(1, 5, dtype=torch.int64)
    hidden = compiled.compiled_hidden(model)
    assert torch.equal(hidden(tokens), model.hidden(tokens))
    assert order == ["begin", "compiled"]
    monkeypatch.setattr(compiled, "CUDA_GRAPH_PARAMETERS", 1)
    compiled.compiled_hidden(model)
    assert [options["mode"] for options in asked] == ["reduce-overhead", "default"]


@pytest.mark.parametrize(
    ("setting", "cuda", "expected"), [("auto", True, True), ("off", True, False), ("auto", False, False)]
)
def test_auto_compiles_on_cuda_only(setting, cuda, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert Runtime.of(Resources(compile=setting), worker_id="here").compile is expected
