"""The rooms contract finds what it is for. (`make lint` applies it to the code.)"""

from graphlib import TopologicalSorter

import grimp
import pytest
from grimp import ImportGraph

from tests.architecture import find_problems, parse_rooms, room_of


@pytest.fixture
def graph():
    graph = ImportGraph()
    for module in ("cope_sweep.model.attention", "cope_sweep.kernels.dispatch", "cope_sweep.spec", "cope_services.app"):
        graph.add_module(module)
    graph.add_import(importer="cope_sweep.model.attention", imported="cope_sweep.kernels.dispatch")
    graph.add_import(importer="cope_services.app", imported="cope_sweep.spec")
    return graph


ROOMS = ["spec:", "kernels:", "model: kernels", "cope_services: spec"]


def test_room_of():
    assert [room_of(m) for m in ("cope_sweep.model.attention", "cope_services.app", "cope_sweep")] == [
        "model",
        "cope_services",
        "cope_sweep",
    ]


def test_the_declared_graph_is_kept(graph):
    assert find_problems(graph, parse_rooms(ROOMS)) == []


def test_an_import_that_is_not_declared(graph):
    graph.add_import(importer="cope_sweep.model.attention", imported="cope_sweep.spec")
    assert find_problems(graph, parse_rooms(ROOMS)) == [
        "model may not import spec: cope_sweep.model.attention imports cope_sweep.spec"
    ]


def test_a_declared_import_that_is_gone(graph):
    graph.remove_import(importer="cope_services.app", imported="cope_sweep.spec")
    assert find_problems(graph, parse_rooms(ROOMS)) == [
        "cope_services does not import spec: remove it from the line of cope_services"
    ]


def test_a_room_without_a_line(graph):
    graph.add_module("cope_sweep.new.module")
    assert find_problems(graph, parse_rooms(ROOMS)) == ["the room 'new' is not named in pyproject.toml"]


def test_a_library_that_the_graph_names_is_for_those_that_say_so(graph):
    for library in ("ray", "numpy"):
        graph.add_module(library, is_squashed=True)
        graph.add_import(importer="cope_sweep.model.attention", imported=library)
    assert find_problems(graph, parse_rooms(ROOMS)) == []
    assert find_problems(graph, parse_rooms(["ray", *ROOMS])) == [
        "model may not import ray: cope_sweep.model.attention imports ray"
    ]
    allowed = ["ray", "spec:", "kernels:", "model: kernels ray", "cope_services: spec"]
    assert find_problems(graph, parse_rooms(allowed)) == []


def test_a_cycle(graph):
    graph.add_import(importer="cope_sweep.kernels.dispatch", imported="cope_sweep.model.attention")
    problems = find_problems(graph, parse_rooms(["spec:", "kernels: model", "model: kernels", "cope_services: spec"]))
    assert problems == ["kernels: model has to be listed above it"]


def test_no_files_import_each_other_in_a_circle():
    """Nor do imports inside of functions, or those that only types need: who reads a file needs no other file twice."""
    graph = grimp.build_graph("cope_sweep", "cope_services", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle
