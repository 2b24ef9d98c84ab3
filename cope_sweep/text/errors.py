"""The error for unusable texts."""

from cope_sweep.errors import UserError


class TextError(UserError):
    """A text or its tokenizer cannot be used. The message names the file and the cause, and says what to do."""
