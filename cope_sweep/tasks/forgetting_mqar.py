"""Associative recall of keys whose values are written again (zoology, `forgetting_mqar.py`, January 2026).

As in [MQAR](mqar.py), the first `pairs` slots assign values to different keys. Then `updates` of these keys, in random
order, are assigned new values, `rounds` times in turn, and every key is asked once for its last value. The slots that
ask are drawn as in MQAR. All values of a sequence are different; in the released code, by a slip, a new value is
sometimes the key's old one. With `pairs: 4, updates: 2, tokens: 24, vocabulary: 40`, as its keys and values are there:

    inputs    4 24 16 22 7 38 11 32 16 28 7 25  4 _ 16 _  7 _ _ _ 11 _ _ _
    targets   . .  .  .  . .  .  .  .  .  . .  24 . 28 . 25 . . . 32 . . .

A key that is not updated has only one value: `updated_error` counts the others. The paper that the code belongs to has
no numbers of this task, so the default sizes are those of its function, but for the fillers, which are `_` here.

Shapes: N sequences, S slots, P pairs, U slots that update, T tokens, L tokens of a sequence with its answers.
"""

from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from cope_sweep.errors import InvalidValue
from cope_sweep.frozen import Positive
from cope_sweep.tasks.base import Batch
from cope_sweep.tasks.mqar import FILLER, AssociativeRecall, asking_slots, occurrences


class ForgettingMQAR(AssociativeRecall):
    """Recall the last values of keys, of which some were assigned again."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "more_updates", "more_rounds")

    kind: Literal["forgetting_mqar"] = "forgetting_mqar"
    pairs: Positive = Field(default=8, description="Number of keys.")
    updates: Positive = Field(default=4, description="Number of keys that are updated, in training and in_dist.")
    more_updates: Positive = Field(
        default=8, description="Number of keys that are updated in the OOD test set `more_updates`."
    )
    rounds: Positive = Field(
        default=1, description="How often each of these keys is updated, in training, in_dist and `more_updates`."
    )
    more_rounds: Positive = Field(default=3, description="The same in the OOD test set `more_rounds`.")
    power_a: Annotated[float, Field(allow_inf_nan=False)] = Field(
        default=0.01, description="The r-th slot after the updates asks with a weight of r^(power_a − 1); 1: uniform."
    )
    random_non_queries: bool = Field(
        default=False,
        description="Content of the slots that neither assign nor ask. false: the filler; true: random ids, but no key "
        "of the sequence; the default of the released function.",
    )

    def partial_errors(self, split: str) -> tuple[str, ...]:
        return ("updated_error",)

    def _sizes(self, split: str) -> tuple[int, int]:
        """The number of keys that are updated in a split, and how often each is."""
        updates = self.more_updates if split == "more_updates" else self.updates
        return updates, self.more_rounds if split == "more_rounds" else self.rounds

    def _checked(self) -> "ForgettingMQAR":
        self._check_keys("pairs", self.pairs)
        for field in ("updates", "more_updates"):
            if getattr(self, field) > self.pairs:
                raise InvalidValue(
                    f"{field} = {getattr(self, field)} is more than pairs = {self.pairs}",
                    key=field,
                    value=getattr(self, field),
                    largest=self.pairs,
                )
        values = self.vocabulary - self._first_value
        for split in ("in_dist", *self.TESTS):
            updates, rounds = self._sizes(split)
            written = self.pairs + updates * rounds
            for key, needed, limit in (
                ("vocabulary", written, values),
                ("tokens", 2 * (written + self.pairs), self.tokens),
            ):
                if needed > limit:
                    smallest = needed if key == "tokens" else 2 * needed - 1
                    raise InvalidValue(
                        f"{split} writes {written} different values and asks for {self.pairs}; "
                        f"{key} = {getattr(self, key)} must be {smallest} or more",
                        key=key,
                        value=getattr(self, key),
                        smallest=smallest,
                        split=split,
                    )
        return self

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        (updates, rounds), slots = self._sizes(split), self.tokens // 2
        written = self.pairs + updates * rounds
        keys_NP, values_NU = self._keys(rng, count, self.pairs), self._values(rng, count, written)
        updated_NU = rng.random((count, self.pairs)).argsort(axis=1)[:, :updates]
        # Each round has an order of its own.
        orders_NRU = rng.random((count, rounds, updates)).argsort(axis=2)
        which_NU = np.take_along_axis(updated_NU[:, None], orders_NRU, axis=2).reshape(count, -1)
        last_NP = values_NU[:, : self.pairs].copy()
        for slot in range(which_NU.shape[1]):
            last_NP[np.arange(count), which_NU[:, slot]] = values_NU[:, self.pairs + slot]

        keys_NS, values_NS = np.full((2, count, slots), FILLER, dtype=np.int64)
        if self.random_non_queries:
            keys_NS, values_NS = rng.integers(0, self.vocabulary, (2, count, slots))
            keys_NS[(keys_NS[:, :, None] == keys_NP[:, None]).any(axis=2)] = FILLER
        keys_NS[:, : self.pairs] = keys_NP
        keys_NS[:, self.pairs : written] = np.take_along_axis(keys_NP, which_NU, axis=1)
        values_NS[:, :written] = values_NU
        values_NS[self._asks(keys_NS, values_NS)] = FILLER  # random ids that would be taken for a query
        asking_NP = asking_slots(rng, count, written, slots, self.pairs, self.power_a)
        np.put_along_axis(keys_NS, asking_NP, keys_NP, axis=1)
        np.put_along_axis(values_NS, asking_NP, last_NP, axis=1)
        return self._batch(keys_NS, values_NS)

    def counted(self, batch: Batch, split: str) -> dict[str, np.ndarray]:
        updated_NT = np.zeros(batch.inputs_NT.shape, dtype=bool)
        # A key that was updated has been seen twice before its query.
        updated_NT[:, ::2] = occurrences(batch.inputs_NT[:, ::2]) >= 2
        return {"updated_error": batch.answers_NT & updated_NT}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        keys_NS, values_NS = inputs_NT[:, ::2], inputs_NT[:, 1::2]
        seen_NS = occurrences(keys_NS)
        rng = np.random.default_rng(0)
        first_NS, any_NS = np.zeros((2, *keys_NS.shape), dtype=np.int64)
        rows, slots = ((seen_NS > 0) & (keys_NS != FILLER)).nonzero()
        same_AS = (keys_NS[rows] == keys_NS[rows, slots][:, None]) & (np.arange(keys_NS.shape[1]) < slots[:, None])
        rank_A = (rng.random(len(rows)) * seen_NS[rows, slots]).astype(np.int64) + 1
        first_NS[rows, slots] = values_NS[rows, same_AS.argmax(axis=1)]
        any_NS[rows, slots] = values_NS[rows, (same_AS.cumsum(axis=1) >= rank_A[:, None]).argmax(axis=1)]
        rules = {"the first value of the key": first_NS, "any value of the key": any_NS}
        return super().shortcuts(inputs_NT) | {name: np.repeat(of_NS, 2, axis=1) for name, of_NS in rules.items()}
