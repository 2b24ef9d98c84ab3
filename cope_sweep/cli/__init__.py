"""The `cope-sweep` command line: `main` runs it, `application.app` holds its commands.

Installed packages add commands, and their modules import `cli.options`. So this module must not import the application.
"""

import os


def main() -> None:
    """Run the `cope-sweep` command and exit with its code."""
    # numpy's OpenBLAS starts a thread for each core, which is half of the time that importing numpy takes. No command
    # multiplies matrices with numpy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from cope_sweep.cli.application import app

    app()
