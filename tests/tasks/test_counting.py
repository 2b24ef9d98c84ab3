"""Counting: answers by an interpreter, the released generator's distribution, cut sequences, finite training sets."""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import IGNORED, Counting, counting
from tests.tasks.chi_square import ALPHA, same_distribution_p

SPLITS = ["train", "in_dist", "longer", "shorter"]

specs = st.builds(
    Counting,
    variables=st.integers(1, 6),
    operations=st.integers(3, 25),
    fewest_operations=st.integers(1, 3),
    maximum=st.integers(0, 4),
    set_weight=st.floats(0.01, 10),
    increment_weight=st.floats(0, 10),
    pass_weight=st.floats(0, 20),
    longer_pass_weight=st.floats(0, 20),
    shorter_pass_weight=st.floats(0, 20),
    max_tokens=st.just(200),
    train_sequences=st.sampled_from([None, 7, 40]),
)


def text(task, inputs):
    return [task.labels[token] for token in inputs]


def operations(words):
    """The operations of a sequence, as (type, variable), and the rest, which must be the query and padding."""
    found, at = [], 0
    while words[at] != "print":
        if words[at] == "pass;":
            found.append(("pass", None))
            at += 1
        elif words[at + 1] == "++;":
            found.append(("increment", words[at]))
            at += 2
        else:
            assert words[at + 1 : at + 4] == ["=", "0", ";"]
            found.append(("set", words[at]))
            at += 4
    return found, words[at:]


def run(task, found):
    """The final values of the variables, by a plain interpreter."""
    values = {}
    for kind, variable in found:
        if kind == "set":
            values[variable] = 0
        elif kind == "increment":
            values[variable] += 1  # a KeyError if it was never set
            assert values[variable] <= task.maximum
    return values


