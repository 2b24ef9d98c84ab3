"""`python -m cope_sweep.testing [--plugins MODULES] [--only KINDS] [pytest options]`: run the contract suites."""

import sys
from pathlib import Path

import pytest

CONFIGURATION = Path(__file__).with_name("pytest.ini")

sys.exit(pytest.main(["-c", str(CONFIGURATION), "--pyargs", "cope_sweep.testing", *sys.argv[1:]]))
