"""What can be wrong with a text."""

from cope_sweep.errors import UserError


class TextError(UserError):
    """A text or its tokenizer cannot be used; the message names the file, why, and the way out."""
