"""Codes and data of errors, across processes too."""

import copy
import json
import pickle

import pytest

from cope_sweep.errors import CheckpointError, InvalidValue, NotFiniteError, NotFoundError, TokensError, UserError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("no"), "user_error"),
        (NotFoundError("no", name="tiny"), "not_found"),
        (NotFiniteError("no"), "not_finite"),
        (CheckpointError("no", code="another_run", file="a/b", expected=None), "another_run"),
        (TokensError("no", position=3, allowed=[0, 1]), "invalid_tokens"),
    ],
)
def test_an_error_keeps_code_data_and_message_in_copies_and_other_processes(error, code):
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(same) is type(error)
        assert (str(same), same.code, same.data) == ("no", code, error.data)
    assert json.loads(json.dumps(error.data)) == error.data


def test_the_code_of_one_error_is_not_that_of_its_class():
    assert UserError("no", code="other").code == "other"
    assert UserError("no").code == "user_error"


def test_an_invalid_value_is_a_value_error():
    with pytest.raises(ValueError, match="^no$"):
        raise InvalidValue("no", key="task.tokens")
