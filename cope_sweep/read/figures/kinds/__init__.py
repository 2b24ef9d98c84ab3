"""The kinds of figures: one file each, with its options, its data and its drawing. Every file here is imported."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
