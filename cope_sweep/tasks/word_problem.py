"""Word problems of groups (Merrill et al. 2024, "The illusion of state"; PaTH; DeltaProduct; Selective RoPE).

The inputs are elements of a finite group, drawn uniformly with replacement; the target at each place is the product of
all elements so far. An element's id is its place in a list: for permutation groups, all permutations (S) or the even
ones (A) in lexicographic order, and the left factor of a product is applied first. With `group: A5`:

    inputs    # 49 41 15 12 19 42
    targets   # 49 32  8 23 45 53

`#` starts a sequence; it is a target, but no answer. The inputs do not contain the products.

The first product is the first element, and needs no model: that makes averages over short sequences look good. So the
last place is reported apart, `last_error`, and ranges of places: `position_error@8` counts places 5 to 8.

The problems of A5 and S5 are NC¹-complete. S3, S4 and A4 are solvable groups; S2, which is parity, A3 and Z are
commutative. Z60 and Z120, the numbers modulo 60 and 120 with addition, have as many elements as A5 and S5: a model that
solves one and not the other fails at factors that do not commute.

Merrill et al. draw sequences without repetition. Here sequences may repeat, and test sequences may occur in training.
With 20 elements of A5 that does not happen. With 8 elements of S3 there are only 6⁸ sequences, so 128,000 training
sequences cover 7 % of them.

Shapes: N sequences, T tokens, L tokens of a sequence with its answers, E elements of the group.
"""

from functools import lru_cache
from itertools import permutations
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from cope_sweep.frozen import Positive
from cope_sweep.tasks.base import Batch, GeneratedTask, ranges

Group = Literal["S2", "S3", "S4", "S5", "A3", "A4", "A5", "Z60", "Z120"]


class WordProblem(GeneratedTask):
    """Multiply the elements of a group, one after the other."""

    TESTS: ClassVar[tuple[str, ...]] = ("in_dist", "longer")
    LENGTHS: ClassVar[tuple[str, ...]] = ("elements", "longer_elements")

    TRAINED: ClassVar[str] = "the product of all elements so far, at each element"
    LOOKS_AHEAD: ClassVar[bool] = True

    kind: Literal["word_problem"] = "word_problem"
    group: Group = Field(
        default="A5",
        description="S: all permutations of 2 to 5 things; A: the even ones; Z: addition modulo this number.",
    )
    elements: Positive = Field(default=20, description="Number of elements in training and in_dist.")
    longer_elements: Positive = Field(default=80, description="Number of elements in the OOD test set `longer`.")

    @property
    def vocabulary_size(self) -> int:
        return self._order + 1

    def partial_errors(self, split: str) -> tuple[str, ...]:
        return ("last_error", *(f"position_error@{end}" for end in self._ends(split)))

    def length(self, split: str) -> int:
        return 1 + (self.longer_elements if split == "longer" else self.elements)

    def marks(self, tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
        start_NT = tokens_NT == self._order
        return {"start": start_NT, "element": ~start_NT}

    def token_label(self, token: int) -> str:
        return "#" if token == self._order else str(token)

    def generate(self, split: str, rng: np.random.Generator, count: int) -> Batch:
        # If all elements are uniform, so are all products: an element is what takes one product to the next.
        products_NT = rng.integers(0, self._order, (count, self.length(split) - 1))
        return self.with_targets(np.pad(products_NT, ((0, 0), (2, 0)), constant_values=self._order))

    def with_targets(self, tokens_NL: np.ndarray) -> Batch:
        """Inputs and targets of `# #` and the products: the inputs are the quotients of one product and the next."""
        inputs_NT = _quotients(self.group)[tokens_NL[:, :-1], tokens_NL[:, 1:]]
        targets_NT = tokens_NL[:, 1:]
        return Batch(inputs_NT, targets_NT, targets_NT < self._order)

    def counted(self, batch: Batch, split: str) -> dict[str, np.ndarray]:
        places_T = np.arange(batch.inputs_NT.shape[1])
        counted = {"last_error": places_T == places_T[-1]} | ranges("position_error", places_T, self._ends(split))
        return {name: batch.answers_NT & counted_T for name, counted_T in counted.items()}

    def shortcuts(self, inputs_NT: np.ndarray) -> dict[str, np.ndarray]:
        order, products_EE = self._order, _products(self.group)
        before_NT = np.pad(inputs_NT[:, :-1], ((0, 0), (1, 0)), constant_values=order)
        rules = {"the last element": inputs_NT, "the product of the last two": products_EE[before_NT, inputs_NT]}
        if self.group in ("S3", "S4", "S5"):
            odd_NT = (_is_odd(self.group)[inputs_NT].cumsum(axis=1) % 2).astype(bool)
            even, odd = 0, int(_is_odd(self.group).argmax())
            of_sign_NT = np.where(odd_NT, odd, even)
            rules["the first place, then one with the right sign"] = np.where(
                np.arange(inputs_NT.shape[1]) == 1, inputs_NT, of_sign_NT
            )
        return rules

    @property
    def _order(self) -> int:
        return len(_products(self.group)) - 1

    def _ends(self, split: str) -> tuple[int, ...]:
        """The last places of the ranges 1, 2, 3 – 4, 5 – 8, … of a split."""
        last = self.length(split) - 1
        return (*(2**power for power in range((last - 1).bit_length())), last)


@lru_cache(maxsize=16)
def _elements(group: Group) -> tuple[tuple[int, ...], ...]:
    """The permutations of a group in order; of a cyclic one, those that move each thing by the same distance."""
    kind, degree = group[0], int(group[1:])
    if kind == "Z":
        return tuple(tuple((thing + shift) % degree for thing in range(degree)) for shift in range(degree))
    return tuple(each for each in permutations(range(degree)) if kind == "S" or not _inversions(each) % 2)


def _inversions(permutation: tuple[int, ...]) -> int:
    return sum(permutation[i] > permutation[j] for j in range(len(permutation)) for i in range(j))


@lru_cache(maxsize=16)
def _is_odd(group: Group) -> np.ndarray:
    """The sign of each element; `#` is even."""
    return np.array([_inversions(each) % 2 for each in _elements(group)] + [0], dtype=bool)


@lru_cache(maxsize=16)
def _products(group: Group) -> np.ndarray:
    """The products of all pairs of ids, (E + 1, E + 1); `#` is left out of a product."""
    elements_ED = np.array(_elements(group))
    order = len(elements_ED)
    # `right[left]` applies the left factor first. Permutations are found again by their digits.
    weights_D = float(elements_ED.shape[1]) ** np.arange(elements_ED.shape[1])[::-1]
    if group[0] == "Z":
        products_EE = np.add.outer(np.arange(order), np.arange(order)) % order
    else:
        values_E = elements_ED @ weights_D
        products_EE = np.searchsorted(values_E, elements_ED[:, elements_ED].transpose(1, 0, 2) @ weights_D)
    products = np.pad(products_EE.astype(np.int64), ((0, 1), (0, 1)))
    products[order, :], products[:, order] = np.arange(order + 1), np.arange(order + 1)
    return products


@lru_cache(maxsize=16)
def _quotients(group: Group) -> np.ndarray:
    """What the first of two ids has to be multiplied by to give the second, (E + 1, E + 1)."""
    products = _products(group)
    order = len(products) - 1
    quotients = np.full_like(products, order)
    quotients[np.arange(order + 1)[:, None], products[:, :order]] = np.arange(order)
    return quotients
