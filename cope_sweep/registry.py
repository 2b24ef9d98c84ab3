"""Registries: one for each group of classes that a spec selects by `kind` (encodings, tasks, families, optimisers, …).

A registry holds three groups of classes: built-in ones, entry points of installed distributions, and plugins. A plugin
is a module that registers its classes when it is imported. An ablation file (`plugins:`) or the environment variable
COPE_SWEEP_PLUGINS names it:

    @ENCODINGS.register
    class MyEncoding(Encoding):
        kind: Literal["my_encoding"] = "my_encoding"
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import SchemaValidator, core_schema

from cope_sweep.errors import InvalidValue, UserError
from cope_sweep.frozen import Frozen
from cope_sweep.signals import described, user_code

PLUGINS_VARIABLE = "COPE_SWEEP_PLUGINS"
"""Environment variable: names of modules to import, separated by commas."""

BUILT_IN = "cope_sweep."
"""Prefix of the module names of built-in classes."""


class PluginError(UserError):
    """A plugin cannot be used. The message names the module and the cause, and says what to do."""

    default_code = "invalid_plugin"


class Kind(Frozen):
    """A spec that is selected by its `kind`: the base class of encodings, tasks, families, optimisers and schedules."""

    VERSION: ClassVar[int] = 1
    """Increase it when the same spec starts to mean a different computation: every run that uses it gets a new id."""

    SAME_SOURCES: ClassVar[tuple[str, ...]] = ()
    """Digests of earlier sources of a plugin that computed the same: runs that were trained with them are kept."""

    NON_IDENTITY_FIELDS: ClassVar[tuple[str, ...]] = ()
    """Names of fields that are not part of a run's identity, for example the folder of the data."""

    BARE: ClassVar[bool] = False
    """A spec with all fields at their defaults is written as its `kind` alone: `gpt2`, not `{kind: gpt2}`."""

    kind: str

    @classmethod
    def qualified_kind(cls) -> str:
        """The `kind` of a built-in class; `module.kind` of any other class, so that run ids cannot collide.

        Moving a plugin to another module therefore gives its runs new ids.
        """
        kind: str = cls.model_fields["kind"].default
        return kind if cls.__module__.startswith(BUILT_IN) else f"{cls.__module__}.{kind}"

    @classmethod
    def source_digest(cls) -> str | None:
        """A digest of the code of the class's module, without comments; None for a built-in class.

        It is recorded with each run, so that runs of two codes are not mixed in a row.
        """
        return None if cls.__module__.startswith(BUILT_IN) else _source_digest(cls.__module__)

    @classmethod
    def default_before(cls, name: str, fields: Mapping[str, Any]) -> Any:
        """The value of the field `name` in a stored spec with these `fields`, which is older than the field.

        Override it where the default of a new field means another computation than the class had before.
        """
        return cls.model_fields[name].default

    def refuse(self, names: Iterable[str], reason: str, *, within: str = "") -> None:
        """Raise InvalidValue where one of these fields is set, which has no effect.

        The key of a field starts with `within`, or else with the `kind`.
        """
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                key = f"{within or self.kind}.{name}"
                raise InvalidValue(f"{key} has no effect, because {reason}; remove it", code="no_effect", key=key)

    def dump(self, mode: str = "json") -> Any:
        """The spec as plain data: a mapping; the `kind` alone for a `BARE` class with all fields at their defaults."""
        data = self.model_dump(mode=mode)
        return data["kind"] if self.BARE and not self.model_dump(exclude={"kind"}, exclude_defaults=True) else data


