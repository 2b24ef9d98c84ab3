"""How well heads mark tokens: AUC by counting pairs, of gates and of attention at equal distances; the verdict."""

import itertools
import math
import operator
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.inference.probe import probe
from cope_sweep.read.figures import marks
from cope_sweep.read.figures.kinds.maps import Maps
from cope_sweep.read.figures.marks import (
    HalfProbe,
    HeadMeasure,
    Ranked,
    auc,
    best_head,
    controls_of,
)
from cope_sweep.read.reports.heads import heads_layout
from cope_sweep.read.tables.claims import claims_layout, head_findings, hypothesis_verdict
from cope_sweep.read.tables.controls import HEAD_COLUMNS, SHIFTED, TYPES, controls_of_figure, percentile
from tests.helpers.errors import raises
from tests.helpers.tiny_models import V, tiny_predictor

VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0])
TOKENS = np.random.default_rng(0).integers(0, V, 12)
GATES = Maps(show="gates", mark="data", claim="Gates open at data")
ATTENTION = Maps(show="position_attention", mark="data", claim="Attention falls at data")


def auc_within(values, labels, groups):
    """The AUC of one head, over the pairs of values in the same group."""
    return float(Ranked(values[None], groups).auc_of_heads(labels)[0])


def measure_heads(predictor, figures, sequences):
    """Name of a figure → the measure of every head on these sequences."""
    probed = HalfProbe.of(predictor, {figure.show for figure in figures.values()}, sequences)
    return {name: probed.measures(figure) for name, figure in figures.items()}


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


def test_gates_of_pairs_that_a_window_hides_are_no_gates_of_0():
    windowed = tiny_predictor([{"kind": "cope", "p_max": 4}, {"kind": "window", "size": 3}])
    marked = windowed.run.task.marks(TOKENS)["data"]
    found = measure_heads(windowed, {"gates": GATES}, [TOKENS.tolist()])["gates"]
    for layer in probe(windowed, TOKENS).layers:
        for row, head in enumerate(layer.heads):
            gates_TT = layer.contextual["cope"].gates_HTT[row]
            means = np.array([gates_TT[j : j + 3, j].mean(dtype=np.float64) for j in range(len(TOKENS))])
            assert found[layer.layer, head].on == pytest.approx(means[marked].mean())


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


CONTROLS = [0.5 + number / 100 for number in range(40)]
"""AUCs from 0.5 to 0.89: p of a mark above all of them is 2 / 41."""


FEWER = [value - 0.195 for value in CONTROLS]


def lines_of(figure, seed, auc, controls=(), kind=TYPES):
    """The lines of a chosen head and its controls in one seed."""
    shared = {"figure": figure, "run_id": f"{seed}", "seed": seed, "layer": 0, "head": 0}
    mark = shared | {
        "chosen": True, "auc": auc, "on": 0.8, "off": 0.5, "with_label": 9, "without": 9, "initial_chosen": True, "initial_auc": 0.5, "control": "",
        "control_id": 0, "control_label": "",
    }  # fmt: skip
    empty = mark | {"chosen": False, "initial_chosen": False, "initial_auc": math.nan, "control": kind}
    return [mark, *(empty | {"auc": value, "control_id": number} for number, value in enumerate(controls))]


def frame(aucs, controls=CONTROLS, seeds_with_controls=99):
    """One chosen head a seed; the first seeds have controls."""
    lines = [
        line
        for seed, auc in enumerate(aucs)
        for line in lines_of("maps", seed, auc, controls if seed < seeds_with_controls else ())
    ]
    return pd.DataFrame(lines, columns=list(HEAD_COLUMNS)).astype(HEAD_COLUMNS)


@pytest.mark.parametrize(
    ("aucs", "verdict", "p", "hypothesis"),
    [
        ([0.97, 0.98, 0.99], "shown", 2 / 41, "supported"),
        ([0.895, 0.9, 0.9], "shown in part", 2 / 41, "supported in part"),
        ([0.97, 0.98, 0.805], "not shown", 1.0, "not supported"),
        ([0.72, 0.66, 0.7], "not shown", 1.0, "not supported"),
        ([0.4, 0.45, 0.48], "opposite", 2 / 41, "contradicted"),
        ([0.97, 0.98], "too few seeds", math.nan, "not testable with so few seeds"),
        ([], "not trained", math.nan, "not tested yet"),
    ],
)
def test_the_verdict(aucs, verdict, p, hypothesis):
    [found] = head_findings({"maps": GATES}, frame(aucs))
    assert (found.verdict, found.verdict_text, hypothesis_verdict([found])) == (verdict, verdict, hypothesis)
    if verdict != "not shown":
        assert found.p == pytest.approx(p, nan_ok=True)
    assert found.claim == "Gates open at data"
    if len(aucs) > 2:
        assert f"{np.mean(aucs):.2f} ± {np.std(aucs, ddof=1):.2f}" in found.ours


