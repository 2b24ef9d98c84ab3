"""pytest options of the contract suites; `python -m cope_sweep.testing` loads this module as a pytest plugin.

They cannot be in a conftest.py: pytest reads the options of a conftest.py before it resolves `--pyargs`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from cope_sweep.positions import ENCODINGS
from cope_sweep.registry import PLUGINS_VARIABLE, PluginError, Registry, load_plugins
from cope_sweep.tasks import TASKS

NOT_CHOSEN = "not in --only"
"""Reason of the skip of tests without parameters, which are deselected."""


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
    try:
        load_plugins(names)
    except PluginError as error:
        raise pytest.UsageError(str(error)) from error
    if names:
        os.environ[PLUGINS_VARIABLE] = ",".join(filter(None, [os.environ.get(PLUGINS_VARIABLE), *names]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that `--only` leaves without parameters: pytest has made a skipped test of each.

    Raises UsageError for a kind that no plugin has registered, because its suite would pass without a test.
    """
    unknown = [kind for kind in _names(config.getoption("cope_only")) if kind not in ENCODINGS and kind not in TASKS]
    if unknown:
        raise pytest.UsageError(
            f"--only: no encoding or task {', '.join(unknown)}; --plugins names the modules of yours"
        )
    removed = [
        item for item in items if any(mark.kwargs.get("reason") == NOT_CHOSEN for mark in item.iter_markers("skip"))
    ]
    config.hook.pytest_deselected(items=removed)
    items[:] = [item for item in items if item not in removed]


def registered(config: pytest.Config, registry: Registry[Any], contract: str, small: Mapping[str, Any]) -> list[Any]:
    """A parameter for each registered class, or each in `--only`: its spec, or a skip if that needs fields.

    Args:
        config: Without `--only` if this module is not loaded as a plugin.
        registry: The registry.
        contract: The class to derive tests from, for the reason of a skip.
        small: Kind → what is tested instead of the spec with its default fields.
    """
    only = _names(config.getoption("cope_only", default=""))
    parameters = []
    for kind, cls in registry.items():
        if only and kind not in only:
            continue
        required = [name for name, field in cls.model_fields.items() if field.is_required() and kind not in small]
        reason = f"{kind} needs {', '.join(required)}; subclass {contract}"
        spec = small.get(kind) or (None if required else registry.validate(kind))
        parameters.append(pytest.param(spec, id=kind, marks=[pytest.mark.skip(reason=reason)] * bool(required)))
    return parameters or [pytest.param(None, id="none", marks=pytest.mark.skip(reason=NOT_CHOSEN))]


def _names(text: str) -> list[str]:
    """The names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