@cache
def _source_digest(module: str) -> str | None:
    """12 hex digits; None where the module has no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


K = TypeVar("K", bound=Kind)


class Registry(Mapping[str, type[K]]):
    """The classes of one group, by `kind`. Also the pydantic annotation of a field that holds a spec of this group."""

    def __init__(self, noun: str, base: type[K], classes: Iterable[type[K]], *, entry_points: str | None) -> None:
        """Register the built-in `classes`.

        Args:
            noun: What error messages call a member: "encoding".
            base: The class that all members are derived from.
            classes: The built-in classes.
            entry_points: The entry-point group in which installed distributions declare classes or modules; None: the
                registry has only built-in classes, because the code that executes a spec knows each of them.
        """
        self.noun, self.base, self.group = noun, base, entry_points
        self._classes: dict[str, type[K]] = {}
        self._validator: SchemaValidator | None = None
        self._plugins_loaded = False
        self._is_loading = False
        # Reentrant: a plugin may look up a kind while it is imported.
        self._lock = threading.RLock()
        for cls in classes:
            self.register(cls)

    def register(self, cls: type[K]) -> type[K]:
        """Add a class and return it; usable as a decorator.

        A class of the same module and name replaces the earlier one, so that a module can be reloaded.

        Raises:
            PluginError: The class has another base, is abstract, has no literal `kind`, its `kind` is already taken, or
                the registry has only built-in classes.
        """
        name = f"{cls.__module__}.{cls.__qualname__}"
        if self.group is None and not cls.__module__.startswith(BUILT_IN):
            raise PluginError(
                f"{name}: a plugin cannot add a {self.noun}; accepted are {', '.join(self._classes)}",
                code="plugin_not_accepted",
                plugin=name,
                accepted=list(self._classes),
            )
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise PluginError(
                f"{name} is not a subclass of {self.base.__module__}.{self.base.__name__}; derive it from it",
                code="plugin_base",
                plugin=name,
                base=f"{self.base.__module__}.{self.base.__name__}",
            )
        field = cls.model_fields.get("kind")
        kind = field.default if field else None
        if field is None or not isinstance(kind, str) or get_args(field.annotation) != (kind,):
            raise PluginError(
                f"{name} has no kind; give it one: `kind: Literal['name'] = 'name'`", code="plugin_kind", plugin=name
            )
        if inspect.isabstract(cls):
            missing = sorted(cls.__abstractmethods__)
            raise PluginError(
                f"{name}: the {self.noun} {kind!r} is abstract; define {', '.join(missing)}",
                code="plugin_abstract",
                plugin=name,
                kind=kind,
                missing=missing,
            )
        registered = self._classes.get(kind)
        if registered is not None and (registered.__module__, registered.__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise PluginError(
                f"{name}: the {self.noun} {kind!r} already exists in {registered.__module__}; choose another kind",
                code="plugin_kind_taken",
                plugin=name,
                kind=kind,
                owner=registered.__module__,
            )
        self._classes[kind] = cls
        # It is built again when it is used, with the new class.
        self._validator = None
        return cls

    def __getitem__(self, kind: str) -> type[K]:
        """The class of a `kind`. Raises KeyError."""
        # Built-in kinds do not wait for the import of plugins.
        if kind not in self._classes:
            self._load_plugins()
        return self._classes[kind]

    def __iter__(self) -> Iterator[str]:
        """Every `kind`, built-in ones first."""
        self._load_plugins()
        # A copy: a plugin that is loaded meanwhile registers classes.
        return iter(list(self._classes))

    def __len__(self) -> int:
        return len(list(iter(self)))

    __eq__, __hash__ = object.__eq__, object.__hash__  # annotations are compared by identity

    def validate(self, value: Any) -> K:
        """The spec that `value` declares: a spec, a `kind`, or a mapping with a `kind`.

        Raises:
            pydantic.ValidationError: The `kind` is missing or unknown, or a field is wrong.
            PluginError: A plugin cannot be imported, or the class of the spec is not registered.
        """
        if isinstance(value, self.base):
            if self._classes.get(value.kind) is not type(value):
                cls = type(value)
                raise PluginError(
                    f"{cls.__module__}.{cls.__qualname__} is not registered as the {self.noun} {value.kind!r}, so its "
                    "runs could not be read again; register the class with the decorator `register`",
                    code="plugin_not_registered",
                    plugin=f"{cls.__module__}.{cls.__qualname__}",
                    kind=value.kind,
                )
            return value
        if isinstance(value, str):
            value = {"kind": value}
        kind = value.get("kind") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in self._classes:
            self._load_plugins()
        return self._validated(value, self._classes)

    def choices(self) -> Mapping[str, type[K]]:
        """The classes that a file may name, by `kind`."""
        return self

    def _validated(self, value: Any, classes: Mapping[str, type[K]]) -> K:
        # Pydantic's discriminated unions are fixed when a model's class is made. Plugins register later.
        if self._validator is None:
            members = {kind: cls.__pydantic_core_schema__ for kind, cls in classes.items()}
            self._validator = SchemaValidator(core_schema.tagged_union_schema(members, "kind"))
        spec: K = self._validator.validate_python(value)
        return spec

    def _load_plugins(self) -> None:
        """Import the modules of COPE_SWEEP_PLUGINS and the entry points of this group, once per process."""
        if self._plugins_loaded:
            return
        with self._lock:
            # A plugin may look up a kind while it is imported. Other threads wait, so that none misses a kind.
            if self._plugins_loaded or self._is_loading:
                return
            self._is_loading = True
            try:
                load_plugins(name.strip() for name in os.environ.get(PLUGINS_VARIABLE, "").split(",") if name.strip())
                if self.group is not None:
                    for entry_point in importlib.metadata.entry_points(group=self.group):
                        self._load_entry_point(entry_point)
                self._plugins_loaded = True
            finally:  # also after an error or Ctrl-C: the next lookup tries again
                self._is_loading = False

    def _load_entry_point(self, entry_point: importlib.metadata.EntryPoint) -> None:
        try:
            with user_code():
                loaded = entry_point.load()
        except PluginError:
            raise
        except Exception as error:
            distribution = entry_point.dist.name if entry_point.dist else "the distribution that declares it"
            raise PluginError(
                f"the entry point {entry_point.name!r} ({entry_point.value}) of the group {self.group} cannot be "
                f"loaded: {described(error)}; correct or uninstall {distribution}",
                code="plugin_not_loaded",
                plugin=entry_point.value,
                distribution=distribution,
                reason=described(error),
            ) from error
        # A module registers its classes itself when it is imported.
        if isinstance(loaded, type):
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
        return {"anyOf": [kinds, *(handler(cls.__pydantic_core_schema__) for cls in self.values())]}


def load_plugins(modules: Iterable[str], folder: Path | None = None) -> None:
    """Import modules by name; they register their classes. The current directory is searched last.

    Args:
        modules: Their names.
        folder: The folder of the ablation file that names them; None, as on a worker, which has copies: not checked.

    Raises:
        PluginError: A module is missing, raises or exits while it is imported, or hides a file of the same name in
            `folder` or in the current directory.
    """
    for name in modules:
        if not all(part.isidentifier() for part in name.split(".")):
            raise PluginError(
                f"the plugin {name!r} is not the name of a module; write it as in `import my_package.my_encoding`, "
                "without a path or a suffix",
                code="plugin_name",
                plugin=name,
            )
        # At the end, so that no file of this folder hides an installed module.
        if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds strings
            sys.path.append(os.getcwd())  # noqa: PTH109
        try:
            # A command's standard output is its result, which others read.
            with user_code(), contextlib.redirect_stdout(sys.stderr):
                importlib.import_module(name)
        except PluginError:
            raise
        except Exception as error:
            # The plugin itself or a package around it, and not a module that it imports.
            missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
            remedy = (
                "install it, or start the command in the folder that contains it"
                if missing
                else f"correct the module until `import {name}` succeeds"
            )
            raise PluginError(
                f"the plugin {name} cannot be imported: {described(error)}; {remedy}",
                code="plugin_not_loaded",
                plugin=name,
                reason=described(error),
            ) from error
        if folder is not None:
            _check_not_hidden(name, [folder, Path.cwd()])


def _check_not_hidden(plugin: str, folders: Iterable[Path]) -> None:
    """Raise PluginError if another module than the one in these folders was imported for a plugin."""
    name = plugin.partition(".")[0]
    module = sys.modules.get(name)  # a package without a file has the paths that it is searched in
    file: str | None = getattr(module, "__file__", None)
    places = [file] if file else getattr(module, "__path__", [])
    imported = {Path(place).resolve() for place in places}
    for folder in folders:
        candidates = (folder / f"{name}.py", folder / name / "__init__.py")
        expected = next(filter(Path.is_file, candidates), None)
        if expected is not None and expected.resolve() not in imported:
            found = next(iter(map(str, imported)), "a part of Python")
            raise PluginError(
                f"the plugin {plugin} is {found}, which hides {expected}; give the file a unique name",
                code="plugin_hidden",
                plugin=plugin,
                imported=found,
                hidden=str(expected),
            )
