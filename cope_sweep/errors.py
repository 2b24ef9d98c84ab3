"""Errors that a user can correct. Those of modules that take long to import are here, so that all can name them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from cope_sweep.redaction import redacted, redacted_value

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
"""A value that JSON can express."""


class UserError(Exception):
    """An error in the user's input, files or environment.

    The message is for people: what is wrong, where it is, and how to correct it. `code` and `data` are for programs,
    and stay the same when a message is written anew: `code` is the kind of error in snake_case, and `data` has the
    values that the message names. A command prints the message as one line and exits with `exit_code`, and the REST
    service maps the error to a status; with `--json` and over REST, programs get all three. Neither the message
    nor the data have secrets: libraries put URLs into their errors, and both are redacted here.

    A subclass has a code for its errors. An error has a more specific one if programs need it.
    """

    default_code = "user_error"
    exit_code = 2

    def __init__(self, message: str, /, *, code: str | None = None, **data: JsonValue) -> None:
        super().__init__(redacted(message))
        self.code = code or self.default_code
        self.data: dict[str, JsonValue] = redacted_value(data)

    def shown_data(self, shown: Callable[[str], str]) -> dict[str, JsonValue]:
        """The data with every text as `shown` gives it, for example without the paths of this machine."""

        def with_texts_shown(value: JsonValue) -> JsonValue:
            if isinstance(value, str):
                return shown(value)
            if isinstance(value, Mapping):
                return {key: with_texts_shown(inner) for key, inner in value.items()}
            return [with_texts_shown(inner) for inner in value] if isinstance(value, Sequence) else value

        return {key: with_texts_shown(value) for key, value in self.data.items()}


class NotFoundError(UserError):
    """No ablation, run or sweep has this name."""

    default_code = "not_found"


class NotFinishedError(UserError):
    """The run exists and is not finished, or the committed results do not belong to today's ablation file."""

    default_code = "not_finished"


class InvalidValue(UserError, ValueError):
    """A value that a model, a task or an encoding cannot have; in pydantic's validators, an error like any ValueError.

    `data["key"]` is the key, as in `t5.max_distance`.
    """

    default_code = "invalid_value"


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message names the file and the reason."""

    default_code = "damaged_checkpoint"


class NotFiniteError(CheckpointError):
    """The model's outputs are NaN or infinite: its training diverged, or the weights are damaged."""

    default_code = "not_finite"


class TokensError(UserError, ValueError):
    """Token ids that a model cannot score. The message names them and the ids that the model accepts."""

    default_code = "invalid_tokens"


class ProbeError(TokensError):
    """A probe request that cannot be answered. The message has the reason and the possible values."""

    default_code = "invalid_request"


class FigureError(UserError):
    """A figure cannot be made. The message names what exists."""

    default_code = "invalid_figure"


class ClusterError(UserError):
    """The cluster cannot be used. The message names the address or the node, the reason, and what to do."""

    default_code = "no_cluster"


def counted(number: float, unit: str) -> str:
    """A number with its unit, for messages: `1 CPU`, `0.25 GPUs`."""
    return f"{number:g} {unit}{'s' * (number != 1)}"
