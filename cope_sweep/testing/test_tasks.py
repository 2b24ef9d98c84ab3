"""The contract of tasks, for every registered task: built-in ones at small sizes, others with their default fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cope_sweep.tasks import (
    MQAR,
    MQRAR,
    TASKS,
    Code,
    Counting,
    Dyck,
    FlipFlop,
    ForgettingMQAR,
    GridNavigation,
    IndirectIndexing,
    LastSentence,
    SelectiveCopy,
    Task,
    Text,
    WikiText,
    WordProblem,
)
from cope_sweep.testing.options import registered
from cope_sweep.testing.task_contract import TaskContract


def _wikitext(folder: Path) -> Task:
    for split in ("train", "valid", "test"):
        lines = [f" {split} sentence {number} is about {number * number} things . \n" for number in range(100)]
        (folder / f"wiki.{split}.tokens").write_text("".join(lines), encoding="utf-8")
    return WikiText(corpus="small", folder=str(folder), tokens=16, vocabulary=300)


def _code(folder: Path) -> Task:
    for number in range(60):
        source = f"def function_{number}(x):\n    return x + {number}\n" * 4
        (folder / f"module_{number}.py").write_text(source, encoding="utf-8")
    return Code(corpus="small", folder=str(folder), tokens=16, vocabulary=300, validation_share=0.2, test_share=0.2)


def _text(folder: Path) -> Task:
    lines = [json.dumps({"text": f"A sentence about {number * number} things.\n" * 3}) for number in range(200)]
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return Text(path=str(folder / "text.jsonl"), tokens=16, vocabulary=300, validation_share=0.2, test_share=0.2)


SMALL: dict[str, Task | Callable[[Path], Task]] = {
    "flip_flop": FlipFlop(pairs=6),
    "selective_copy": SelectiveCopy(tokens=3, blanks=4, dense_blanks=1, sparse_blanks=9),
    "counting": Counting(operations=12, max_tokens=25, pass_weight=4, train_sequences=50),
    "last_sentence": LastSentence(most_words=7, vocabulary=40),
    "mqar": MQAR(vocabulary=20, tokens=24, pairs=2, more_pairs=5),
    "mqrar": MQRAR(vocabulary=60, tokens=20, variables=2, more_variables=4),
    "grid_navigation": GridNavigation(
        dimensions=2,
        steps=40,
        dense_steps=30,
        sparse_steps=60,
        width=4,
        dense_width=3,
        sparse_width=5,
        sparse_p_empty=0.5,
    ),
    "word_problem": WordProblem(group="S3", elements=5, longer_elements=9),
    "dyck": Dyck(brackets=12, longer_brackets=18, depth=2, deeper_depth=4),
    "indirect_indexing": IndirectIndexing(
        min_letters=8, max_letters=10, longer_letters=12, max_shift=3, farther_shift=5
    ),
    "forgetting_mqar": ForgettingMQAR(vocabulary=40, tokens=32, pairs=4, updates=2, more_updates=3, more_rounds=2),
    "wikitext": _wikitext,
    "code": _code,
    "text": _text,
}


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary folder for tokenised text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COPE_SWEEP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class TestRegisteredTasks(TaskContract):
    """Each task; subclass the contract to test other fields."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "task" in metafunc.fixturenames:
            parameters = registered(metafunc.config, TASKS, "TaskContract", SMALL)
            metafunc.parametrize("task", parameters, indirect=True)
