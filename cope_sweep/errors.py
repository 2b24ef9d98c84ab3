"""Errors that a user can put right."""


class UserError(Exception):
    """Something outside the program is wrong: the message says what, where, and the way out. Commands exit with 2."""
