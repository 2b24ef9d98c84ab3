"""Registries: one for each kind of thing that a spec names by its `kind` (encodings, tasks, families, optimisers, …).

A registry holds the built-in classes, those that installed distributions declare as entry points, and those that
register themselves when a module is imported that an ablation file (`plugins:`) or COPE_SWEEP_PLUGINS names:

    @ENCODINGS.register
    class MyEncoding(Encoding):
        kind: Literal["my_encoding"] = "my_encoding"
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import SchemaValidator, core_schema

from cope_sweep.errors import UserError
from cope_sweep.frozen import Frozen

PLUGINS_VARIABLE = "COPE_SWEEP_PLUGINS"
"""Environment variable: modules to import, separated by commas."""

BUILT_IN = "cope_sweep."


class PluginError(UserError):
    """A plugin cannot be used; the message names the module, why, and the way out."""


class Kind(Frozen):
    """A spec that is chosen by its `kind`: the base of encodings, tasks, families, optimisers and schedules."""

    VERSION: ClassVar[int] = 1
    """Raise it when the same spec comes to mean another computation: every run that uses it gets a new id."""

    NON_IDENTITY_FIELDS: ClassVar[tuple[str, ...]] = ()
    """Fields that are no part of a run's identity: where data is, for example."""

    BARE: ClassVar[bool] = False
    """Whether a spec with all fields at their defaults is written as its `kind` alone: `gpt2`, not `{kind: gpt2}`."""

    kind: str

    @classmethod
    def qualified_kind(cls) -> str:
        """The `kind`; with the module before it for a class from outside this package, so that ids cannot collide."""
        kind: str = cls.model_fields["kind"].default
        return kind if cls.__module__.startswith(BUILT_IN) else f"{cls.__module__}.{kind}"

    def dump(self, mode: str = "json") -> Any:
        """The spec as plain data: a mapping, or its `kind` where it is `BARE` and all else is at its default."""
        data = self.model_dump(mode=mode)
        return data["kind"] if self.BARE and not self.model_dump(exclude={"kind"}, exclude_defaults=True) else data


K = TypeVar("K", bound=Kind)


class Registry(Generic[K]):
    """The classes of one kind of thing, by their `kind`. Also the pydantic annotation of a field that holds one."""

    def __init__(self, noun: str, base: type[K], classes: Iterable[type[K]], *, entry_points: str) -> None:
        """`noun` is what errors call it; `entry_points` is the group in which distributions declare more."""
        self.noun, self.base, self.group = noun, base, entry_points
        self._classes: dict[str, type[K]] = {}
        self._validator: SchemaValidator | None = None
        self._entry_points_loaded = False
        for cls in classes:
            self.register(cls)

    def register(self, cls: type[K]) -> type[K]:
        """Add a class; usable as a decorator. Raises PluginError where its `kind` is missing or taken."""
        field = cls.model_fields.get("kind")
        kind = field.default if field else None
        if not isinstance(kind, str):
            raise PluginError(
                f"{cls.__module__}.{cls.__name__} has no kind; give it one: `kind: Literal['name'] = 'name'`"
            )
        known = self._classes.get(kind)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise PluginError(
                f"{cls.__module__}.{cls.__name__}: the {self.noun} {kind!r} exists already, in {known.__module__}; "
                "choose another kind"
            )
        self._classes[kind] = cls
        self._validator = None
        return cls

    def get(self, kind: str) -> type[K] | None:
        """The class of a `kind`; None where there is none."""
        if kind not in self._classes:
            self._load_entry_points()
        return self._classes.get(kind)

    def __getitem__(self, kind: str) -> type[K]:
        """Raises KeyError."""
        cls = self.get(kind)
        if cls is None:
            raise KeyError(kind)
        return cls

    def __iter__(self) -> Iterator[str]:
        self._load_entry_points()
        return iter(list(self._classes))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, kind: object) -> bool:
        return isinstance(kind, str) and self.get(kind) is not None

    def items(self) -> list[tuple[str, type[K]]]:
        """Every `kind` and its class."""
        return [(kind, self._classes[kind]) for kind in self]

    def classes(self) -> list[type[K]]:
        """Every class, built-in ones first."""
        return [self._classes[kind] for kind in self]

    def validate(self, value: Any) -> K:
        """The spec that `value` declares: a spec, its `kind`, or a mapping. Raises pydantic's ValidationError."""
        if isinstance(value, self.base):
            return value
        if isinstance(value, str):
            value = {"kind": value}
        if not (isinstance(value, dict) and value.get("kind") in self._classes):
            self._load_entry_points()
        if self._validator is None:
            members = {kind: cls.__pydantic_core_schema__ for kind, cls in self._classes.items()}
            self._validator = SchemaValidator(core_schema.tagged_union_schema(members, "kind"))
        spec: K = self._validator.validate_python(value)
        return spec

    def _load_entry_points(self) -> None:
        """Import what installed distributions and COPE_SWEEP_PLUGINS declare, once."""
        if self._entry_points_loaded:
            return
        self._entry_points_loaded = True
        load_plugins(name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",") if name.strip())
        for entry_point in importlib.metadata.entry_points(group=self.group):
            try:
                loaded = entry_point.load()
            except Exception as error:
                raise PluginError(
                    f"the entry point {entry_point.name!r} ({entry_point.value}) of group {self.group} cannot be "
                    f"loaded: {type(error).__name__}: {error}; mend or uninstall the distribution that declares it"
                ) from error
            # A module registers its classes itself.
            if isinstance(loaded, type) and issubclass(loaded, self.base):
                self.register(loaded)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda spec, info: spec.dump(info.mode), info_arg=True
            ),
        )

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        kinds = {"type": "string", "enum": list(self)}
        return {"anyOf": [kinds, *(handler(cls.__pydantic_core_schema__) for cls in self.classes())]}


def load_plugins(modules: Iterable[str]) -> None:
    """Import modules, which register their classes. The current directory counts as a place to import from.

    Raises PluginError where one is missing or fails.
    """
    for name in modules:
        if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds strings
            sys.path.append(os.getcwd())  # noqa: PTH109
        try:
            importlib.import_module(name)
        except PluginError:
            raise
        except Exception as error:
            missing = isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name)
            way_out = (
                "start the command in the folder that holds it, or install it"
                if missing
                else "mend the module; it is imported as `import " + name + "`"
            )
            raise PluginError(
                f"the plugin {name} cannot be imported: {type(error).__name__}: {error}; {way_out}"
            ) from error
