"""The `cope-sweep` command line: `main` runs it, `application.app` holds its commands.

Installed packages add commands, and their modules import `cli.options`. So this module must not import the application.
"""

import json
import os
import sys

from cope_sweep.errors import UserError
from cope_sweep.redaction import redacted_command

HIDDEN_ARGUMENTS = "COPE_SWEEP_HIDDEN_ARGUMENTS"
"""The variable in which a command passes its arguments to itself, if they have secrets."""


def main() -> None:
    """Run the `cope-sweep` command and exit with its code."""
    arguments = _without_visible_secrets(sys.argv[1:])
    try:
        from cope_sweep.cli.application import app
    except UserError as error:  # of a plugin: the help of `figure` names all kinds, so that its import loads plugins
        sys.stderr.write(f"error: {error}\n")
        if "--json" in arguments:
            document = {"error": {"code": error.code, "message": str(error), "data": error.data}}
            sys.stdout.write(json.dumps(document) + "\n")
        sys.exit(error.exit_code)

    app(arguments)


def _without_visible_secrets(arguments: list[str]) -> list[str]:
    """The arguments. If a URL among them has a secret, start this command again with a command line that shows none.

    A command line can be read by every user of the machine (`ps`), and Ray puts it into its list of jobs and its logs.
    """
    if (hidden := os.environ.pop(HIDDEN_ARGUMENTS, None)) is not None:
        return [str(argument) for argument in json.loads(hidden)]
    shown = redacted_command(arguments)
    # What stands before the arguments says how Python was started: a script, or `-m cope_sweep.cli`.
    before = len(sys.orig_argv) - len(arguments)
    is_own_command_line = sys.orig_argv[before:] == arguments  # else a program has called `main`, and must go on
    if shown != arguments and is_own_command_line:
        os.environ[HIDDEN_ARGUMENTS] = json.dumps(arguments)
        start = sys.orig_argv[1:before]
        os.execv(sys.executable, [sys.executable, *start, *shown])  # noqa: S606 - the same program
    return arguments
