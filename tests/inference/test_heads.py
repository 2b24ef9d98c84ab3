"""Statistics of heads, compared with loops over every pair and token."""

import math
import statistics
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cope_sweep.inference.probe import (
    head_statistics,
    mark_statistics,
    mean_gates,
    probe,
)
from tests.helpers.errors import raises
from tests.helpers.tiny_models import V, tiny_predictor

CoPE = {"kind": "cope", "p_max": 3}
GATES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]) | st.floats(0, 1, width=32)


def assert_equal(found, expected):
    for name, value in vars(expected).items():
        assert getattr(found, name) == (value if value is None else pytest.approx(value, rel=1e-6)), name


@given(tokens=st.lists(st.tuples(GATES, st.booleans()), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_auc_is_the_share_of_correctly_ordered_pairs(tokens):
    found = mark_statistics(np.array([g for g, _ in tokens]), np.array([marked for _, marked in tokens]))
    on = [g for g, marked in tokens if marked]
    off = [g for g, marked in tokens if not marked]
    assert (found.tokens_on, found.tokens_off) == (len(on), len(off))
    if not on or not off:
        assert found.auc is None
        return
    right = sum((a > b) + (a == b) / 2 for a in on for b in off)
    assert found.auc == pytest.approx(right / (len(on) * len(off)))


@given(tokens=st.lists(st.tuples(GATES, st.booleans()), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_means_effect_and_share_are_their_definitions(tokens):
    found = mark_statistics(np.array([g for g, _ in tokens]), np.array([marked for _, marked in tokens]))
    on = [g for g, marked in tokens if marked]
    off = [g for g, marked in tokens if not marked]
    assert found.on == (pytest.approx(statistics.fmean(on)) if on else None)
    assert found.off == (pytest.approx(statistics.fmean(off)) if off else None)
    total = math.fsum(on + off)
    assert found.share == (pytest.approx(math.fsum(on) / total) if total else None)
    if len(on) < 2 or len(off) < 2 or len(set(on)) == len(set(off)) == 1:
        return
    pooled = ((len(on) - 1) * statistics.variance(on) + (len(off) - 1) * statistics.variance(off)) / (len(tokens) - 2)
    assume(pooled > 1e-12)
    assert found.effect == pytest.approx((statistics.fmean(on) - statistics.fmean(off)) / math.sqrt(pooled), rel=1e-6)


def test_worked_by_hand():
    found = mark_statistics(np.array([0.9, 0.7, 0.1, 0.3]), np.array([True, True, False, False]))
    assert (found.on, found.off, found.auc) == (pytest.approx(0.8), pytest.approx(0.2), 1.0)
    assert found.share == pytest.approx(1.6 / 2.0)
    assert found.effect == pytest.approx(0.6 / math.sqrt(0.02))  # both variances are 0.02
    equal = mark_statistics(np.array([0.5, 0.5, 0.5]), np.array([True, False, False]))
    assert (equal.auc, equal.effect) == (0.5, None)
    assert mark_statistics(np.array([0.9, 0.1]), np.array([True, False])).effect is None


@given(T=st.integers(1, 9), selected=st.integers(0, 2**9 - 1), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_mean_gate_is_over_the_selected_queries_from_the_key_on(T, selected, seed):
    gates = np.tril(np.random.default_rng(seed).random((T, T))).astype(np.float32)
    queries_T = np.array([bool(selected >> i & 1) for i in range(T)])
    seen_TT = np.tri(T, dtype=bool)
    of_all, of_selected = mean_gates(gates, seen_TT), mean_gates(gates, seen_TT, queries_T)
    for means, queries in ((of_all, range(T)), (of_selected, np.flatnonzero(queries_T))):
        for j in range(T):
            seen = [float(gates[i, j]) for i in queries if i >= j]
            assert means[j] == pytest.approx(statistics.fmean(seen)) if seen else math.isnan(means[j])


@pytest.mark.parametrize(
    "position",
    [
        [CoPE],
        [{"kind": "cope_mlp"}],
        [CoPE, {"kind": "cope_alibi", "gate": "values"}],
        [CoPE, {"kind": "window", "size": 9}],
    ],
)
def test_several_sequences_against_a_loop_over_pairs(position):
    predictor, rng = tiny_predictor(position), np.random.default_rng(0)
    sequences = [rng.integers(0, V, T) for T in (9, 1, 14)]
    marks = [{"two": ids == 2, "high": ids > 3} for ids in sequences]
    seen_by = [rng.random(len(ids)) < 0.6 for ids in sequences]
    found = head_statistics(predictor, sequences, marks, seen_by=seen_by)
    kinds = [encoding.kind for encoding in predictor.run.model.position if encoding.kind != "window"]
    reach = 9 if len(kinds) < len(position) else 14
    assert [(f.layer, f.head, f.encoding) for f in found] == list(product((0, 1), (0, 1), kinds))
    probes = [probe(predictor, ids) for ids in sequences]
    for head in found:
        positions, gates, marked = [], [], {"two": [], "high": []}
        for ids, each, queries_T in zip(sequences, probes, seen_by, strict=True):
            matrices = each.layers[head.layer].contextual[head.encoding]
            for j in range(len(ids)):
                queries = [i for i in range(j, min(j + reach, len(ids))) if queries_T[i]]
                positions += [matrices.positions_HTT[head.head, i, j] for i in queries]
                if queries:
                    gates.append(statistics.fmean(float(matrices.gates_HTT[head.head, i, j]) for i in queries))
                    marked["two"].append(ids[j] == 2)
                    marked["high"].append(ids[j] > 3)
        if head.encoding == "cope":
            assert head.limit == 2
            assert head.clamped == sum(p > 2 for p in positions) / len(positions)
            assert 0 < head.clamped < 1
        else:
            assert (head.limit, head.clamped) == (None, None)
        assert head.position_mean == pytest.approx(np.mean(positions, dtype=np.float64), rel=1e-6)
        assert head.position_max == max(positions)
        for name, flags in marked.items():
            assert_equal(head.marks[name], mark_statistics(np.array(gates), np.array(flags)))


def test_for_one_query_the_gates_are_its_row():
    predictor, ids = tiny_predictor([CoPE]), np.random.default_rng(1).integers(0, V, 10)
    gates_T = probe(predictor, ids).layers[0].contextual["cope"].gates_HTT[1, 7, :8]
    [found] = head_statistics(predictor, [ids], [{"low": ids < 3}], seen_by=[np.arange(10) == 7], layers=[0], heads=[1])
    assert_equal(found.marks["low"], mark_statistics(gates_T, ids[:8] < 3))


def test_a_mark_missing_in_a_sequence_marks_none_of_its_tokens():
    predictor, ids = tiny_predictor([CoPE]), np.arange(6)
    found = head_statistics(predictor, [ids, ids], [{"low": ids < 3}, {}])
    assert (found[0].marks["low"].tokens_on, found[0].marks["low"].tokens_off) == (3, 9)


def test_a_model_without_gates_has_no_statistics():
    assert head_statistics(tiny_predictor(["rope", "relative"]), [[0, 1]], [{}]) == []


def test_invalid_marks_are_reported():
    with raises("marks_length", marks="low", entries=2, sequence=0, tokens=3):
        head_statistics(tiny_predictor([CoPE]), [[0, 1, 2]], [{"low": np.ones(2, dtype=bool)}])
    with raises("no_queries"):
        head_statistics(tiny_predictor([CoPE]), [[0, 1]], [{}], seen_by=[np.zeros(2, dtype=bool)])
    with raises("too_short", tokens=0):
        head_statistics(tiny_predictor([CoPE]), [[0, 1], []], [{}, {}])
