"""A plugin whose code raises what is no Exception: an encoding, and a task in its generator, tokenizer and validation."""

import asyncio
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from cope_sweep.positions import ENCODINGS, Encoding
from cope_sweep.tasks import TASKS, Batch


class Own(BaseException):
    """An exception that is no Exception."""


RAISED = {
    "system_exit": SystemExit(0),
    "keyboard_interrupt": KeyboardInterrupt(),
    "generator_exit": GeneratorExit(),
    "cancelled": asyncio.CancelledError(),
    "own": Own("gone"),
}


@ENCODINGS.register
class Leaves(Encoding):
    """Raises in its first forward pass."""

    kind: Literal["leaves"] = "leaves"
    raised: str = "system_exit"

    def score(self, parameters: Any, attention: Any) -> Any:
        raise RAISED[self.raised]


@TASKS.register
class LeavesTask(TASKS["selective_copy"]):  # type: ignore[misc]
    """Raises SystemExit in one place."""

    kind: Literal["leaves_task"] = "leaves_task"
    place: Literal["generator", "tokenizer", "validation"] = "generator"

    @model_validator(mode="after")
    def _leave(self) -> Self:
        if self.place == "validation":
            raise SystemExit(0)
        return self

    def sequences(self, split: str, seed: int, start: int, count: int) -> Batch:
        if self.place == "generator" and start:  # in the thread that makes batches
            raise SystemExit(0)
        return super().sequences(split, seed, start, count)

    def save_tokenizer(self, folder: Path) -> None:
        if self.place == "tokenizer":
            raise SystemExit(0)
        super().save_tokenizer(folder)
