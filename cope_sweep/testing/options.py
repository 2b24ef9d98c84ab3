"""pytest options of the contract suites; `python -m cope_sweep.testing` loads this module as a pytest plugin.

They cannot be in a conftest.py: pytest reads the options of a conftest.py before it resolves `--pyargs`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cope_sweep.registry import PLUGINS_VARIABLE, load_plugins

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--plugins` and `--only`."""
    group = parser.getgroup("cope-sweep")
    group.addoption(
        "--plugins",
        dest="cope_plugins",
        default="",
        help="modules to import, separated by commas; they register their classes",
    )
    group.addoption(
        "--only",
        dest="cope_only",
        default="",
        help="kinds of encodings and tasks to test, separated by commas; default: all",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Import the plugins, here and, through the environment, in processes that tests start."""
    names = _names(config.getoption("cope_plugins"))
    load_plugins(names)
    if names:
        os.environ[PLUGINS_VARIABLE] = ",".join(filter(None, [os.environ.get(PLUGINS_VARIABLE), *names]))


def kinds_to_test(config: pytest.Config) -> set[str]:
    """The kinds of `--only`; empty without the option, or if this module is not loaded as a plugin."""
    return set(_names(config.getoption("cope_only", default="")))


def _names(text: str) -> list[str]:
    """The names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