@given(task=specs, split=st.sampled_from(SPLITS), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_answer_is_that_of_an_interpreter(task, split, seed):
    batch = task.sequences(split, seed, 0, 20)
    assert not batch.units_N["cut"].any()
    for inputs, targets, answers in zip(batch.inputs_NT, batch.targets_NT, batch.answers_NT, strict=True):
        found, rest = operations(text(task, inputs))
        assert task.fewest_operations <= len(found) <= task.operations
        assert rest[0] == "print"
        assert set(rest[2:]) <= {"_"}
        asked = len(inputs) - len(rest) + 1
        assert targets[asked] == run(task, found)[rest[1]]
        assert answers.nonzero()[0].tolist() == (targets != IGNORED).nonzero()[0].tolist() == [asked]


def test_the_docstring_s_sample():
    task = Counting(variables=2, operations=7, max_tokens=20)
    inputs, targets = (re.search(rf"    {row} +(.*)", counting.__doc__)[1].split() for row in ("inputs", "targets"))
    assert len(inputs) == len(targets) == task.length("train")
    assert set(inputs) <= set(task.labels)
    found, rest = operations(inputs)
    assert len(found) == task.operations
    answer = run(task, found)[rest[1]]
    assert targets == ["." if at != inputs.index("print") + 1 else str(answer) for at in range(len(targets))]


@given(keep=st.integers(3, 70), split=st.sampled_from(SPLITS), variables=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_longer_sequence_keeps_its_tail(keep, split, variables):
    sizes = {"variables": variables, "operations": 15, "pass_weight": 2.0, "train_sequences": None}
    whole = Counting(**sizes, max_tokens=100).sequences(split, 0, 0, 40)
    task = Counting(**sizes, max_tokens=keep)
    batch = task.sequences(split, 0, 0, 40)
    for row in range(40):
        asked = int(whole.answers_NT[row].argmax())
        tail = whole.inputs_NT[row, : asked + 1].tolist()[-(keep - 1) :]
        assert batch.inputs_NT[row, : len(tail)].tolist() == tail
        assert set(text(task, batch.inputs_NT[row, len(tail) :])) <= {"_"}
        assert batch.targets_NT[row, len(tail) - 1] == whole.targets_NT[row, asked]
        assert batch.units_N["cut"][row] == (asked + 2 > keep)  # the answer is one of the tokens


def as_released(task, pass_weight, rng):
    """A sequence as the paper's generator draws it, with rejection: operations, queried variable, final values."""
    names = task.labels[-task.variables :]
    weights = {"set": task.set_weight, "increment": task.increment_weight, "pass": pass_weight}
    while True:
        values, found = {}, []
        steps = rng.randint(task.fewest_operations, task.operations)
        while len(found) < steps:
            kind = rng.choices(list(weights), list(weights.values()))[0]
            variable = None
            if kind == "set":
                variable = rng.choice(names)
                values[variable] = 0
            elif kind == "increment":
                if not values:
                    continue
                variable = rng.choice(list(values))
                if values[variable] == task.maximum:
                    continue
                values[variable] += 1
            found.append((kind, variable))
        if values:
            return found, rng.choice(list(values)), values


OTHER_SEQUENCES = [("in_dist", 1), ("shorter", 3)]
"""Splits and numbers of variables that differ in weights and in what can be asked. `make test-all` tries all."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "variables"),
    [
        pytest.param(split, variables, marks=[] if (split, variables) in OTHER_SEQUENCES else pytest.mark.thorough)
        for split in SPLITS
        for variables in (1, 3)
    ],
)
def test_sequences_have_the_distribution_of_the_released_generator(split, variables):
    """χ² of 4,000 sequences of each: lengths, types, the first set, answers, variables queried and set."""
    task = Counting(
        variables=variables,
        operations=30,
        maximum=3,
        pass_weight=8,
        longer_pass_weight=30,
        shorter_pass_weight=1,
        max_tokens=200,
        train_sequences=None,
    )
    weight = {"longer": 30, "shorter": 1}.get(split, 8)
    batch = task.sequences(split, 1, 0, 4000)
    ours, theirs = [], []
    for inputs in batch.inputs_NT:
        found, rest = operations(text(task, inputs))
        ours.append((found, rest[1], run(task, found)))
    rng = random.Random(0)
    theirs = [as_released(task, weight, rng) for _ in range(4000)]

    def names(variable):
        return task.labels.index(variable) - task.labels.index("a")

    measures = {
        "operations": lambda f, a, v: len(f),
        "sets": lambda f, a, v: sum(kind == "set" for kind, _ in f),
        "increments": lambda f, a, v: sum(kind == "increment" for kind, _ in f),
        "before the first set": lambda f, a, v: [kind for kind, _ in f].index("set"),
        "answer": lambda f, a, v: v[a],
        "asked": lambda f, a, v: names(a),
        "variables set": lambda f, a, v: len(v),
        "sum of values": lambda f, a, v: sum(v.values()),
        "last kind": lambda f, a, v: ["set", "increment", "pass"].index(f[-1][0]),
    }
    for name, measure in measures.items():
        a, b = (np.array([measure(*sample) for sample in samples]) for samples in (ours, theirs))
        if np.ptp(np.concatenate((a, b))):
            assert same_distribution_p(a, b) > ALPHA, name


@pytest.mark.parametrize(("split", "share"), [("in_dist", 0.14), ("shorter", 0.34)])
def test_the_share_of_cut_sequences_at_the_size_of_the_paper(split, share):
    """The measured shares of the released generator, to two digits and 3 σ."""
    cut = Counting(variables=3).sequences(split, 0, 0, 4096).units_N["cut"]
    assert abs(cut.mean() - share) < 0.005 + 3 * (share * (1 - share) / len(cut)) ** 0.5


def test_sizes_of_the_paper():
    task = Counting(variables=5)
    assert task.context == 511  # 512 tokens, the last of them the answer
    assert task.vocabulary_size == len(task.labels) == 11 + 6 + 5
    assert Counting(operations=3).length("train") == 14  # three times `a = 0 ;`, `print a`


# -- finite training sets


def rows(batch):
    return [tuple(row) for row in np.concatenate((batch.inputs_NT, batch.targets_NT), axis=1).tolist()]


@pytest.mark.parametrize("size", [1, 100, 1500])
def test_an_epoch_visits_every_sequence_once_in_another_order(size):
    task = Counting(operations=20, max_tokens=60, train_sequences=size)
    stream = task.model_copy(update={"train_sequences": None})
    everything = rows(stream.sequences("train", 3, 0, size))
    epochs = [rows(task.sequences("train", 3, epoch * size, size)) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(everything)
    if size > 1:
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert rows(task.sequences("train", 4, 0, size)) != epochs[0]


@given(size=st.integers(1, 90), start=st.integers(0, 300), count=st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_any_range_is_a_slice_of_the_whole_across_epochs(size, start, count):
    task = Counting(operations=5, max_tokens=30, train_sequences=size)
    whole = rows(task.sequences("train", 3, 0, start + count))
    assert rows(task.sequences("train", 3, start, count)) == whole[start:]


def test_with_a_data_seed_the_run_s_seed_changes_the_order_alone():
    """As in the release: one training set for all seeds, shuffled by the seed."""
    task = Counting(operations=20, max_tokens=60, train_sequences=1500, data_seed=9)
    one, other = (rows(task.sequences("train", seed, 0, 1500)) for seed in (3, 4))
    assert one != other
    assert sorted(one) == sorted(other)


def test_test_sets_are_not_finite():
    a = Counting(operations=20, max_tokens=60, train_sequences=5)
    b = a.model_copy(update={"train_sequences": None})
    assert rows(a.sequences("in_dist", 0, 0, 50)) == rows(b.sequences("in_dist", 0, 0, 50))


def replayed(task, words, counts_all, resets_any, resets_own):
    """What a rule counts, by reading the operations of a sequence."""
    found, rest = operations(words)
    asked = rest[1]
    count = 0
    for kind, variable in found:
        if kind == "set" and (resets_any or (resets_own and variable == asked)):
            count = 0
        count += kind == "increment" and (counts_all or variable == asked)
    return min(count, task.maximum)


@settings(max_examples=30, deadline=None)
@given(specs.filter(lambda task: task.variables > 1), st.integers(0, 3))
def test_shortcuts_are_the_rules_that_they_are_named_after(task, seed):
    batch = task.sequences("in_dist", seed, 0, 8)
    rules = {
        "all increments": (True, False, False),
        "its increments, without resets": (False, False, False),
        "all increments since its reset": (True, False, True),
        "all increments since the last reset of any": (True, True, False),
    }
    answers = task.shortcuts(batch.inputs_NT)
    assert answers.keys() == rules.keys()
    for rule, how in rules.items():
        due = [replayed(task, text(task, inputs), *how) for inputs in batch.inputs_NT]
        assert answers[rule][batch.answers_NT].tolist() == due, rule


def test_shortcuts_of_one_variable_and_their_errors():
    task = Counting(operations=30, max_tokens=40, pass_weight=4, set_weight=2)
    assert list(task.shortcuts(task.sequences("in_dist", 0, 0, 4).inputs_NT)) == ["all increments"]
    label = task.labels.index
    words = ["pass;", *["a", "=", "0", ";"], *["a", "++;"] * 2, *["a", "=", "0", ";"], "a", "++;", "print", "a"]
    assert task.shortcuts(np.array([[label(word) for word in words]]))["all increments"][0, -1] == 3
    errors = task.shortcut_errors("shorter", 500)
    assert 0 < errors["all increments"] < 100


# -- one token for an operation, and several queries


def interpreted(task, words):
    """Position → value, of every query in a sequence of words without answers, by a plain interpreter."""
    values, printed, at = {}, {}, 0
    while at < len(words):
        if task.operation_tokens == "one":
            one = re.fullmatch(r"(?:print_)?(\w+?)(=0|\+\+)?", words[at])
            kind = {"=0": "set", "++": "increment"}.get(
                one[2] if one else None, "print" if "print_" in words[at] else None
            )
            name, size = one and one[1], 1
        else:
            following = words[at + 1] if at + 1 < len(words) else ""
            kind = {"=": "set", "++;": "increment"}.get(following, "print" if words[at] == "print" else None)
            name, size = (words[at + 1], 2) if kind == "print" else (words[at], {"set": 4, "increment": 2}.get(kind, 1))
        if kind == "set":
            values[name] = 0
        elif kind == "increment":
            values[name] += 1
        elif kind == "print":
            printed[at + size - 1] = values[name]
        at += size
    return printed


forms = st.builds(
    Counting,
    variables=st.integers(1, 4),
    operations=st.integers(3, 12),
    fewest_operations=st.integers(1, 3),
    maximum=st.integers(0, 4),
    pass_weight=st.floats(0, 5),
    max_tokens=st.just(200),
    operation_tokens=st.sampled_from(["parts", "one"]),
    prints=st.integers(1, 6),
)


@given(task=forms, split=st.sampled_from(SPLITS), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_query_has_the_answer_of_an_interpreter_and_the_inputs_hide_it(task, split, seed):
    batch = task.sequences(split, seed, 0, 20)
    assert not batch.units_N["cut"].any()
    for inputs, targets in zip(batch.inputs_NT, batch.targets_NT, strict=True):
        words = text(task, inputs)
        expected = interpreted(task, words)
        assert len(expected) == task.prints
        assert {at: targets[at] for at in (targets != IGNORED).nonzero()[0].tolist()} == expected
        assert all(words[at + 1] == "_" for at in expected if at + 1 < len(words))
        assert not {*words[max(expected) + 1 :]} - {"_"}  # the last query ends the sequence


@given(task=forms, most=st.integers(3, 30), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_query_that_is_cut_in_two_leaves_nothing_in_the_inputs(task, most, seed):
    """Nowhere in the inputs is a number but the 0 of `a = 0 ;`, and the rest is the tail of the uncut sequence."""
    cut = task.model_copy(update={"max_tokens": most})
    batch, whole = (each.sequences("shorter", seed, 0, 20) for each in (cut, task))
    numbers = {str(number) for number in range(task.maximum + 1)}
    for inputs, targets, uncut in zip(batch.inputs_NT, batch.targets_NT, whole.inputs_NT, strict=True):
        words, uncut_words = text(cut, inputs), text(task, uncut)
        ends = [at for at, word in enumerate(words) if word != "_"]
        for at, word in enumerate(words):
            assert word not in numbers or (word == "0" and words[at + 1] == ";")
        tail = uncut_words[: max(at for at, word in enumerate(uncut_words) if word != "_") + 1][-(max(ends) + 1) :]
        first = next(at for at in range(len(words)) if words[at] != "_")
        assert words[first : max(ends) + 1] == tail[first:]
        assert (targets != IGNORED)[max(ends)]


def test_a_hand_worked_cut_inside_a_query():
    """`print a 1` with room for its last two tokens, or for the last one: both become padding."""
    task = Counting(variables=1, operations=3, prints=2, max_tokens=6)
    kinds, variables, values = (
        np.array(each)[:, None]
        for each in ((counting.PRINT, counting.PASS, counting.PASS, counting.PRINT), [0] * 4, (1, 0, 0, 1))
    )
    for most, begin in ((8, "print a _"), (7, "_ _"), (6, "_"), (5, "")):
        rows = task.model_copy(update={"max_tokens": most})._tokens(kinds, variables, values)
        assert (
            text(task, task.with_targets(rows.tokens_NL.astype(int)).inputs_NT[0])
            == f"{begin} pass; pass; print a".split()
        )


def test_only_runs_whose_queries_may_be_cut_have_another_version():
    may_be_cut = {"operations": 10, "max_tokens": 45, "prints": 2}  # 10 · 4 + 2 · 3 tokens at most
    assert Counting(**may_be_cut).version() == 2
    assert Counting(**may_be_cut | {"max_tokens": 46}).version() == 1
    one = may_be_cut | {"operation_tokens": "one", "max_tokens": 14}  # 10 · 1 + 2 · 2 tokens at most
    assert Counting(**one).version() == 1
    assert Counting(**one | {"max_tokens": 13}).version() == 2
    assert Counting(**may_be_cut | {"prints": 1}).version() == 1


@given(task=forms)
@settings(max_examples=20, deadline=None)
def test_the_forms_have_the_same_operations_and_answers(task):
    one, parts = (task.model_copy(update={"operation_tokens": form}) for form in ("one", "parts"))
    batches = [each.sequences("in_dist", 0, 0, 30) for each in (one, parts)]
    answers = [batch.targets_NT[batch.answers_NT].tolist() for batch in batches]
    assert answers[0] == answers[1]
    for mark in ("set", "increment", "pass"):
        counts = [each.marks(b.inputs_NT)[mark].sum(1).tolist() for each, b in zip((one, parts), batches, strict=True)]
        assert counts[0] == counts[1]


def test_the_docstring_s_sample_of_the_options():
    task = Counting(variables=2, operations=5, prints=2, max_tokens=11, operation_tokens="one")
    sample = counting.__doc__.partition("max_tokens: 11")[2]
    inputs, targets = (re.search(rf"    {row} +(.*)", sample)[1].split() for row in ("inputs", "targets"))
    assert len(inputs) == len(targets) == task.length("train")
    assert set(inputs) <= set(task.labels)
    assert {at: int(each) for at, each in enumerate(targets) if each != "."} == interpreted(task, inputs)


def test_queries_among_the_operations_ask_each_variable_that_is_set_equally_often():
    task = Counting(variables=2, operations=8, fewest_operations=8, pass_weight=2, prints=5, operation_tokens="one")
    batch = task.sequences("in_dist", 0, 0, 4000)
    asked = {"a": 0, "b": 0}
    for inputs in batch.inputs_NT:
        known = set()
        for word in text(task, inputs):
            if word.endswith("=0"):
                known.add(word[0])
            elif word.startswith("print_") and len(known) == 2:
                asked[word[-1]] += 1
    assert sum(asked.values()) > 2500
    assert abs(asked["a"] / sum(asked.values()) - 0.5) < 0.03


def test_the_structure_of_the_paper_s_sequences():
    """By the released generator, 4,000 sequences: 5.1 sets, 13 % set once, a context of 36 tokens, a mean of 4.6."""
    found = Counting().structure("in_dist", 2000)
    due = {
        "sets of a variable in a sequence": (5.1, 0.2),
        "answers whose variable was set only once (%)": (13, 3),
        "tokens since the asked variable was set (median)": (36 + 4, 5),  # with `0 ; … print a`
        "answer (mean)": (4.6, 0.3),
    }
    for name, (value, margin) in due.items():
        assert abs(found[name] - value) < margin, (name, found[name])
