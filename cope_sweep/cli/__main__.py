"""`python -m cope_sweep.cli`: the `cope-sweep` command, where its script is not on the path."""

from cope_sweep.cli import main

main()
