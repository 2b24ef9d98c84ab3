"""Tasks: one file each, with a literal sample, its spec and its generator. `TASKS` registers them."""

from typing import Annotated

from cope_sweep.registry import Registry
from cope_sweep.tasks.base import IGNORED, VALIDATION, Batch, GeneratedTask, Task
from cope_sweep.tasks.code import Code
from cope_sweep.tasks.counting import Counting
from cope_sweep.tasks.dyck import Dyck
from cope_sweep.tasks.flip_flop import FlipFlop
from cope_sweep.tasks.forgetting_mqar import ForgettingMQAR
from cope_sweep.tasks.grid_navigation import GridNavigation
from cope_sweep.tasks.indirect_indexing import IndirectIndexing
from cope_sweep.tasks.last_sentence import LastSentence
from cope_sweep.tasks.mqar import MQAR, MQRAR
from cope_sweep.tasks.selective_copy import SelectiveCopy
from cope_sweep.tasks.text import Text
from cope_sweep.tasks.wikitext import WikiText
from cope_sweep.tasks.word_problem import WordProblem

# mypy refuses an abstract class where a type is asked for. A registry makes no instance of it.
TASKS = Registry(
    "task",
    Task,  # type: ignore[type-abstract]
    (
        FlipFlop,
        SelectiveCopy,
        Counting,
        LastSentence,
        MQAR,
        MQRAR,
        ForgettingMQAR,
        IndirectIndexing,
        GridNavigation,
        WordProblem,
        Dyck,
        WikiText,
        Code,
        Text,
    ),
    entry_points="cope_sweep.tasks",
)

AnyTask = Annotated[Task, TASKS]
"""Any registered task, as a spec, its `kind`, or a mapping (`{kind: flip_flop, pairs: 16}`)."""

__all__ = [
    "IGNORED",
    "MQAR",
    "MQRAR",
    "TASKS",
    "VALIDATION",
    "AnyTask",
    "Batch",
    "Code",
    "Counting",
    "Dyck",
    "FlipFlop",
    "ForgettingMQAR",
    "GeneratedTask",
    "GridNavigation",
    "IndirectIndexing",
    "LastSentence",
    "SelectiveCopy",
    "Task",
    "Text",
    "WikiText",
    "WordProblem",
]
