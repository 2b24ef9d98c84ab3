import logging
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cope_sweep.config import Resources
from cope_sweep.model import Transformer
from cope_sweep.positions import ENCODINGS
from cope_sweep.train import Runtime, Trainer, compiled
from cope_sweep.train.batches import make_share
from tests.helpers.tiny import tiny_run

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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "overrides",
    [
        {"model.position": ["cope"], "model.layers": 2},
        {"model.position": [{"kind": "rope", "sampled": 20.0}, {"kind": "alibi", "sampled": 9.0}]},
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
    with pytest.raises(Exception, match="no compiler here"):  # other compilations of the process still say so
        torch.compile(lambda x: x + 1, backend=broken)(torch.ones(2))


@pytest.mark.parametrize(
    ("setting", "cuda", "expected"), [("auto", True, True), ("off", True, False), ("auto", False, False)]
)
def test_auto_compiles_on_cuda_only(setting, cuda, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert Runtime.of(Resources(compile=setting), worker_id="here").compile is expected


# CUDA graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"device": "cpu"}, False), ({"micro_batch": 2}, False), ({"world_size": 2}, False)],
)
def test_a_small_model_on_a_gpu_runs_as_graphs_where_a_step_has_one_backward_pass(changes, expected, monkeypatch):
    model, runtime = Transformer(tiny_run()), replace(Runtime(device="cuda"), **changes)
    assert compiled.runs_as_graphs(model, runtime) is expected
    monkeypatch.setattr(compiled, "CUDA_GRAPH_PARAMETERS", sum(each.numel() for each in model.parameters()))
    assert not compiled.runs_as_graphs(model, runtime)


def test_a_model_that_cannot_be_recorded_runs_without_graphs(monkeypatch, caplog):
    run = tiny_run()
    eager = losses(run, Runtime())
    monkeypatch.setattr("cope_sweep.train.trainer.runs_as_graphs", lambda model, runtime: True)
    with caplog.at_level(logging.WARNING, compiled.__name__):  # there is no GPU
        assert losses(run, Runtime(compile=True)) == eager
    assert "without CUDA graphs" in caplog.text


class Transfers(TorchDispatchMode):
    """Records operations between the host and the GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in tensors}) > 1 or "item" in str(operation):
            self.found.append(str(operation))
        return result


@pytest.mark.parametrize("kind", [*ENCODINGS, "sampled"])
def test_no_encoding_copies_between_host_and_gpu_in_a_step(kind):
    """A CUDA graph cannot record such copies. Fake tensors have a device and no data, so this needs no GPU."""
    encodings = [{"kind": "rope", "sampled": 9.0}, {"kind": "alibi", "sampled": 9.0}] if kind == "sampled" else [kind]
    run = tiny_run(**{"model.position": encodings, "model.dropout": 0.1, "model.layers": 2, "task.blanks": 30})
    model = Transformer(run).train()
    part = make_share(run, Runtime(), 0).parts[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(torch.empty(parameter.shape, device="cuda")))
        arguments = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in part]
        with Transfers() as transfers:
            model.loss(*arguments)
    assert not transfers.found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["cope", "rope", "alibi", "relative", "fox", "path"])
def test_graphs_have_the_losses_of_eager_steps_to_the_bit(kind):
    run = tiny_run(**{"model.position": [kind], "model.dropout": 0.1, "model.layers": 2, "task.blanks": 30})
    assert losses(run, Runtime("cuda", compile=True)) == losses(run, Runtime("cuda"))
