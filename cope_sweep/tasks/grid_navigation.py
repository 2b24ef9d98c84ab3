"""Grid navigation (MapFormer, 2511.19279, B.3): observe again what a cell of a torus showed before.

A walk alternates actions and observations: a step, then what the cell it leads to shows. A cell is blank with
probability `p_empty`, else it shows one of `objects` objects. What cells show is drawn anew for each sequence, and does
not change in it. The walk draws a direction and a number of steps, 1 … `max_run`, uniformly, again and again. In two
dimensions, with objects a, b, … and the blank B:

    inputs    > c > B ^ h v B <
    targets   c > B ^ h v B < c
    revisit   . . . . . . B . c

All tokens are targets. An answer is what is observed at a cell that was observed before, unless it is blank: the
published accuracies cannot count blanks, since "always blank" has 0.8 in the sparse test set, where RoPE has 0.39.
`revisit_error` counts the blank ones too. A model that does not recognise a cell finds a blank more probable than each
of the objects, and so is always wrong at the answers; `object_error` compares the objects only, and has a chance of one
in 16. The paper does not say which of the two it reports.

Most answers need no map: after turning round, the observation m steps later is the one m steps before the turn, as long
as the walk goes back along the straight line that it came (the mirror rule). `map_error` counts the answers whose cell
this rule does not find, and compares the objects only, too. Not all of them need a map: a rule that retraces any
stretch of the walk, around corners too, finds a tenth of them in two dimensions.

With `signed: false` the second action of each axis stays where it is. Then a cell is a number of steps modulo the
width, and no step has to be taken back. Choose a width that the walk goes round: with the default ones most answers are
at the cell before, so that the last observation is right at 92 % of them in one dimension, and at all in two. With
`width: 8` it is right at 54 % in one.

The paper does not say whether the cells of all sequences are the same; only with new ones has the context to be read.
The sparse test set has 256 steps in its table 2 and 512 in its appendix: `sparse_steps`.

Shapes: N sequences, S steps, T tokens, L tokens of a sequence with its answers.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from cope_sweep.frozen import Positive
from cope_sweep.tasks.base import Batch, GeneratedTask, by_token
from cope_sweep.tasks.flip_flop import Probability

ARROWS = "><^v"
"""Labels of the actions in the first two dimensions; further ones are +3, −3, …"""

Steps = Annotated[int, Field(ge=2, le=10**9)]
Width = Annotated[int, Field(ge=2, le=4096)]


class GridNavigation(GeneratedTask):
    """Say what a cell of a grid shows, from the walk that led there before."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "dense", "sparse")
    LENGTHS: ClassVar[tuple[str, ...]] = ("steps", "dense_steps", "sparse_steps")

    kind: Literal["grid_navigation"] = "grid_navigation"
    dimensions: Annotated[int, Field(ge=1, le=5)] = Field(default=1, description="Number of dimensions of the torus.")
    steps: Steps = Field(default=128, description="Number of steps in training and in_dist; each has two tokens.")
    dense_steps: Steps = Field(default=64, description="Number of steps in the OOD test set `dense`.")
    sparse_steps: Steps = Field(default=256, description="Number of steps in the OOD test set `sparse`.")
    width: Width = Field(default=64, description="Number of cells of the torus in each dimension.")
    dense_width: Width = Field(default=32, description="Width in the OOD test set `dense`.")
    sparse_width: Width = Field(default=128, description="Width in the OOD test set `sparse`.")
    p_empty: Probability = Field(default=0.5, description="Probability of a blank cell, in training and in_dist.")
    dense_p_empty: Probability = Field(default=0.2, description="Probability of a blank cell in `dense`.")
    sparse_p_empty: Probability = Field(default=0.8, description="Probability of a blank cell in `sparse`.")
    max_run: Positive | None = Field(
        default=None,
        description="Largest number of steps in a direction that is drawn; null: 10 in one dimension, else 3.",
    )
    objects: Annotated[int, Field(ge=1, le=1000)] = Field(default=16, description="Number of objects.")
    signed: bool = Field(
        default=True, description="false: the second action of each axis stays, so that all steps have the same sign."
    )

    @property
    def vocabulary_size(self) -> int:
        return self.objects + 1 + 2 * self.dimensions

    def partial_errors(self, split: str) -> tuple[str, ...]:
        return ("revisit_error", "map_error", "object_error")

    def choices(self, metric: str) -> tuple[int, ...]:
        return tuple(range(self.objects)) if metric in ("object_error", "map_error") else ()

    def length(self, split: str) -> int:
        return 2 * self._steps(split) - 1

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "action": tokens_NT > self.objects,
            "object": tokens_NT < self.objects,
            "blank": tokens_NT == self.objects,
        }

    def token_label(self, token: int) -> str:
        if token < self.objects:
            return chr(ord("a") + token) if self.objects <= 21 else f"o{token}"
        if token == self.objects:
            return "B"
        action = token - self.objects - 1
        return ARROWS[action] if action < len(ARROWS) else f"{'+-'[action % 2]}{action // 2 + 1}"

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        shape = count, self._steps(split)
        lengths_NS = rng.integers(1, self._max_run, shape, endpoint=True).cumsum(axis=1)
        # A run may end with each step, so there are no more runs than steps. Marking their ends counts them.
        is_end_NS = np.zeros((count, shape[1] + 1), dtype=bool)
        np.put_along_axis(is_end_NS, np.minimum(lengths_NS, shape[1]), values=True, axis=1)
        run_NS = is_end_NS[:, :-1].cumsum(axis=1)
        actions_NS = np.take_along_axis(rng.integers(0, 2 * self.dimensions, shape), run_NS, axis=1)
        # The first visit of a cell decides what it shows, so no map has to be drawn.
        first_NS = _first_places(self._cells(actions_NS, split))
        shown_NS = np.where(
            rng.random(shape) < self._of("p_empty", split), self.objects, rng.integers(0, self.objects, shape)
        )
        seen_NS = np.take_along_axis(shown_NS, first_NS, axis=1)
        tokens_NL = np.stack((actions_NS + self.objects + 1, seen_NS), axis=2).reshape(count, -1)
        return self._batch(tokens_NL, first_NS)

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        # Of sequences of another test set only the width may differ, and so, rarely, which targets are answers.
        return self._batch(tokens_NL, _first_places(self._cells(self._actions(tokens_NL), "in_dist")))

    def counted(self, batch: Batch, split: str) -> dict[str, np.ndarray]:
        actions_NS = self._actions(batch.inputs_NT)
        first_NS = _first_places(self._cells(actions_NS, split))
        revisit_NT, found_NT = np.zeros((2, *batch.inputs_NT.shape), dtype=bool)
        revisit_NT[:, ::2] = first_NS < np.arange(first_NS.shape[1])
        found_NT[:, ::2] = self._mirrored(actions_NS) >= 0
        answers_NT = batch.answers_NT
        return {"revisit_error": revisit_NT, "map_error": answers_NT & ~found_NT, "object_error": answers_NT}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        actions_NS = self._actions(inputs_NT)
        # What is observed after the last action is not among the inputs, and no rule may look at it.
        seen_NS = np.pad(inputs_NT[:, 1::2], ((0, 0), (0, 1)), constant_values=self.objects)
        seen_NS = seen_NS[:, : actions_NS.shape[1]]
        mirrored_NS = self._mirrored(actions_NS)
        mirror_NS = np.where(
            mirrored_NS < 0, self.objects, np.take_along_axis(seen_NS, np.maximum(mirrored_NS, 0), axis=1)
        )
        counts_NSK = (seen_NS[:, :-1, None] == np.arange(self.objects)).cumsum(axis=1, dtype=np.int32)
        rules = {
            "blank": np.full_like(actions_NS, self.objects),
            "the last observation": np.roll(seen_NS, 1, axis=1),
            "the mirror rule, or blank": mirror_NS,
            "the most frequent object so far": np.pad(counts_NSK.argmax(axis=2), ((0, 0), (1, 0))),
        }
        return {name: np.repeat(answers_NS, 2, axis=1)[:, : inputs_NT.shape[1]] for name, answers_NS in rules.items()}

    @property
    def _max_run(self) -> int:
        return self.max_run or (10 if self.dimensions == 1 else 3)

    def _steps(self, split: str) -> int:
        return int(self._of("steps", split))

    def _of(self, field: str, split: str) -> float:
        value: float = getattr(self, f"{split}_{field}" if split in ("dense", "sparse") else field)
        return value

    def _actions(self, tokens_NT: np.ndarray) -> np.ndarray:
        """The action of each step, (N, S), from 0; −1 where a sequence has another token in its place."""
        actions_NS: np.ndarray = np.maximum(tokens_NT[:, ::2] - (self.objects + 1), -1)
        return actions_NS

    def _cells(self, actions_NS: np.ndarray, split: str) -> np.ndarray:
        """A number for the cell to which each step leads, (N, S)."""
        width = int(self._of("width", split))
        cells_NS = np.zeros_like(actions_NS)
        for dimension in range(self.dimensions):
            steps_NS = (actions_NS == 2 * dimension).astype(np.int64)
            if self.signed:
                steps_NS -= actions_NS == 2 * dimension + 1
            cells_NS = cells_NS * width + steps_NS.cumsum(axis=1) % width
        return cells_NS

    def _mirrored(self, actions_NS: np.ndarray) -> np.ndarray:
        """The earlier step that the mirror rule says led to the same cell, (N, S); −1 where it says nothing."""
        if not self.signed:
            return np.full_like(actions_NS, -1)
        place_S = np.arange(actions_NS.shape[1])
        before_NS = np.roll(actions_NS, 1, axis=1)
        changes_NS = (actions_NS != before_NS) | (place_S == 0)
        # The first step of the straight line that a step is on, and of the line before it.
        line_NS = np.maximum.accumulate(np.where(changes_NS, place_S, 0), axis=1)
        earlier_NS = np.take_along_axis(np.roll(line_NS, 1, axis=1), line_NS, axis=1)
        turns_round_NS = np.take_along_axis(actions_NS == before_NS ^ 1, line_NS, axis=1) & (line_NS > 0)
        mirrored_NS = 2 * line_NS - 2 - place_S
        # The line before began at the cell to which the step before it led.
        return np.where(turns_round_NS & (mirrored_NS >= np.maximum(earlier_NS - 1, 0)), mirrored_NS, -1)

    def _batch(self, tokens_NL: np.ndarray, first_NS: np.ndarray) -> Batch:
        inputs_NT, targets_NT = tokens_NL[:, :-1], tokens_NL[:, 1:]
        answers_NT = np.zeros(targets_NT.shape, dtype=bool)
        revisit_NS = first_NS < np.arange(first_NS.shape[1])
        answers_NT[:, ::2] = revisit_NS[:, : answers_NT[:, ::2].shape[1]]
        return Batch(inputs_NT, targets_NT, answers_NT & (targets_NT < self.objects))


def _first_places(cells_NS: np.ndarray) -> np.ndarray:
    """The first place of each cell in its sequence, (N, S)."""
    order_NS, first_NS = by_token(cells_NS)
    places_NS = np.empty_like(order_NS)
    np.put_along_axis(places_NS, order_NS, np.take_along_axis(order_NS, first_NS, axis=1), axis=1)
    return places_NS
