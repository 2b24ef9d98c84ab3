"""Tasks: one file each, with a literal sample, its spec, and its generator. Register a new one below."""

from typing import Annotated

from pydantic import Field

from cope_sweep.tasks.base import IGNORED, Batch, Task
from cope_sweep.tasks.code import Code
from cope_sweep.tasks.counting import Counting
from cope_sweep.tasks.flip_flop import FlipFlop
from cope_sweep.tasks.last_sentence import LastSentence
from cope_sweep.tasks.selective_copy import SelectiveCopy
from cope_sweep.tasks.wikitext import WikiText

TASKS: dict[str, type[Task]] = {
    cls.model_fields["kind"].default: cls for cls in (FlipFlop, SelectiveCopy, Counting, LastSentence, WikiText, Code)
}

AnyTask = Annotated[FlipFlop | SelectiveCopy | Counting | LastSentence | WikiText | Code, Field(discriminator="kind")]
"""Any registered task, by its `kind`."""

__all__ = [
    "IGNORED",
    "TASKS",
    "AnyTask",
    "Batch",
    "Code",
    "Counting",
    "FlipFlop",
    "LastSentence",
    "SelectiveCopy",
    "Task",
    "WikiText",
]
