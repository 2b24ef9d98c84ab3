"""What position logits do in heads: every measure from the matrices of a probe, by plain numpy; and the warnings."""

import math

import numpy as np
import pytest
import torch

from cope_sweep.inference.probe import loads_of_heads, probe
from cope_sweep.model.load import ROWS, beyond_warnings, head_loads, largest_position, load_warnings
from tests.helpers.errors import raises
from tests.helpers.tiny_models import V, tiny_predictor

TOKENS = np.random.default_rng(3).integers(0, V, 14)
MEASURED = {
    "cope": [{"kind": "cope", "p_max": 4}],
    "with RoPE, a bias of the gates": [{"kind": "cope", "p_max": 3, "gate_bias": -1.0}, "rope"],
    "cope and relative": [{"kind": "cope", "p_max": 4}, "relative"],
    "without a limit": ["cope_mlp"],
    "separate keys": [{"kind": "cope", "p_max": 5, "gate": "separate", "layers": [1]}],
    "alibi": [{"kind": "alibi", "slopes": [0.5, 0.25]}],
    "in a window": [{"kind": "cope", "p_max": 3}, {"kind": "window", "size": 6}],
    "beside logits that replace q·k": ["path", "fox", {"kind": "relative", "layers": [1]}],
    "an MLP that reads q·k": [{"kind": "dape", "bias": "alibi", "hidden": 3}],
    "in chunks": ["relative", {"kind": "cope", "p_max": 3}, {"kind": "window", "size": 4, "chunks": True}],
}


def rows_of(tokens):
    return [math.ceil((n + 1) * tokens / ROWS) - 1 for n in range(ROWS)]


def first_key(run, i):
    """The first key that query i sees."""
    window = next((encoding for encoding in run.model.position if encoding.kind == "window"), None)
    if window is None:
        return 0
    return i // window.size * window.size if window.chunks else max(0, i - window.size + 1)


def log_softmax(x):
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.mark.parametrize("name", MEASURED)
def test_measures_equal_those_of_the_matrices(name):
    predictor = tiny_predictor(MEASURED[name])
    sequences = [TOKENS, TOKENS[:5], TOKENS[::-1].copy()]
    loads = {(load.layer, load.head, load.encoding): load for load in loads_of_heads(predictor, sequences)}
    probes = [probe(predictor, tokens_T) for tokens_T in sequences]
    kinds = [each for each in predictor.run.model.position if each.scores and each.kind not in ("window", "path")]
    expected = {(layer, head, e.kind) for e in kinds for layer in (0, 1) if e.serves(layer) for head in (0, 1)}
    assert set(loads) == expected
    for (layer, head, kind), load in loads.items():
        pairs, known, explained, beyond, spans = [], 0.0, 0.0, [], {}
        for tokens_T, found in zip(sequences, probes, strict=True):
            each = found.layers[layer]
            for i in sorted(set(rows_of(len(tokens_T)))):
                keys = slice(first_key(predictor.run, i), i + 1)
                attention = each.attention_HTT[head, i, keys].astype(float)
                score = each.scores_HTT[kind][head, i, keys].astype(float)
                pairs.append(np.abs(score))
                known += (attention * np.log(attention * len(attention))).sum()
                explained += (attention * (log_softmax(score) + np.log(len(attention)))).sum()
                if kind in each.contextual:
                    p = each.contextual[kind].positions_HTT[head, i, keys]
                    spans.setdefault(len(p), []).append(p[0])
                    if each.contextual[kind].limit is not None:
                        beyond.append(p > each.contextual[kind].limit)
        assert load.position == pytest.approx(np.concatenate(pairs).mean(), rel=1e-5)
        assert load.explained == pytest.approx(explained / known, rel=1e-4, abs=1e-6)
        assert load.beyond == (pytest.approx(np.concatenate(beyond).mean()) if beyond else None)
        assert [tokens for tokens, _ in load.spans] == sorted(spans)
        assert [span for _, span in load.spans] == pytest.approx(
            [np.mean(p) for _, p in sorted(spans.items())], rel=1e-5
        )


def test_content_logits_are_those_of_queries_and_keys():
    predictor = tiny_predictor(["relative"])
    seen = []
    from cope_sweep.kernels import observing

    with observing(lambda inputs, _: seen.append(inputs)), torch.no_grad():
        predictor.model(torch.from_numpy(TOKENS)[None])
    for load in loads_of_heads(predictor, [TOKENS]):
        inputs = seen[load.layer]
        logits_TT = (inputs.q_BHTK @ inputs.k_BHSK.mT / inputs.q_BHTK.shape[-1] ** 0.5)[0, load.head].abs()
        assert load.content == pytest.approx(logits_TT.tril().sum().item() / (14 * 15 / 2), rel=1e-6)
        assert load.load == pytest.approx(load.position / load.content)


def test_attention_by_positions_alone_is_explained_and_uniform_attention_is_not():
    predictor = tiny_predictor([{"kind": "alibi", "slopes": [0.5, 0.0]}])
    with torch.no_grad():
        for block in predictor.model.blocks:
            block.attention.qkv.weight[: 2 * predictor.run.model.dim].zero_()
            block.attention.qkv.bias[: 2 * predictor.run.model.dim].zero_()
    by_distance, uniform = (
        [load for load in loads_of_heads(predictor, [TOKENS]) if load.head == head] for head in (0, 1)
    )
    assert all(load.explained == pytest.approx(1) and load.content == 0 and load.load is None for load in by_distance)
    assert all(load.explained is None for load in uniform)


