"""The base class of errors that a user can correct."""


class UserError(Exception):
    """An error in the user's input, files or environment.

    The message says what is wrong, where it is, and how to correct it. A command prints it as one line and exits with
    `exit_code`; the REST service maps it to a status and a JSON body.
    """

    exit_code = 2


class NotFoundError(UserError):
    """There is no such ablation, run or sweep."""


class NotFinishedError(UserError):
    """The run exists and is not finished, or the kept results are not those of the ablation file of today."""
