"""pytest options of the contract suites; `python -m cope_sweep.testing` loads this module as a pytest plugin.

They cannot be in a conftest.py: pytest reads the options of a conftest.py before it resolves `--pyargs`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from cope_sweep.registry import PLUGINS_VARIABLE, Registry, load_plugins


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
    return parameters


def _names(text: str) -> list[str]:
    """The names in a list that is separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
