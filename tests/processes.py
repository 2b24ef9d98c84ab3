"""Python processes of their own, for what a test must not share with others."""

import os
import subprocess
import sys


def output_of(*words, cwd=None, timeout_s=300, **environment):
    """The standard output of `python WORDS`, with some environment variables set. Its exit code has to be 0."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout
