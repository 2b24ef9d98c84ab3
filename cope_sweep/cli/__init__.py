"""The `cope-sweep` command line: `main` runs it, `application.app` holds its commands.

Installed packages add commands, and their modules import `cli.options`. So this module must not import the application.
"""

import gc

NEW_OBJECTS = 50_000
"""So many new objects lead to a garbage collection. Python's 700 do so hundreds of times while modules are imported,
and while an answer about many runs is made: both are kept, so that nothing is found."""


def main() -> None:
    """Run the `cope-sweep` command and exit with its code."""
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
    from cope_sweep.cli.application import app

    app()
