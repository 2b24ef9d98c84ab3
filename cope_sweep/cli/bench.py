"""`bench …`: measurements that anyone can repeat."""

from __future__ import annotations

import json

from cope_sweep.cli.options import Json, make_console, print_json


def sweep(as_json: Json = False) -> None:
    """From command to first step, from run to run, and 100 short runs against a plain loop."""
    from cope_sweep.bench.sweep import measure

    measured = measure()
    print_json(measured) if as_json else make_console().print_json(json.dumps(measured))
