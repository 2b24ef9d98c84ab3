"""A plugin whose encoding raises an error that cannot be unpickled."""

from typing import Any, Literal

from cope_sweep.positions import ENCODINGS, Encoding


class OddError(Exception):
    """Takes two arguments, and hands on one: unpickling it fails."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@ENCODINGS.register
class RaisesOddly(Encoding):
    """Fails in its first forward pass."""

    kind: Literal["raises_oddly"] = "raises_oddly"

    def score(self, parameters: Any, attention: Any) -> Any:
        raise OddError("this", "that")
