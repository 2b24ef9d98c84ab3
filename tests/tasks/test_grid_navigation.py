"""Grid navigation: every target by a walk in plain Python, the distribution of walks and cells, and simple rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.tasks import GridNavigation
from tests.helpers.errors import raises
from tests.tasks.chi_square import ALPHA, shares_p, uniform_p


def tokens_of(task, text):
    labels = [task.token_label(token) for token in range(task.vocabulary_size)]
    return [labels.index(word) for word in text.split()]


def test_the_row_of_the_docstring():
    task = GridNavigation(dimensions=2, steps=5)
    whole = tokens_of(task, "> c > B ^ h v B < c")
    batch = task.with_targets(np.array([whole]))
    assert batch.inputs_NT.tolist() == [whole[:-1]]
    assert batch.targets_NT.tolist() == [whole[1:]]
    assert np.flatnonzero(batch.answers_NT[0]).tolist() == [8]  # c; the blank before is no answer
    counted = task.counted(batch, "in_dist")
    assert np.flatnonzero(counted["revisit_error"][0]).tolist() == [6, 8]
    # `v` turns round after `^`, and finds the cell before it. `<` leaves that line: only a map tells what is there.
    assert np.flatnonzero(counted["map_error"][0]).tolist() == [8]


def test_rules_by_hand():
    task = GridNavigation(dimensions=2, steps=5)
    batch = task.with_targets(np.array([tokens_of(task, "> c > B ^ h v B < c")]))
    rules = {
        name: [task.token_label(token) for token in answers[0, ::2]]
        for name, answers in task.shortcuts(batch.inputs_NT).items()
    }
    assert rules["blank"] == ["B"] * 5
    assert rules["the last observation"][1:] == ["c", "B", "h", "B"]
    assert rules["the mirror rule, or blank"] == ["B"] * 5
    assert rules["the most frequent object so far"] == ["a", "c", "c", "c", "c"]
    there_and_back = tokens_of(task, "> a > b > c < b < a")
    rule = task.shortcuts(np.array([there_and_back[:-1]]))["the mirror rule, or blank"]
    assert [task.token_label(token) for token in rule[0, ::2]] == ["B", "B", "B", "b", "a"]


def walk(task, split, actions):
    """The cell after each action, and the place that the mirror rule names for it, or None."""
    width = {"dense": task.dense_width, "sparse": task.sparse_width}.get(split, task.width)
    position, cells, mirrored = [0] * task.dimensions, [], []
    lines = []  # straight lines: [direction, their first step]
    for step, action in enumerate(actions):
        axis, back = divmod(action, 2)
        position[axis] = (position[axis] + ((-1 if task.signed else 0) if back else 1)) % width
        cells.append(tuple(position))
        if not lines or lines[-1][0] != action:
            lines.append([action, step])
        mirrored.append(None)
        if task.signed and len(lines) > 1 and lines[-1][0] // 2 == lines[-2][0] // 2:
            turn = lines[-1][1]
            place = turn - 1 - (step - turn + 1)
            if place >= max(0, lines[-2][1] - 1):
                mirrored[-1] = place
    return cells, mirrored


@given(
    dimensions=st.integers(1, 3),
    steps=st.integers(2, 40),
    width=st.integers(2, 12),
    p_empty=st.floats(0, 1),
    max_run=st.one_of(st.none(), st.integers(1, 5)),
    objects=st.integers(1, 30),
    signed=st.booleans(),
    split=st.sampled_from(["train", "in_dist", "dense", "sparse"]),
)
@settings(max_examples=80, deadline=None)
def test_every_answer_is_that_of_a_walk(dimensions, steps, width, p_empty, max_run, objects, signed, split):
    task = GridNavigation(
        dimensions=dimensions,
        steps=steps,
        dense_steps=steps + 1,
        sparse_steps=steps + 2,
        width=width,
        dense_width=width + 1,
        sparse_width=width + 2,
        p_empty=p_empty,
        max_run=max_run,
        objects=objects,
        signed=signed,
    )
    batch = task.sequences(split, 1, 0, 10)
    counted = task.counted(batch, split)
    rules = task.shortcuts(batch.inputs_NT)
    assert batch.inputs_NT.shape[1] == 2 * (steps + {"dense": 1, "sparse": 2}.get(split, 0)) - 1
    for row in range(10):
        inputs, targets = batch.inputs_NT[row].tolist(), batch.targets_NT[row].tolist()
        assert targets[:-1] == inputs[1:]
        actions, seen = [token - objects - 1 for token in inputs[::2]], targets[::2]
        assert all(0 <= action < 2 * dimensions for action in actions)
        assert all(0 <= token <= objects for token in seen)
        cells, mirrored = walk(task, split, actions)
        shown = {}
        for step, (cell, token) in enumerate(zip(cells, seen, strict=True)):
            is_revisit = cell in shown
            assert shown.setdefault(cell, token) == token
            is_answer = is_revisit and token != objects
            assert batch.answers_NT[row, 2 * step] == is_answer
            assert counted["revisit_error"][row, 2 * step] == is_revisit
            place = mirrored[step]
            assert counted["map_error"][row, 2 * step] == (is_answer and place is None)
            if place is not None:
                assert cells[place] == cell
            mirror = rules["the mirror rule, or blank"][row, 2 * step]
            assert mirror == (objects if place is None else seen[place])
            if step:
                assert rules["the last observation"][row, 2 * step] == seen[step - 1]
            counts = [seen[:step].count(each) for each in range(objects)]
            assert rules["the most frequent object so far"][row, 2 * step] == counts.index(max(counts))
        for mask in (batch.answers_NT, *counted.values()):
            assert not mask[row, 1::2].any()


@pytest.mark.parametrize(("dimensions", "longest"), [(1, 10), (2, 3)])
def test_runs_have_the_declared_lengths_and_directions(dimensions, longest):
    """χ² of the first action, and of the length of the first straight line.

    The next run has another direction with probability 1 − 1/2n, so the line is longer than one run in the other cases.
    """
    task = GridNavigation(dimensions=dimensions)
    actions = task.sequences("train", 0, 0, 8000).inputs_NT[:, ::2] - 17
    assert uniform_p(np.bincount(actions[:, 0], minlength=2 * dimensions)) > ALPHA
    line = (actions != actions[:, :1]).argmax(axis=1)
    share = np.zeros(121)
    run = np.r_[0, np.full(longest, 1 / longest)]
    runs = run
    for number in range(12):
        share[: len(runs)] += runs[:121] * (1 - 1 / (2 * dimensions)) / (2 * dimensions) ** number
        runs = np.convolve(runs, run)
    cut = 2 * longest
    found = np.bincount(np.minimum(line, cut), minlength=cut + 1)[1:]
    assert shares_p(found, np.r_[share[1:cut], 1 - share[:cut].sum()]) > ALPHA


@pytest.mark.parametrize(("split", "p"), [("train", 0.5), ("in_dist", 0.5), ("dense", 0.2), ("sparse", 0.8)])
def test_cells_are_blank_with_the_declared_probability(split, p):
    seen = GridNavigation().sequences(split, 0, 0, 4000).targets_NT[:, 0]
    counts = np.bincount(seen, minlength=17)
    assert shares_p([counts[16], counts[:16].sum()], [p, 1 - p]) > ALPHA
    assert uniform_p(counts[:16]) > ALPHA


@pytest.mark.parametrize(
    ("dimensions", "split", "revisits", "blank", "last", "mirror", "mirror_or_blank", "frequent"),
    [
        (1, "in_dist", 0.67, 0.51, 0.27, 0.82, 0.91, 0.19),
        (1, "dense", 0.59, 0.20, 0.08, 0.84, 0.87, 0.18),
        (1, "sparse", 0.75, 0.79, 0.63, 0.76, 0.95, 0.26),
        (2, "in_dist", 0.35, 0.50, 0.27, 0.64, 0.82, 0.17),
        (2, "dense", 0.32, 0.21, 0.08, 0.72, 0.78, 0.18),
        (2, "sparse", 0.38, 0.80, 0.64, 0.60, 0.92, 0.19),
    ],
)
def test_rules_score_as_an_independent_simulation_says(
    dimensions, split, revisits, blank, last, mirror, mirror_or_blank, frequent
):
    """Simulated apart, from 150 to 400 sequences: ± 0.02."""
    task = GridNavigation(dimensions=dimensions)
    batch = task.sequences(split, 0, 0, 800)
    counted = task.counted(batch, split)
    assert counted["revisit_error"][:, ::2].mean() == pytest.approx(revisits, abs=0.03)
    right = {
        metric: {rule: 1 - error / 100 for rule, error in task.shortcut_errors(split, 800, metric).items()}
        for metric in ("token_error", "revisit_error", "map_error")
    }
    of_all, of_objects = right["revisit_error"], right["token_error"]
    assert of_all["blank"] == pytest.approx(blank, abs=0.03)
    assert of_all["the last observation"] == pytest.approx(last, abs=0.03)
    assert of_all["the mirror rule, or blank"] == pytest.approx(mirror_or_blank, abs=0.03)
    assert of_objects["blank"] == 0
    assert of_objects["the mirror rule, or blank"] == pytest.approx(mirror, abs=0.03)
    assert of_objects["the most frequent object so far"] == pytest.approx(frequent, abs=0.03)
    assert right["map_error"]["the mirror rule, or blank"] == 0


def test_a_mirror_explains_most_of_two_dimensions_with_long_runs():
    task = GridNavigation(dimensions=2, max_run=10)
    batch = task.sequences("in_dist", 0, 0, 800)
    outside = task.counted(batch, "in_dist")["map_error"].sum() / batch.answers_NT.sum()
    assert 1 - outside == pytest.approx(0.88, abs=0.03)


def is_retraced(actions, step):
    """The last steps undo those before them, one by one and around corners too, and end at a cell that was observed."""
    return any(
        all(actions[step - k] == actions[step - 2 * steps + 1 + k] ^ 1 for k in range(steps))
        for steps in range(1, step // 2 + 1)
    )


def test_a_tenth_of_the_answers_outside_the_mirror_are_found_by_going_back_around_corners():
    task = GridNavigation(dimensions=2)
    batch = task.sequences("in_dist", 0, 0, 400)
    rows, places = task.counted(batch, "in_dist")["map_error"].nonzero()
    actions = (batch.inputs_NT[:, ::2] - 17).tolist()
    retraced = [is_retraced(actions[row], place // 2) for row, place in zip(rows, places, strict=True)]
    assert np.mean(retraced) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(("fields", "right"), [({}, 0.92), ({"dimensions": 2}, 1), ({"width": 8}, 0.54)])
def test_without_signs_the_cell_before_is_the_answer_unless_the_walk_goes_round(fields, right):
    task = GridNavigation(signed=False, **fields)
    errors = task.shortcut_errors("in_dist", 800)
    assert 1 - errors["the last observation"] / 100 == pytest.approx(right, abs=0.01)


def test_sizes_of_the_paper():
    task = GridNavigation(dimensions=2)
    assert [task.length(split) for split in ("train", "in_dist", "dense", "sparse")] == [255, 255, 127, 511]
    assert GridNavigation(sparse_steps=512).length("sparse") == 1023
    assert task.vocabulary_size == 16 + 1 + 4
    assert task.longer(2).length("in_dist") == 511


def test_labels():
    assert [GridNavigation(objects=2, dimensions=3).token_label(token) for token in range(9)] == [
        "a", "b", "B", ">", "<", "^", "v", "+3", "-3",
    ]  # fmt: skip


@pytest.mark.parametrize("fields", [{"dimensions": 0}, {"steps": 1}, {"width": 1}])
def test_impossible_sizes_are_errors(fields):
    with raises("greater_than_equal", key=next(iter(fields))):
        GridNavigation(**fields)


def test_without_answers_in_the_first_test_set_no_answer_is_the_most_frequent_one():
    task = GridNavigation(p_empty=1.0, steps=8)
    assert task.shortcut_errors("in_dist", 20) == {}
    rules = task.shortcuts(task.sequences("dense", 0, 0, 2).inputs_NT)
    assert list(task.shortcut_errors("dense", 20)) == list(rules)
