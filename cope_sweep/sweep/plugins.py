"""Ships the plugin modules of an ablation to the processes of a Ray cluster."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cope_sweep.registry import load_plugins


def plugin_runtime_env(plugins: Sequence[str]) -> dict[str, Any]:
    """The Ray runtime environment with which every process of a job can import `plugins`; empty if none is needed.

    Ray copies the file or folder of each top-level module to every node. Modules of installed distributions are not
    copied: an installed plugin has to be installed on all nodes.

    Raises:
        PluginError: A plugin cannot be imported here.
    """
    load_plugins(plugins)
    roots = dict.fromkeys(name.partition(".")[0] for name in plugins)
    paths = [path for root in roots for path in _locations(importlib.import_module(root)) if not _is_installed(path)]
    return {"py_modules": [str(path) for path in paths]} if paths else {}


def _locations(module: ModuleType) -> list[Path]:
    """The folders of a package, or the file of a module; none for a built-in module."""
    if folders := list(getattr(module, "__path__", [])):
        return [Path(folder).resolve() for folder in folders]
    file = getattr(module, "__file__", None)
    return [Path(file).resolve()] if file else []


def _is_installed(path: Path) -> bool:
    """Whether a path is in a folder of installed distributions or of the standard library."""
    folders = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    return any(path.is_relative_to(folder) for folder in folders)
