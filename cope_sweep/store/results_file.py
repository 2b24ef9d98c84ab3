"""The files of a folder of results, and the reader of those of one ablation at a scale.

    <ablation>.<scale>.parquet            the runs of an ablation at a scale; without one: <ablation>.parquet
    <ablation>.<scale>.curves.parquet     their learning curves: one line per logged value, with its time if it is known
    <ablation>.<scale>.heads.parquet      measures of heads, if a figure of the ablation claims something about heads
    <ablation>.<scale>.<figure>.svg, .md  the figures and the text of a report

`cope-sweep report --out` and `cope-sweep store copy` write these files; `ablations/results` is such a folder. A file of
runs has one line per run of the plan, finished or not, in the plan's order:

    run_id, status, row, seed, label.<axis key>, …, <key of the spec>, …, <metric>, …, facts.<name>, …
    sweep_id, created_ms, ended_ms
    commit, versions, cpu, cores, system, command    the Git commit, packages, processor, its cores, system, and command
                                                     of the last sweep that trained the run

Its attributes (`DataFrame.attrs`) have the `--set` of the plan, if any, and when its claims were declared. Files of old
versions lack the last columns, and may lack the attributes.

The files may come from strangers. pyarrow reads them, which executes nothing that a file contains.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cope_sweep.config import Plan
from cope_sweep.config.keys import names_of
from cope_sweep.errors import NotFinishedError
from cope_sweep.records import RunRecord
from cope_sweep.store.artifacts import RUN_ID
from cope_sweep.store.index.tables import MAX_INTEGER, SECTIONS
from cope_sweep.store.reading import MAX_DEPTH
from cope_sweep.store.sweeps import SweepRecord, SweepRun

if TYPE_CHECKING:
    import pyarrow as pa

CURVES, HEADS = ".curves.parquet", ".heads.parquet"
"""Suffixes of the files beside a file of runs."""
LABEL, FACT = "label.", "facts."
"""Prefixes of columns."""
LINE_KEYS = ("run_id", "seed", "train.steps")
"""The columns that records and specs both need."""
SET = "set"
"""The attribute of a file of runs that has the values of `--set`."""
DECLARED = "declared"
"""The attribute of a file of runs that says when its claims were declared: identity → [time in ms, commit]."""
ATTRIBUTES = b"PANDAS_ATTRS"
"""The key of a Parquet file's metadata under which pandas keeps `DataFrame.attrs`."""
FIGURE_NAME = re.compile(r"[a-z]+(-[0-9]+)?")
"""Names of figures: a kind, or a kind with a number."""

LoggedValue = tuple[int, str, float, float | None]
"""Step, metric, value, and the seconds since the run's first start, if they are known."""


class Declaration(NamedTuple):
    """When an ablation file contained a claim, at the latest."""

    time_ms: int
    """Start of the first sweep whose file has it, or time of the commit, in ms since 1970."""
    commit: str
    """The Git commit; may be empty."""


Declarations = dict[str, Declaration]
"""Identity of a claim (`Claim.identity`) → its declaration."""


def is_results(folder: Path) -> bool:
    """Whether a folder has files of runs, and no run folders."""
    return not (folder / "runs").is_dir() and bool(run_files(folder))


def run_files(folder: Path) -> list[Path]:
    """The files of runs in a folder of results, sorted by name; none if there is no such folder."""
    return [path for path in sorted(folder.glob("*.parquet")) if not path.name.endswith((CURVES, HEADS))]


def file_name(plan: Plan) -> str:
    """The name of the file with the runs of a plan."""
    scale = plan.ablation.scale
    return f"{plan.name}.{scale}.parquet" if scale else f"{plan.name}.parquet"


class ResultsFile:
    """The runs of an ablation at a scale: a file of runs, and the files beside it. Each is read on first use.

    Every property raises NotFinishedError with the code `damaged_report`, which names a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        """Name the file of runs; nothing is read."""
        self.path = path
        self.ablation, _, scale = path.stem.partition(".")
        self.scale = scale or None

    @cached_property
    def _table(self) -> pa.Table:
        return _read(self.path)

    def _lines(self, *, of_spec: bool = False) -> list[dict[str, Any]]:
        """The lines, without missing values: the keys of the spec, or all else; `LINE_KEYS` in both.

        Not kept: as dictionaries they take ten times the memory of the table.
        """
        lines: list[dict[str, Any]] = [{} for _ in range(self._table.num_rows)]
        for name, column in zip(self._table.column_names, self._table.columns, strict=True):
            if name in LINE_KEYS or _is_of_spec(name) == of_spec:
                for line, value in zip(lines, _values(name, column), strict=True):
                    if value is not None and value == value:  # NaN, which equals nothing, is missing
                        line[name] = value
        return lines

    @cached_property
    def records(self) -> dict[str, RunRecord]:
        """Run id → record, without spec, in the plan's order."""
        with _damage_of(self.path):
            return {line["run_id"]: _record(line) for line in self._lines()}

    @cached_property
    def specs(self) -> dict[str, dict[str, Any]]:
        """Run id → the spec of the run."""
        with _damage_of(self.path):
            return {line["run_id"]: _spec(line) for line in self._lines(of_spec=True)}

    @cached_property
    def started(self) -> dict[str, RunRecord]:
        """Run id → record, of the runs that have started."""
        return {run_id: record for run_id, record in self.records.items() if record.status != "pending"}

    @property
    def is_read(self) -> bool:
        """The runs are in memory."""
        return "records" in vars(self)

    @cached_property
    def _attributes(self) -> dict[str, Any]:
        with _damage_of(self.path):
            attributes: dict[str, Any] = json.loads((self._table.schema.metadata or {}).get(ATTRIBUTES, b"{}"))
            return attributes

    @cached_property
    def declared(self) -> Declarations | None:
        """When the claims of the ablation were declared; None if the file does not say."""
        with _damage_of(self.path):
            kept = self._attributes.get(DECLARED)
            if kept is None:
                return None
            declarations = {claim: Declaration(int(time_ms), str(commit)) for claim, (time_ms, commit) in kept.items()}
            if any(abs(declaration.time_ms) > MAX_INTEGER for declaration in declarations.values()):
                raise ValueError(f"its attribute {DECLARED!r} has a time that no file can have")
            return declarations

    @cached_property
    def assignments(self) -> list[str]:
        """The values of `--set` of the plan."""
        with _damage_of(self.path):
            assignments = self._attributes.get(SET, [])
            if not isinstance(assignments, list) or not all(isinstance(text, str) for text in assignments):
                raise ValueError(f"its attribute {SET!r} is not a list of texts")
            return assignments

    @cached_property
    def _curves(self) -> tuple[pa.Table, dict[str, list[tuple[int, int]]]]:
        """The file of curves, and run id → the places of its lines: start and number of each block."""
        import pyarrow as pa
        from pyarrow import compute

        blocks: dict[str, list[tuple[int, int]]] = defaultdict(list)
        types = {"step": pa.int64(), "metric": pa.string(), "value": pa.float64(), "time_s": pa.float64()}
        path = self.path.with_suffix(CURVES)
        if not path.exists():
            return pa.table({name: pa.array([], kind) for name, kind in types.items()}), blocks
        table = _read(path)
        with _damage_of(path):
            columns = {name: table[name].cast(kind).combine_chunks() for name, kind in types.items()}
            run_ids = table["run_id"].to_pylist()
            if columns["step"].null_count or columns["metric"].null_count:
                raise ValueError("a value has no step or no metric")
            has_time = compute.less(compute.abs(columns["time_s"]), MAX_INTEGER / 1000)  # not so NaN
            if compute.any(compute.invert(has_time)).as_py():
                raise ValueError("a value has a time that no file can have")
        start = 0
        for run_id, group in groupby(run_ids):
            number = len(list(group))
            blocks[run_id].append((start, number))
            start += number
        columns["metric"] = columns["metric"].dictionary_encode()  # a few names, many times
        columns["value"] = compute.fill_null(columns["value"], math.nan)
        return pa.table(columns), blocks

    def curve(self, run_id: str) -> Iterator[LoggedValue]:
        """The logged values of a run by step; none without a file of curves."""
        table, blocks = self._curves
        for start, number in blocks.get(run_id, ()):
            columns = (column.to_pylist() for column in table.slice(start, number).columns)
            yield from zip(*columns, strict=True)

    @cached_property
    def heads(self) -> pa.Table | None:
        """The frame of `figures.marks.measure_run`; None without a file of heads."""
        path = self.path.with_suffix(HEADS)
        return _read(path) if path.exists() else None

    def picture(self, figure: str) -> bytes | None:
        """The SVG of a figure of the report; None if it has no such figure."""
        if not FIGURE_NAME.fullmatch(figure):  # a client's text, which must not lead out of the folder
            return None
        path = self.path.with_suffix(f".{figure}.svg")
        return path.read_bytes() if path.exists() else None

    @cached_property
    def sweeps(self) -> dict[str, SweepRecord]:
        """Sweep id → what the lines say about the sweep, of those that have trained these runs."""
        lines_of: dict[str, list[dict[str, Any]]] = defaultdict(list)
        with _damage_of(self.path):
            for line in self._lines():
                if "sweep_id" in line:
                    lines_of[line["sweep_id"]].append(line)
            return {sweep_id: self._sweep(sweep_id, lines) for sweep_id, lines in lines_of.items()}

    def _sweep(self, sweep_id: str, lines: Sequence[Mapping[str, Any]]) -> SweepRecord:
        line = lines[0]  # all have the same origin
        machine = {"cpu": line.get("cpu"), "cpus": line.get("cores"), "system": line.get("system")}
        return SweepRecord(
            sweep_id=sweep_id,
            ablation=self.ablation,
            title=self.ablation,
            hypothesis="",
            executor="",
            command=line.get("command", "").split(),
            status="finished",
            started_ms=min(line.get("created_ms", 0) for line in lines),
            ended_ms=max((line["ended_ms"] for line in lines if "ended_ms" in line), default=None),
            git_commit=line.get("commit"),
            versions=dict(text.split(" ", 1) for text in line.get("versions", "").split(", ") if " " in text),
            machine={name: value for name, value in machine.items() if value is not None},
            metrics=[],
            runs=[
                SweepRun(run_id=line["run_id"], row=line["row"], labels=_labels(line), seed=line["seed"])
                for line in lines
            ],
            reused=[],
        )


