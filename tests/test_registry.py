"""Registries: built-in classes, plugins, entry points of installed distributions, and errors."""

import importlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from cope_sweep.config.ablation import SEARCHES, SearchSpec
from cope_sweep.frozen import Frozen
from cope_sweep.positions import ENCODINGS, CoPE
from cope_sweep.registry import Kind, Registry, load_plugins
from cope_sweep.tasks import TASKS
from tests.helpers.errors import raises
from tests.helpers.processes import output_of


class Shape(Kind):
    """The base class of this file's registries."""

    def area(self):
        return 0.0


class Square(Shape):
    kind: Literal["square"] = "square"
    side: float = 1.0


class Circle(Shape):
    BARE: ClassVar[bool] = True

    kind: Literal["circle"] = "circle"
    radius: float = 1.0
    folder: str | None = None


GROUP = "cope_sweep.test_shapes"


@pytest.fixture
def shapes():
    return Registry("shape", Shape, (Square, Circle), entry_points=GROUP)


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A function that writes an importable module; the modules are forgotten after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


# -- registration


def test_register_is_a_decorator_and_keeps_the_order(shapes):
    @shapes.register
    class Line(Shape):
        kind: Literal["line"] = "line"

    assert list(shapes) == ["square", "circle", "line"]
    assert list(shapes.values()) == [Square, Circle, Line]
    assert list(shapes.items()) == [("square", Square), ("circle", Circle), ("line", Line)]
    assert len(shapes) == 3
    assert shapes["line"] is shapes.get("line") is Line
    assert isinstance(shapes.validate("line"), Line)


def test_a_kind_is_registered_once(shapes):
    def other_square():
        class OtherSquare(Shape):
            kind: Literal["square"] = "square"

        return OtherSquare

    other = other_square()
    name = f"{__name__}.{other.__qualname__}"
    with raises("plugin_kind_taken", plugin=name, kind="square", owner=__name__):
        shapes.register(other)
    assert shapes["square"] is Square


def test_a_reloaded_class_replaces_the_earlier_one(shapes):
    def define(side):
        class Tile(Shape):
            kind: Literal["tile"] = "tile"
            side: float

        Tile.model_fields["side"].default = side
        return Tile

    shapes.register(define(1.0))
    second = shapes.register(define(2.0))
    assert shapes["tile"] is second
    assert list(shapes).count("tile") == 1


def test_a_class_without_a_literal_kind_is_an_error(shapes):
    class Missing(Shape):
        side: float = 1.0

    class AnyText(Shape):
        kind: str = "any"

    class Two(Shape):
        kind: Literal["one", "two"] = "one"

    class Other(Shape):
        kind: Literal["one"] = "two"

    for cls in (Missing, AnyText, Two, Other):
        with raises("plugin_kind", plugin=f"{__name__}.{cls.__qualname__}"):
            shapes.register(cls)


def test_a_class_of_another_base_is_an_error(shapes):
    for other in (CoPE, int, lambda: None):
        with raises("plugin_base", plugin=f"{other.__module__}.{other.__qualname__}", base=f"{__name__}.Shape"):
            shapes.register(other)


def test_an_abstract_class_is_an_error():
    from cope_sweep.tasks import Task

    class Half(Task):
        kind: Literal["half"] = "half"

    with raises("plugin_abstract", kind="half", missing=["length", "vocabulary_size"]):
        TASKS.register(Half)
    assert "half" not in TASKS


def test_classes_of_plugins_are_refused_where_no_code_would_execute_them():
    class Sobol(SearchSpec):
        kind: Literal["sobol"] = "sobol"

    with raises("plugin_not_accepted", plugin=f"{__name__}.{Sobol.__qualname__}", accepted=list(SEARCHES)):
        SEARCHES.register(Sobol)
    assert "sobol" not in SEARCHES


# -- validation