def test_the_span_of_gates_that_are_all_alike_grows_with_the_row():
    predictor = tiny_predictor([{"kind": "cope", "p_max": 4}])
    with torch.no_grad():
        for block in predictor.model.blocks:
            block.attention.qkv.weight.zero_()
            block.attention.qkv.bias.zero_()
    for load in loads_of_heads(predictor, [TOKENS]):
        assert load.spans == tuple((tokens, tokens / 2) for tokens in range(1, 15))
        # Of the keys of rows 1 … 14, all but the last 6 have a position ≥ 3.5.
        assert load.beyond == pytest.approx(sum(max(0, tokens - 6) for tokens in range(1, 15)) / (14 * 15 / 2))


def test_keys_that_a_window_hides_are_not_beyond_the_last_embedding():
    """Gates of ½ and 5 keys: positions reach 2.5, however long the row is."""
    predictor = tiny_predictor([{"kind": "cope", "p_max": 4}, {"kind": "window", "size": 5}])
    with torch.no_grad():
        for block in predictor.model.blocks:
            block.attention.qkv.weight.zero_()
            block.attention.qkv.bias.zero_()
    loads = loads_of_heads(predictor, [np.resize(TOKENS, 50)])
    assert all(load.beyond == 0 and load.spans[-1] == (5, 2.5) for load in loads)
    assert largest_position(loads) == 2.5


def test_few_rows_of_a_long_sequence():
    predictor = tiny_predictor([{"kind": "cope", "p_max": 4}])
    tokens_T = np.resize(TOKENS, 50)
    (load, *_) = loads_of_heads(predictor, [tokens_T], layers=[1], heads=[1])
    assert (load.layer, load.head) == (1, 1)
    assert len(load.spans) == ROWS
    assert load.spans[-1][0] == 50


def test_a_model_without_scores_has_no_loads():
    for position in ([], ["rope"], ["absolute"]):
        assert loads_of_heads(tiny_predictor(position), [TOKENS]) == []
    with raises("no_such_head"):
        loads_of_heads(tiny_predictor(["cope"]), [TOKENS], heads=[7])


def test_a_window_is_a_mask_and_no_logits():
    position = [{"kind": "alibi", "slopes": [0.5, 0.25]}, {"kind": "window", "size": 3}]
    loads = loads_of_heads(tiny_predictor(position), [TOKENS])
    assert {load.encoding for load in loads} == {"alibi"}
    assert all(math.isfinite(load.load) and math.isfinite(load.explained) for load in loads)
    assert loads_of_heads(tiny_predictor([position[1]]), [TOKENS]) == []


REPLACING = ["path", "tra", "wall", "mapformer_em", {"kind": "mapformer_em", "product": "s"}]


@pytest.mark.parametrize("encoding", [*REPLACING, {"kind": "fox", "scaled": False}])
def test_logits_that_replace_those_of_queries_and_keys_are_no_position_logits(encoding):
    predictor = tiny_predictor([encoding])
    assert loads_of_heads(predictor, [TOKENS]) == []
    assert all(each.position_only_attention_HTT is None for each in probe(predictor, TOKENS).layers)


def test_content_logits_are_those_that_replace_queries_and_keys():
    """Beside logits that are all 0, forget gates explain all of attention."""
    predictor = tiny_predictor([{"kind": "mapformer_em", "product": "s"}, "fox"])
    with torch.no_grad():
        for parameter in predictor.model.position[0].parameters():
            parameter.zero_()
    loads = loads_of_heads(predictor, [TOKENS])
    assert {load.encoding for load in loads} == {"fox"}
    assert all(load.content == pytest.approx(0, abs=1e-12) and load.explained == pytest.approx(1) for load in loads)


def test_stick_breaking_has_no_softmax_to_explain():
    loads = loads_of_heads(tiny_predictor([{"kind": "alibi", "slopes": [0.5, 0.25]}, "stick_breaking"]), [TOKENS])
    assert {load.encoding for load in loads} == {"alibi"}
    assert all(load.explained is None for load in loads)


def test_warnings_need_every_head_beyond_or_a_model_without_load():
    predictor = tiny_predictor([{"kind": "cope", "p_max": 1}])
    loads = head_loads(predictor.model, [torch.from_numpy(TOKENS)])
    assert min(load.beyond for load in loads) > 0.5
    ((text, measured),) = beyond_warnings(loads)
    assert text.startswith("cope: ")
    assert measured.endswith("100 % of the keys")
    assert load_warnings(loads) == []
    with torch.no_grad():
        for table in predictor.model.position.parameters():
            table *= 1e-4
    loads = head_loads(predictor.model, [torch.from_numpy(TOKENS)])
    assert len(load_warnings(loads)) == 1
    few = head_loads(tiny_predictor([{"kind": "cope", "p_max": 8}]).model, [torch.from_numpy(TOKENS)])
    assert beyond_warnings(few) == []
    assert beyond_warnings(loads[:1] + few[1:]) == []