@given(st.lists(st.lists(st.sampled_from([0.5, 0.6, 0.7, 0.8]), min_size=6, max_size=6), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_p_is_the_share_of_marks_and_controls_that_rank_as_high_or_as_low(seeds):
    """By loops: each seed has a mark, which comes first, and five controls."""
    lines = [line for seed, aucs in enumerate(seeds) for line in lines_of("maps", seed, aucs[0], aucs[1:])]
    [found] = controls_of_figure(pd.DataFrame(lines))
    sums = [
        sum(sum((other < aucs[place]) + 0.5 * (other == aucs[place]) for other in aucs) for aucs in seeds)
        for place in range(6)
    ]
    at_least, at_most = (sum(test(value, sums[0]) for value in sums) for test in (operator.ge, operator.le))
    assert found.p == pytest.approx(min(1, 2 * min(at_least, at_most) / 6))
    assert (found.number, found.is_above) == (5, at_least < at_most)
    assert found.percentile_by_seed[0] == pytest.approx(percentile(seeds[0][0], seeds[0][1:]))


def test_seeds_without_controls_are_shown_and_not_judged():
    heads = frame([0.97, 0.98, 0.99, 0.2, 0.2], seeds_with_controls=3)
    [found] = head_findings({"maps": GATES}, heads)
    assert (found.verdict, found.reason) == ("shown", "")
    assert "3 of 5 seeds" in found.ours
    heads = frame([0.97, 0.98, 0.99, 0.98], seeds_with_controls=2)
    assert [each.verdict for each in head_findings({"maps": GATES}, heads)] == ["not testable"]
    without = frame([0.97, 0.98, 0.99], seeds_with_controls=0)
    [found] = head_findings({"maps": GATES}, without)
    assert (found.verdict, found.reason != "", found.meaning) == ("not testable", True, found.reason)
    assert math.isnan(found.p)
    assert hypothesis_verdict([found]) == f"not testable: {found.reason}"
    assert found.reason in claims_layout([found]).note
    table = heads_layout({"maps": GATES}, frame([0.97, 0.98, 0.99, 0.2], FEWER, seeds_with_controls=3))
    texts = [[cell.text for cell in row] for row in table.rows]
    assert texts[1][2:] == ["0.50 ± 0.12"] * 3 + ["–", "0.50"]
    assert texts[2][2:] == ["100", "100", "100", "–", "100"]
    assert len(heads_layout({"maps": GATES}, without).rows) == 3, "the chosen head, untrained, and the only head"


def test_too_few_controls_are_no_test():
    assert [each.verdict for each in head_findings({"maps": GATES}, frame([0.97] * 5, CONTROLS[:38]))] == [
        "not testable"
    ]


def test_attention_by_position_needs_both_kinds_of_controls():
    def finding(types, shifts):
        lines = [
            line
            for seed in range(3)
            for kind, controls in ((TYPES, types), (SHIFTED, shifts))
            for line in lines_of("maps", seed, 0.95, controls, kind)
        ]
        heads = pd.DataFrame(lines)
        heads = heads[~heads.duplicated(["seed", "control", "control_id"])]  # the mark has one line
        return head_findings({"maps": ATTENTION}, heads)[0]

    assert finding(CONTROLS, CONTROLS).verdict == "shown"
    assert finding(CONTROLS, [value + 0.3 for value in CONTROLS]).verdict == "not shown"
    assert finding([value + 0.3 for value in CONTROLS], CONTROLS).verdict == "not shown"
    assert finding(CONTROLS, ()).verdict == "not testable"


def test_controls_are_the_same_procedure_for_other_tokens(predictor, monkeypatch):
    """A type is a control if it is frequent in both halves and never marked. Its head is chosen on the first half."""
    monkeypatch.setattr(marks, "LEAST_MARKED", 3)
    monkeypatch.setattr(marks, "SHIFTS", 5)
    first_half, second_half = (np.random.default_rng(seed).integers(0, V, (4, 12)).tolist() for seed in (1, 2))
    blank = Maps(show="gates", mark="blank", claim="x")
    attention = Maps(show="position_attention", mark="blank", claim="x")
    first, second = (
        HalfProbe.of(predictor, {"gates", "position_attention"}, half) for half in (first_half, second_half)
    )
    blanks = {
        token
        for row in (*first_half, *second_half)
        for token, is_marked in zip(row, predictor.run.task.marks(np.array(row))["blank"], strict=True)
        if is_marked
    }
    counts = [Counter(itertools.chain.from_iterable(half)) for half in (first_half, second_half)]
    expected = {token for token in range(V) if min(count[token] for count in counts) >= 3} - blanks
    assert blanks
    assert expected
    for figure in (blank, attention):
        controls = controls_of(predictor, figure, first, second)
        of_types = {control.number: control for control in controls if control.kind == TYPES}
        assert set(of_types) == expected
        assert [control.number for control in controls if control.kind == SHIFTED] == (
            [] if figure is blank else list(range(5))
        )
        monkeypatch.setattr(marks, "token_marks", lambda predictor, tokens_T: {"blank": tokens_T == min(expected)})
        as_marks = [measure_heads(predictor, {"": figure}, half)[""] for half in (first_half, second_half)]
        monkeypatch.undo()
        monkeypatch.setattr(marks, "LEAST_MARKED", 3)
        monkeypatch.setattr(marks, "SHIFTS", 5)
        control = of_types[min(expected)]
        assert control.head == best_head(as_marks[0])
        assert control.auc == pytest.approx(as_marks[1][control.head].auc)


def test_shifted_marks_keep_their_number_and_spacing():
    marked = [np.arange(9) % 4 == 0, np.arange(5) == 2]
    [shifted] = marks._shifted([marked], 3)
    again = marks._shifted([marked], 3)[0]
    for before, after, same in zip(marked, shifted, again, strict=True):
        assert (after == same).all()
        assert any((np.roll(before, by) == after).all() for by in range(1, len(before)))


def test_a_claim_needs_a_mark_and_a_measure():
    for options in ({"show": "gates"}, {"show": "attention", "mark": "data"}, {"show": "positions", "mark": "data"}):
        with raises("unmeasured_claim", key="claim"):
            Maps(claim="x", **options)