def test_a_spec_a_kind_or_a_mapping(shapes):
    spec = Square(side=2.0)
    assert shapes.validate(spec) is spec
    assert shapes.validate("circle") == Circle()
    assert shapes.validate({"kind": "square", "side": 3}) == Square(side=3.0)


def test_a_spec_of_an_unregistered_class_is_an_error(shapes):
    class Blob(Shape):
        kind: Literal["blob"] = "blob"

    class LoudSquare(Square):
        pass

    for spec in (Blob(), LoudSquare()):
        with raises("plugin_not_registered", plugin=f"{__name__}.{type(spec).__qualname__}", kind=spec.kind):
            shapes.validate(spec)


class TestAsAnAnnotation:
    @pytest.fixture
    def drawing(self, shapes):
        class Drawing(Frozen):
            shape: Annotated[Shape, shapes]

        return Drawing

    def test_validates_and_locates_errors(self, drawing):
        assert drawing(shape="circle").shape == Circle()
        assert drawing.model_validate_json('{"shape": {"kind": "square", "side": 2}}').shape == Square(side=2.0)
        with pytest.raises(ValidationError) as raised:
            drawing(shape={"kind": "square", "edge": 1})
        assert raised.value.errors()[0]["loc"] == ("shape", "square", "edge")

    def test_bare_classes_are_written_as_their_kind(self, drawing):
        assert drawing(shape=Circle()).model_dump(mode="json") == {"shape": "circle"}
        assert json.loads(drawing(shape=Circle()).model_dump_json()) == {"shape": "circle"}
        written = drawing(shape=Circle(radius=2.0)).model_dump(mode="json")
        assert written == {"shape": {"kind": "circle", "radius": 2.0, "folder": None}}
        assert drawing(shape=Square()).model_dump(mode="json") == {"shape": {"kind": "square", "side": 1.0}}
        for shape in (Circle(), Circle(radius=2.0), Square()):
            assert drawing.model_validate(drawing(shape=shape).model_dump(mode="json")).shape == shape

    def test_the_json_schema_names_every_kind_and_field(self, shapes, drawing):
        @shapes.register
        class Line(Shape):
            kind: Literal["line"] = "line"
            length: float = 1.0

        schema = TypeAdapter(drawing).json_schema()
        names, *classes = schema["properties"]["shape"]["anyOf"]
        assert names == {"type": "string", "enum": ["square", "circle", "line"]}
        assert [set(each["properties"]) for each in classes] == [
            {"kind", "side"},
            {"kind", "radius", "folder"},
            {"kind", "length"},
        ]


# -- identity


def test_built_in_kinds_are_unique_over_encodings_and_tasks():
    """The versions in a run's identity have one key per kind."""
    built_in = [cls.qualified_kind() for registry in (ENCODINGS, TASKS) for cls in registry.values()]
    assert len(set(built_in)) == len(built_in)


# -- plugins


PLUGIN = """
from typing import Literal
from cope_sweep.positions import ENCODINGS
from cope_sweep.positions.base import Encoding
from cope_sweep.config import RunSpec

@ENCODINGS.register
class Mine(Encoding):
    VERSION = 3
    kind: Literal["{kind}"] = "{kind}"
    strength: float = 1.0
"""


def test_plugins_can_be_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "plugin_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    load_plugins(["plugin_here"])
    assert sys.modules.pop("plugin_here").__file__ == str(tmp_path / "plugin_here.py")


@pytest.mark.parametrize(
    ("name", "text", "code", "data"),
    [
        ("not_there", None, "plugin_not_loaded", {"reason": "ModuleNotFoundError: No module named 'not_there'"}),
        (
            "needs",
            "import not_there_either",
            "plugin_not_loaded",
            {"reason": "ModuleNotFoundError: No module named 'not_there_either'"},
        ),
        ("fails", "1 / 0", "plugin_not_loaded", {"reason": "ZeroDivisionError: division by zero"}),
        ("leaves", "import sys\nsys.exit(0)", "plugin_not_loaded", {"reason": "SystemExit: 0"}),
        ("my/plugin.py", None, "plugin_name", {}),
        ("", None, "plugin_name", {}),
        (
            "taken",
            PLUGIN.format(kind="cope"),
            "plugin_kind_taken",
            {"plugin": "taken.Mine", "kind": "cope", "owner": "cope_sweep.positions.cope"},
        ),
    ],
)
def test_errors_of_plugins_name_the_module(name, text, code, data, modules):
    if text is not None:
        modules(name, text)
    with raises(code, **{"plugin": name} | data):
        load_plugins([name])


