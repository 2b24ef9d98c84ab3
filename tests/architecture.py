"""An import-linter contract: the graph of rooms, and what each of them may import.

A room is a package or module directly below `cope_sweep`, another top-level package of this repository, or a library
that the graph names: only the rooms that say so import it. The contract in pyproject.toml has one line for each room,
`room: rooms that it may import`, below the rooms that it names. It is broken by an import that the graph does not
allow, by an entry that no import needs any more, by a room that it does not name, and by an edge that leads to a room
further down the list (so the graph has no cycle).
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

ROOT = "cope_sweep"


def room_of(module: str) -> str:
    """The room of a module, by its dotted name: `cope_sweep.model.attention` → `model`."""
    package, *rest = module.split(".")
    return rest[0] if package == ROOT and rest else package


class RoomsContract(Contract):
    """Every room, and the rooms that it imports."""

    type_name = "rooms"

    rooms = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        problems = find_problems(graph, parse_rooms(self.rooms))
        return ContractCheck(kept=not problems, metadata={"problems": problems})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for problem in check.metadata["problems"]:
            output.print_error(problem)
        output.new_line()


def parse_rooms(lines: list[str]) -> dict[str, set[str]]:
    """Room → the rooms that it may import, from lines such as `model: spec kernels`."""
    rooms = {}
    for line in lines:
        room, _, allowed = line.partition(":")
        rooms[room.strip()] = set(allowed.split())
    return rooms


def find_problems(graph: ImportGraph, rooms: dict[str, set[str]]) -> list[str]:
    """Where the imports and the declared graph of rooms differ, one sentence each."""
    internal = {module for module in graph.modules if not graph.is_module_squashed(module)}
    known = internal | (graph.modules & rooms.keys())
    imports: dict[tuple[str, str], str] = {}
    for module in sorted(internal):
        for imported in sorted(graph.find_modules_directly_imported_by(module) & known):
            edge = room_of(module), room_of(imported)
            if edge[0] != edge[1]:
                imports.setdefault(edge, f"{module} imports {imported}")
    problems = [
        f"the room {room!r} is not named in pyproject.toml"
        for room in sorted({room_of(module) for module in internal} - rooms.keys())
    ]
    problems += [
        f"{room} may not import {imported}: {example}"
        for (room, imported), example in sorted(imports.items())
        if room in rooms and imported not in rooms[room]
    ]
    seen: set[str] = set()
    for room, allowed in rooms.items():
        problems += [f"{room}: {upper} has to be listed above it" for upper in sorted(allowed - seen)]
        problems += [
            f"{room} does not import {unused}: remove it from the line of {room}"
            for unused in sorted(allowed)
            if (room, unused) not in imports
        ]
        seen.add(room)
    return problems