def _read(path: Path) -> pa.Table:
    from pyarrow import parquet  # not needed by a store of run folders

    with _damage_of(path):
        return parquet.read_table(path)


@contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """A block that reads what a file has. Raises NotFinishedError, which names the file, if it is not as expected."""
    try:
        yield
    # pyarrow's errors are of these types, too.
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        reason = f"missing: {error}" if isinstance(error, KeyError) else first_line
        raise NotFinishedError(
            f"{path}: not a file of results ({reason}); write it again with `cope-sweep report ABLATION --out DIR`",
            code="damaged_report",
            file=str(path),
        ) from error


def _is_of_spec(name: str) -> bool:
    """A column has a key of the spec, and is no metric."""
    return name.partition(".")[0] in SECTIONS and "/" not in name


def _values(name: str, column: pa.ChunkedArray) -> list[Any]:
    """The values of a column. Raises ValueError for one that the index cannot hold."""
    values: list[Any] = column.to_pylist()
    kinds = set(map(type, values))
    is_too_large = int in kinds and any(isinstance(value, int) and abs(value) > MAX_INTEGER for value in values)
    if is_too_large or not kinds <= {type(None), bool, int, float, str}:
        raise ValueError(f"{name}: neither a text nor a number")
    return values


def _labels(line: Mapping[str, Any]) -> dict[str, str]:
    return {name.removeprefix(LABEL): value for name, value in line.items() if name.startswith(LABEL)}


def _record(line: Mapping[str, Any]) -> RunRecord:
    if not RUN_ID.fullmatch(str(line["run_id"])):
        raise ValueError(f"{line['run_id']!r} is not a run id")
    facts = {name.removeprefix(FACT): value for name, value in line.items() if name.startswith(FACT)}
    return RunRecord(
        run_id=line["run_id"],
        status=line["status"],
        seed=line["seed"],
        step=facts.get("steps", 0),
        steps=line.get("train.steps", 0),
        attempt=int(line["status"] != "pending"),
        sweep_id=line.get("sweep_id"),
        metrics={name: value for name, value in line.items() if "/" in name},
        facts=facts,
        created_ms=line.get("created_ms"),
        ended_ms=line.get("ended_ms"),
    )


def _spec(line: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of a run from its values by dotted key. A list of numbers stays the text that the columns have."""
    spec: dict[str, Any] = {"seed": line["seed"], **{section: {} for section in SECTIONS}}
    fields: dict[str, dict[str, Any]] = defaultdict(dict)
    position = "model.position"
    for key, value in line.items():
        section, _, name = key.partition(".")
        if section not in SECTIONS or key == position:  # the line's own keys; kinds of encodings, which follow
            continue
        if key.startswith(f"{position}."):
            encoding, _, field = key.removeprefix(f"{position}.").partition(".")
            fields[encoding][field] = value
            continue
        inner = spec[section]
        *parents, last = name.split(".")
        if len(parents) > MAX_DEPTH:
            raise ValueError(f"{key[:MAX_DEPTH]}…: nested too deeply")
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    kinds = [kind for kind in str(line.get(position, "none")).split("+") if kind != "none"]
    names = names_of(kinds)
    spec["model"]["position"] = [{"kind": kind} | fields[name] for kind, name in zip(kinds, names, strict=True)]
    return spec