@pytest.mark.parametrize("name", ["code", "sys", "email.mime"])
@pytest.mark.parametrize("place", ["code.py", "code/__init__.py"])
def test_a_file_beside_the_ablation_that_another_module_hides_is_an_error(tmp_path, name, place):
    top = name.partition(".")[0]
    meant = tmp_path / place.replace("code", top)
    meant.parent.mkdir(exist_ok=True)
    meant.write_text("")
    with raises("plugin_hidden", plugin=name, hidden=str(meant)):
        load_plugins([name], tmp_path)
    load_plugins([name])  # a worker has its own folders


def test_a_plugin_beside_the_ablation_is_used(tmp_path, monkeypatch):
    (tmp_path / "plugin_beside.py").write_text("")
    (tmp_path / "package_beside").mkdir()
    (tmp_path / "package_beside" / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugins(["plugin_beside", "package_beside.part"], tmp_path)


def test_modules_of_the_environment_variable_are_imported_when_an_unknown_kind_is_asked_for(modules, monkeypatch):
    monkeypatch.setenv("COPE_SWEEP_PLUGINS", " late_plugin, ")
    shapes = Registry("shape", Shape, (Square,), entry_points=GROUP)
    modules("late_plugin", "1 / 0")
    assert shapes.validate("square") == Square()  # built-in: nothing is imported
    for _ in range(2):  # the error is not lost
        with raises("plugin_not_loaded", plugin="late_plugin", reason="ZeroDivisionError: division by zero"):
            shapes.validate("late")
    # The plugin registers its class with the registry of this test.
    sys.modules["shapes_of_this_test"] = sys.modules[__name__]
    monkeypatch.setattr(sys.modules[__name__], "REGISTRY", shapes, raising=False)
    modules(
        "late_plugin",
        "from typing import Literal\nfrom shapes_of_this_test import REGISTRY, Shape\n"
        "assert 'unknown' not in REGISTRY\n"  # looking up a kind during the import is allowed
        "@REGISTRY.register\nclass Late(Shape):\n    kind: Literal['late'] = 'late'\n",
    )
    assert shapes.validate({"kind": "late"}).qualified_kind() == "late_plugin.late"
    assert list(shapes) == ["square", "late"]


def test_a_thread_that_asks_while_another_imports_plugins_finds_their_kinds(modules, monkeypatch):
    shapes = Registry("shape", Shape, (), entry_points=GROUP)
    monkeypatch.setenv("COPE_SWEEP_PLUGINS", "slow_plugin")
    sys.modules["shapes_of_this_test"] = sys.modules[__name__]
    monkeypatch.setattr(sys.modules[__name__], "REGISTRY", shapes, raising=False)
    modules(
        "slow_plugin",
        "import time\nfrom typing import Literal\nfrom shapes_of_this_test import REGISTRY, Shape\ntime.sleep(0.3)\n"
        "@REGISTRY.register\nclass Slow(Shape):\n    kind: Literal['slow'] = 'slow'\n",
    )
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: list(shapes), range(4))) == [["slow"]] * 4


# -- entry points of an installed distribution


