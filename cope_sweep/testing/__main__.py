"""`python -m cope_sweep.testing [--plugins MODULES] [--only KINDS] [pytest options]`: run the contract suites."""

import sys

import pytest

sys.exit(pytest.main(["-p", "cope_sweep.testing.options", "--pyargs", "cope_sweep.testing", *sys.argv[1:]]))
