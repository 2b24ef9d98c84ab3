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
    modules = [importlib.import_module(root) for root in roots]
    shipped = [module for module in modules if not _is_installed(module)]
    return {"py_modules": shipped} if shipped else {}


def _is_installed(module: ModuleType) -> bool:
    """Whether a module is in a folder for installed distributions, or has no files."""
    locations = [module.__file__] if module.__file__ else list(getattr(module, "__path__", []))
    folders = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    return all(any(Path(place).resolve().is_relative_to(folder) for folder in folders) for place in locations)
