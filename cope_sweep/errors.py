"""Errors that a user can correct. Those of modules that take long to import are here, so that all can name them."""


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


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message names the file and the reason."""


class NotFiniteError(CheckpointError):
    """The model's outputs are NaN or infinite: its training diverged, or the weights are damaged."""


class TokensError(UserError, ValueError):
    """Token ids that a model cannot score. The message names them and the ids that the model accepts."""


class ProbeError(TokensError):
    """A probe request that cannot be answered. The message has the reason and the possible values."""


class ClusterError(UserError):
    """The cluster cannot be used. The message names the address or the node, the reason, and what to do."""
