"""The `cope-sweep` command line: `main` runs it, `application.app` holds its commands.

Installed packages add commands, and their modules import `cli.options`. So this module must not import the application.
"""

import gc

NEW_OBJECTS = 50_000
"""New objects that start a garbage collection. With Python's 700, hundreds of collections run while modules are
imported and while an answer about many runs is made. They free nothing: these objects stay in use."""


def main() -> None:
    """Run the `cope-sweep` command and exit with its code."""
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
    from cope_sweep.cli.application import app

    app()
