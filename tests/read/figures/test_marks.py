"""How well heads mark tokens: AUC by counting pairs, of gates and of attention at equal distances; the verdict."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.inference.probe import probe
from cope_sweep.read.figures.kinds.maps import Maps
from cope_sweep.read.figures.marks import HeadMeasure, auc, auc_within, best_head, measure_heads
from cope_sweep.read.tables.claims import head_findings, hypothesis_verdict
from tests.helpers.errors import raises
from tests.helpers.tiny_models import V, tiny_predictor

VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0])
TOKENS = np.random.default_rng(0).integers(0, V, 12)
GATES = Maps(show="gates", mark="data", claim="Gates open at data")
ATTENTION = Maps(show="position_attention", mark="data", claim="Attention falls at data")


def counted(pairs):
    """The AUC by its definition."""
    won = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]
    return sum(won) / len(won) if won else math.nan


@given(st.lists(VALUES, max_size=12), st.lists(VALUES, max_size=12))
@settings(max_examples=100, deadline=None)
def test_auc_counts_pairs_with_ties_of_a_half(on, off):
    found = auc(np.array(on), np.array(off))
    assert found == pytest.approx(counted([(a, b) for a in on for b in off]), nan_ok=True)


@given(st.lists(st.tuples(VALUES, st.booleans(), st.integers(0, 2)), max_size=16))
@settings(max_examples=100, deadline=None)
def test_within_groups_only_their_own_pairs_count(lines):
    pairs = [(a, b) for a, on, group in lines for b, off, other in lines if on and not off and group == other]
    columns = [np.array(column) for column in zip(*lines, strict=True)] or [np.zeros(0)] * 3
    found = auc_within(columns[0], columns[1].astype(bool), columns[2].astype(int))
    assert found == pytest.approx(counted(pairs), nan_ok=True)


def test_cases_by_hand():
    assert auc(np.array([0.9, 0.4]), np.array([0.4, 0.1])) == pytest.approx(3.5 / 4)
    assert auc(np.array([1.0]), np.array([0.0])) == 1.0
    assert math.isnan(auc(np.array([1.0]), np.array([])))
    # A function of the group alone says nothing, however much the label follows the group.
    groups = np.array([0, 0, 0, 1, 1, 1])
    labels = np.array([True, True, False, True, False, False])
    assert auc_within(groups * -1.0, labels, groups) == 0.5
    assert auc(-groups[labels], -groups[~labels]) == pytest.approx(6 / 9)


@pytest.fixture(scope="module")
def predictor():
    return tiny_predictor([{"kind": "cope", "p_max": 4}])


def test_the_measure_of_a_model_by_its_matrices(predictor):
    """Gates: means over queries of marked keys against others. Attention: keys since the last mark, by distance."""
    found = measure_heads(predictor, {"gates": GATES, "attention": ATTENTION}, [TOKENS.tolist()])
    marked = predictor.run.task.marks(TOKENS)["data"]
    for layer in probe(predictor, TOKENS).layers:
        for head in layer.heads:
            gates_TT = layer.contextual["cope"].gates_HTT[head]
            means = [gates_TT[j:, j].mean(dtype=np.float64) for j in range(len(TOKENS))]
            pairs = [
                (a, b)
                for a, on in zip(means, marked, strict=True)
                for b, off in zip(means, marked, strict=True)
                if on and not off
            ]
            gates = found["gates"][layer.layer, head]
            assert gates.auc == pytest.approx(counted(pairs))
            assert (gates.with_label, gates.without) == (marked.sum(), (~marked).sum())
            assert gates.on == pytest.approx(np.mean([mean for mean, on in zip(means, marked, strict=True) if on]))

            a_TT = layer.position_only_attention_HTT[head]
            cells = [(i, i - d, not marked[i - d : i + 1].any()) for d in (1, 2, 4, 8) for i in range(d, 12)]
            pairs = [
                (a_TT[i, j], a_TT[k, m])
                for i, j, on in cells for k, m, off in cells if on and not off and i - j == k - m
            ]  # fmt: skip
            attention = found["attention"][layer.layer, head]
            assert attention.auc == pytest.approx(counted(pairs), nan_ok=True)
            assert attention.with_label + attention.without == 11 + 10 + 8 + 4


def test_attention_by_distance_alone_is_at_a_half():
    relative = tiny_predictor(["relative"])
    found = measure_heads(relative, {"attention": ATTENTION, "gates": GATES}, [TOKENS.tolist()])
    for each in found["attention"].values():
        assert math.isnan(each.auc) or 0 <= each.auc <= 1
    assert found["gates"] == {}, "it has no gates"


def test_the_best_head_and_initial_weights(predictor):
    heads = {
        (0, 0): HeadMeasure(0.4, 0, 0, 1, 1),
        (0, 1): HeadMeasure(math.nan, 0, 0, 0, 1),
        (1, 0): HeadMeasure(0.7, 0, 0, 1, 1),
    }
    assert best_head(heads) == (1, 0)
    assert best_head({}) is None
    first, again = predictor.untrained(), predictor.untrained()
    for (name, one), (_, two) in zip(first.model.named_parameters(), again.model.named_parameters(), strict=True):
        assert (one == two).all(), name
    assert first.model is not predictor.model


def frame(aucs, initial_aucs):
    """One chosen head a seed."""
    return pd.DataFrame([
        {"figure": "maps", "seed": seed, "layer": 0, "head": 0, "chosen": True, "auc": own, "on": 0.8, "off": 0.5,
         "initial_chosen": True, "initial_auc": first}
        for seed, (own, first) in enumerate(zip(aucs, initial_aucs, strict=True))
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("aucs", "initial_aucs", "verdict", "hypothesis"),
    [
        ([0.97, 0.98, 0.99], [0.6, 0.5, 0.55], "shown", "supported"),
        ([0.75, 0.75, 0.8], [0.6, 0.5, 0.55], "shown in part", "supported in part"),
        ([0.97, 0.98, 0.99], [0.99, 0.95, 0.99], "not shown", "not supported"),
        ([0.5, 0.52, 0.51], [0.9, 0.93, 0.9], "opposite", "contradicted"),
        ([0.97, 0.98], [0.5, 0.5], "too few seeds", "not testable with so few seeds"),
        ([], [], "not trained", "not tested yet"),
    ],
)
def test_the_verdict(aucs, initial_aucs, verdict, hypothesis):
    heads = frame(aucs, initial_aucs) if aucs else frame([0.5], [0.5])[:0]
    [found] = head_findings({"maps": GATES}, heads)
    assert (found.verdict, found.verdict_text, hypothesis_verdict([found])) == (verdict, verdict, hypothesis)
    assert found.claim == "Gates open at data"
    assert ("AUC" in found.meaning) is bool(aucs)
    if len(aucs) > 1:
        assert f"{np.mean(aucs):.2f} ± {np.std(aucs, ddof=1):.2f}" in found.ours


def test_a_claim_needs_a_mark_and_a_measure():
    for options in ({"show": "gates"}, {"show": "attention", "mark": "data"}, {"show": "positions", "mark": "data"}):
        with raises("unmeasured_claim", key="claim"):
            Maps(claim="x", **options)
