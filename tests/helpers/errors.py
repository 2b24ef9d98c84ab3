"""What a program can rely on in an error: its code and its data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pydantic import ValidationError

from cope_sweep.errors import JsonValue, UserError


@contextmanager
def raises(code: str, /, **data: JsonValue) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """A block that raises a UserError with this code and at least these data, whose texts its message names.

    pydantic's ValidationError stands for its first error: the UserError of a validator, or the code and the data that
    pydantic gives it, with `key` for the place.
    """
    with pytest.raises((UserError, ValidationError)) as caught:
        yield caught
    found_code, found = code_and_data(caught.value)
    assert (found_code, {name: found.get(name) for name in data}) == (code, data), str(caught.value)
    unnamed = [value for value in data.values() if isinstance(value, str) and value not in str(caught.value)]
    assert not unnamed, f"not in the message {str(caught.value)!r}"


def code_and_data(error: Exception) -> tuple[str, dict[str, JsonValue]]:
    """The code and the data of an error; see `raises`."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        context = first.get("ctx", {})
        if not isinstance(context.get("error"), UserError):
            return first["type"], {"key": ".".join(map(str, first["loc"])), **context}
        error = context["error"]
    assert isinstance(error, UserError)
    return error.code, error.data
