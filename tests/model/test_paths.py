"""The paths that a plan shows are those that the model's attention takes."""

import pytest
import torch

from cope_sweep.config import Resources
from cope_sweep.kernels import dispatch
from cope_sweep.model import Transformer
from cope_sweep.model.paths import LayerPaths, attention_paths
from tests.helpers.tiny import tiny_run


def test_the_paths_of_a_model_are_those_that_it_takes(monkeypatch):
    run = tiny_run(**{"model.layers": 2, "model.position": ["cope"]})
    taken = []
    choose = dispatch.choose

    def noted(*arguments):
        chosen = choose(*arguments)
        taken.append(chosen.name)
        return chosen

    monkeypatch.setattr(dispatch, "choose", noted)
    tokens_BT = torch.zeros((2, run.task.length("train")), dtype=torch.int64)
    Transformer(run).train()(tokens_BT)
    monkeypatch.undo()
    [found] = attention_paths(run, Resources(), "cpu")
    assert [found.name] * 2 == taken
    assert found.layers == (0, 1)


def test_layers_with_the_same_path_are_one_entry():
    run = tiny_run(**{"model.layers": 3, "model.position": [{"kind": "cope", "layers": [1, 2]}]})
    paths = attention_paths(run, Resources(attention="blocked"), "cpu")
    assert paths == [LayerPaths((0, 2), "blocked", None)]
    by_layer = attention_paths(run, Resources(precision="fp32"), "cuda")
    assert [path.layers for path in by_layer] == [(0, 0), (1, 2)]
    assert by_layer[0].name == "sdpa"


def test_the_implementation_and_the_type_of_the_resources_count():
    run = tiny_run(**{"model.position": ["cope"]})
    assert attention_paths(run, Resources(attention="reference"), "cpu") == [LayerPaths((0, 0), "reference", None)]
    [found] = attention_paths(run, Resources(attention="triton"), "cpu")
    assert found.name != "triton"
    assert found.reason is not None


@pytest.mark.parametrize("span", [6, 7])
def test_a_span_can_be_longer_than_the_sequences_in_training(span):
    run = tiny_run(**{"model.position": [{"kind": "cope", "gate_bias": {"span": span}}]})
    assert run.task.length("train") <= span < run.dims.context
    [found] = attention_paths(run, Resources(), "cpu")
    assert found.layers == (0, 0)
