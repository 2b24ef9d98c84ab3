"""The `cope-sweep` command line: `main` runs it, `application.app` holds its commands.

Installed packages add commands, and their modules import `cli.options`. So this module must not import the application.
"""


def main() -> None:
    """Run the `cope-sweep` command and exit with its code."""
    from cope_sweep.cli.application import app

    app()
