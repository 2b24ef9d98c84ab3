"""The contract of tasks: every built-in task at small sizes, and the variants of their specs."""

import pytest

from cope_sweep.tasks import (
    MQAR,
    MQRAR,
    Counting,
    Dyck,
    FlipFlop,
    ForgettingMQAR,
    GridNavigation,
    IndirectIndexing,
    LastSentence,
    SelectiveCopy,
    WordProblem,
)
from cope_sweep.testing import TaskContract
from cope_sweep.testing.test_tasks import TestRegisteredTasks  # noqa: F401 - pytest runs it here
from tests.helpers.texts import prose

pytestmark = pytest.mark.usefixtures("cache")


def words_of_a_text(folder):
    (folder / "text.txt").write_text(prose(1500).replace("@-@", "."), encoding="utf-8")
    return LastSentence(corpus="prose", folder=str(folder), maximum=1, fewest_words=1, most_words=12, vocabulary=200)


class TestVariants(TaskContract):
    specs = [
        FlipFlop(pairs=5, loss="all"),
        SelectiveCopy(tokens=2, blanks=3, dense_blanks=1, sparse_blanks=5, copy_from="outputs"),
        SelectiveCopy(tokens=4, blanks=3, dense_blanks=2, sparse_blanks=6, copy_from="outputs", separator=False),
        WordProblem(group="Z60", elements=6, longer_elements=11),
        Dyck(kinds=3, brackets=8, longer_brackets=10, depth=1, deeper_depth=3),
        IndirectIndexing(min_letters=14, max_letters=14, longer_letters=14, max_shift=10, farther_shift=13),
        ForgettingMQAR(vocabulary=30, tokens=30, pairs=3, updates=1, more_updates=3, rounds=2, random_non_queries=True),
        Counting(operations=12, variables=3, max_tokens=25, pass_weight=4, train_sequences=None),
        MQAR(vocabulary=9, tokens=20, pairs=3, more_pairs=2, power_a=1, random_non_queries=True),
        MQRAR(vocabulary=60, tokens=20, variables=2, more_variables=3, n_back=3),
        GridNavigation(
            steps=24, dense_steps=20, sparse_steps=90, width=7, dense_width=5, sparse_width=9, sparse_p_empty=0.5
        ),
        GridNavigation(
            dimensions=3,
            steps=40,
            sparse_steps=60,
            width=2,
            dense_width=2,
            sparse_width=3,
            p_empty=0.1,
            sparse_p_empty=0.1,
            signed=False,
        ),
        LastSentence(queries=3, maximum=1, most_words=5, vocabulary=20),
        words_of_a_text,
    ]
