"""`python -m cope_sweep.cli`: the `cope-sweep` command, for environments whose scripts are not on the path."""

from cope_sweep.cli import main

main()