def install(folder, name, entry_points, **files):
    """A distribution in a target folder, as an installer leaves it: modules and a .dist-info folder."""
    for module, text in files.items():
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_entry_points_name_classes_or_modules(tmp_path, modules, monkeypatch):
    install(
        tmp_path,
        "shapes-of-others",
        f"[{GROUP}]\nstar = others:Star\nmodule = others_module\n",
        others=f"from typing import Literal\nfrom {__name__} import Shape\n"
        "class Star(Shape):\n    kind: Literal['star'] = 'star'\n",
        others_module="",
    )
    shapes = Registry("shape", Shape, (Square,), entry_points=GROUP)
    assert "others" not in sys.modules
    assert shapes.validate("star").qualified_kind() == "others.star"
    assert "others_module" in sys.modules
    assert "'square', 'star'" in _error(shapes, "cube")


def _error(registry, value):
    with pytest.raises(ValidationError) as raised:
        registry.validate(value)
    return raised.value.errors()[0]["ctx"]["expected_tags"]


@pytest.mark.parametrize(
    ("value", "code", "data"),
    [
        (
            "not_there_at_all:Star",
            "plugin_not_loaded",
            {"plugin": "not_there_at_all:Star", "reason": "ModuleNotFoundError: No module named 'not_there_at_all'"},
        ),
        ("broken_shapes", "plugin_not_loaded", {"plugin": "broken_shapes", "distribution": "broken-shapes"}),
        ("broken_shapes_ok:Wrong", "plugin_base", {"plugin": "broken_shapes_ok.Wrong"}),
    ],
)
def test_errors_of_entry_points_name_the_distribution(value, code, data, tmp_path, modules):
    files = {"broken_shapes": "1 / 0", "broken_shapes_ok": "class Wrong: pass"}
    install(tmp_path, "broken-shapes", f"[{GROUP}]\nstar = {value}\n", **files)
    shapes = Registry("shape", Shape, (Square,), entry_points=GROUP)
    for _ in range(2):
        with raises(code, **data):
            list(shapes)


SCRIPT = """
import importlib
import json
from cope_sweep.positions import ENCODINGS
from cope_sweep.config import RunSpec
from cope_sweep.tasks import TASKS

data = {"task": {"kind": "flip_flop", "pairs": 4}, "model": {"position": ["mine", {"kind": "rope"}]}}
run = RunSpec.model_validate_json(json.dumps(data))
again = RunSpec.model_validate_json(run.model_dump_json())
assert again == run and again.run_id == run.run_id
schema = json.dumps(RunSpec.model_json_schema())
print(json.dumps({"versions": run.versions, "kinds": list(ENCODINGS), "schema": "strength" in schema, "id": run.run_id}))
"""


@pytest.mark.slow
def test_an_installed_encoding_is_part_of_a_run_and_its_id(tmp_path):
    """In a new process: found by its entry point, written and read as JSON, versioned under its qualified name."""
    results = []
    for number, (module, source) in enumerate(
        [
            ("first_author", PLUGIN.format(kind="mine")),
            ("second_author", PLUGIN.format(kind="mine")),
            ("first_author", PLUGIN.format(kind="mine").replace("VERSION = 3", "VERSION = 4")),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        install(folder, "an-author", f"[cope_sweep.positions]\nmine = {module}\n", **{module: source})
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        results.append(json.loads(output_of("-c", SCRIPT, PYTHONPATH=path)))
    assert [result["versions"]["first_author.mine"] for result in (results[0], results[2])] == [3, 4]
    assert results[1]["versions"]["second_author.mine"] == 3
    assert all(result["kinds"][-1] == "mine" and result["schema"] for result in results)
    assert len({result["id"] for result in results}) == 3


def test_the_source_of_a_plugin_changes_with_its_code_and_not_with_comments(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    code = "from tests.test_registry import Shape\n\nclass Star(Shape):\n    points: int = 5\n"
    sources = []
    for name, text in {
        "as_is": code,
        "commented": f"# A comment.\n\n{code}",
        "changed": code.replace("5", "6"),
    }.items():
        (tmp_path / f"star_{name}.py").write_text(text)
        sources.append(importlib.import_module(f"star_{name}").Star.source_digest())
    as_is, commented, changed = sources
    assert as_is == commented != changed
    assert Shape.source_digest() is not None
    assert CoPE.source_digest() is None
