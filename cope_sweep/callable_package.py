"""Packages that are functions too.

`cope_sweep.plan` and `cope_sweep.probe` are packages, and functions for notebooks: `cope_sweep.plan("quickstart")`. A
package replaces a function of its name as soon as it is imported, so these packages can be called.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package; a call of it is a call of the function of its name in `cope_sweep.notebook`."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        notebook = importlib.import_module("cope_sweep.notebook")  # on use: it imports this package
        return getattr(notebook, self.__name__.rpartition(".")[2])(*arguments, **options)


def make_callable(package: str) -> None:
    """Let the package with this name, which is being imported, be called."""
    sys.modules[package].__class__ = CallablePackage
