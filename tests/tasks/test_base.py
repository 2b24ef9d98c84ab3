"""All generated tasks: ranges, generators per split, repeated sequences, and the exact bytes."""

import hashlib

import numpy as np
import pytest

from cope_sweep.tasks import MQRAR, TASKS, Counting, FlipFlop, GeneratedTask, WikiText
from cope_sweep.tasks.base import BLOCK
from cope_sweep.tasks.counting import CHUNK
from cope_sweep.testing.test_tasks import SMALL
from tests.helpers.errors import raises

GENERATED = {kind: task for kind, task in SMALL.items() if isinstance(task, GeneratedTask)}
# Without `train_sequences` no sequence is repeated.
GENERATED["counting"] = Counting(operations=12, max_tokens=25, pass_weight=4, train_sequences=None)
each_task = pytest.mark.parametrize("task", GENERATED.values(), ids=GENERATED)


@each_task
def test_no_two_splits_share_a_generator(task, monkeypatch):
    """Splits of generated sequences are independent: no random generator is used for two splits, seeds or blocks.

    Two independent sequences can still be equal, and are if they are short enough.
    """
    keys = []
    original = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda key: keys.append(tuple(key)) or original(key))
    splits = ("train", *task.TESTS)
    count = 4 * CHUNK if isinstance(task, Counting) else 16 * BLOCK
    for split in splits:
        for seed in (101, 102):
            task.sequences(split, seed, 0, count)
    assert len(keys) == len(set(keys))
    assert len({(seed, key) for seed, key, _ in keys}) == 2 * len(splits)


@each_task
def test_a_token_has_at_most_one_mark(task):
    tokens = task.sequences("train", 0, 0, 20).inputs_NT
    marks = list(task.marks(tokens).values())
    assert marks
    assert np.sum(marks, axis=0).max() == 1


def test_generate_of_a_task_that_reads_a_text_is_an_error():
    with pytest.raises(NotImplementedError):
        WikiText().generate("train", np.random.default_rng(0), 1)


def test_generated_tasks_have_no_text(tmp_path):
    task = FlipFlop()
    assert not task.has_windows
    assert task.fingerprint() is None
    assert not task.reads_text
    task.save_tokenizer(tmp_path)
    assert not list(tmp_path.iterdir())
    with raises("no_text", task="flip_flop"):
        task.windows("in_dist", 16, 16)


DIGESTS = {
    "flip_flop": "ac7b75efebf6d765",
    "selective_copy": "5eeecfe73d8ad7e2",
    "counting": "6e2d89f5f1b107e4",
    "last_sentence": "52f5e37fd68f055a",
    "mqar": "a4b812cd74fc5620",
    "mqrar": "26764d4bbcfcc4a5",
    "grid_navigation": "25516e985e60b259",
    "word_problem": "9ed89f2779c58160",
    "dyck": "38bf5ee705d17743",
    "indirect_indexing": "81d6befb226199b6",
    "forgetting_mqar": "afb393ef61ee1584",
}


def test_the_bytes_of_every_generated_task_are_known():
    assert DIGESTS.keys() == {kind for kind, cls in TASKS.items() if issubclass(cls, GeneratedTask)}


@pytest.mark.parametrize(
    ("task", "digest"),
    [
        *((GENERATED[kind], digest) for kind, digest in DIGESTS.items()),
        (MQRAR(vocabulary=60, tokens=20, variables=2, more_variables=4, n_back=2), "4d35fcf6a79cdd2a"),
        (Counting(operations=12, max_tokens=25, variables=3, train_sequences=70), "3383d0cd0cf1c928"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_the_same_bytes_on_every_machine(task, digest):
    """If these change, so does every published number: then increase the VERSION of the task."""
    inputs = task.sequences("train", 0, 0, 100).inputs_NT.astype("<i8")
    assert hashlib.sha256(inputs.tobytes()).hexdigest()[:16] == digest
