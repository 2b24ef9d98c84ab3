"""Runs the fault test at length; see `chaos`."""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.chaos import disturb, results, undisturbed


def main() -> int:
    """Return 0 if every disturbed sweep left what the undisturbed one did, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Kill random processes of sweeps.")
    parser.add_argument("--seeds", type=int, default=5, help="number of disturbed sweeps")
    parser.add_argument("--kills", type=int, default=6, help="processes to kill in each")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="chaos-"))
    undisturbed(base / "undisturbed")
    expected = results(base / "undisturbed")
    victims: Counter[str] = Counter()
    different = 0
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        started_s = time.monotonic()
        trial = disturb(base / f"seed-{seed}", seed, options.kills)
        victims += trial.victims
        found = results(trial.folder)
        wrong = [name for name, value in expected.items() if found[name] != value]
        different += bool(wrong)
        state = f"DIFFERENT in {', '.join(wrong)} (kept: {trial.folder})" if wrong else "the same"
        seconds = time.monotonic() - started_s
        sys.stdout.write(f"seed {seed}: {dict(trial.victims)}, {trial.starts} starts, {seconds:.0f} s: {state}\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"{sum(victims.values())} kills in {options.seeds} sweeps: {dict(victims)}; {different} different\n"
    )
    return 1 if different else 0


raise SystemExit(main())
