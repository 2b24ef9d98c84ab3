"""The runs of a report as a Parquet file, and back.

One line per run of the plan, finished or not, in the plan's order:

    run_id, status, row, seed
    label.<axis key>, …        the label of the axis value; missing if the row has none
    <key of the spec>, …       `task.kind`, `model.layers`, `model.position` ("cope+rope"), …
    <metric>, …                of finished runs: `in_dist/token_error`
    facts.<name>, …            of finished runs: parameters, durations, device, versions of Python and torch
    sweep_id, created_ms, ended_ms
    commit, versions, cpu      of the sweep that trained it last: the Git commit, the packages, the processor

Names of hosts and processes are left out, and so are the messages of failed runs, which may name folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cope_sweep.config import Plan
from cope_sweep.read.tables.frame import frame_of_records
from cope_sweep.store import RunRecord, SweepRecord
from cope_sweep.store.index.model import flatten

if TYPE_CHECKING:
    import pandas as pd

CURVES = ".curves.parquet"
"""Suffix of a second file, with the learning curves: run_id, row, seed, step, metric and value of each logged value."""
LEFT_OUT = ("message", "facts.host", "facts.worker_id")
LABEL, FACT = "label.", "facts."
TIMES = ("created_ms", "ended_ms")


def run_frame(
    plan: Plan, records: Mapping[str, RunRecord], sweeps: Mapping[str, SweepRecord] = MappingProxyType({})
) -> pd.DataFrame:
    """The frame; the module describes it. `records` has every run of the plan, `sweeps` those that trained them."""
    import pandas as pd

    results = frame_of_records(plan, records)
    results = results.drop(columns=[name for name in LEFT_OUT if name in results])
    labels = results.rename(columns={key: LABEL + key for key in plan.axes})
    head = ["run_id", "status", "row", "seed", *(LABEL + key for key in plan.axes)]
    ordered = [run for row in plan.rows for run in row.runs]
    specs = [dict(flatten(run.model_dump(mode="json", exclude={"seed"}))) for run in ordered]
    keys = dict.fromkeys(key for spec in specs for key in spec)
    config = pd.DataFrame({key: _column([spec.get(key) for spec in specs]) for key in keys})
    own = [records[run.run_id] for run in ordered]
    places: dict[str, Any] = {"sweep_id": pd.Series([each.sweep_id for each in own], dtype="str")}
    places |= {name: pd.Series([getattr(each, name) for each in own], dtype="Int64") for name in TIMES}
    trained = [sweeps.get(each.sweep_id or "") for each in own]
    places |= {
        "commit": pd.Series([each and each.git_commit for each in trained], dtype="str"),
        "versions": pd.Series([each and _versions(each) for each in trained], dtype="str"),
        "cpu": pd.Series([each and each.machine.get("cpu") for each in trained], dtype="str"),
    }
    others = labels.drop(columns=[*head, *(key for key in keys if key in labels)])
    return pd.concat([labels[head], config, others, pd.DataFrame(places)], axis=1)


def _versions(sweep: SweepRecord) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(sweep.versions.items()))


def to_parquet(frame: pd.DataFrame) -> bytes:
    """The content of a Parquet file."""
    content: bytes = frame.to_parquet(None, engine="pyarrow", index=False, compression="zstd")
    return content


def run_files(folder: Path, pattern: str = "*") -> list[Path]:
    """The files of runs in a folder of reports, by name."""
    return [path for path in sorted(folder.glob(f"{pattern}.parquet")) if not path.name.endswith(CURVES)]


def read_records(path: Path) -> dict[str, RunRecord]:
    """Run id → record, from a file of `to_parquet`: status, seed, metrics and facts. Raises OSError."""
    import pandas as pd

    frame = pd.read_parquet(path)
    names = [name for name in frame.columns if "/" in name]
    facts = [name for name in frame.columns if name.startswith(FACT)]
    return {
        line["run_id"]: RunRecord(
            line["run_id"],
            line["status"],
            seed=int(line["seed"]),
            sweep_id=_known(line["sweep_id"]),
            metrics={name: float(line[name]) for name in names if not pd.isna(line[name])},
            facts={name.removeprefix(FACT): _known(line[name]) for name in facts if not pd.isna(line[name])},
            **{name: _known(line[name]) for name in TIMES},
        )
        for line in frame.to_dict("records")
    }


def _known(value: Any) -> Any:
    import pandas as pd

    return None if pd.isna(value) else value


def _column(values: list[Any]) -> pd.Series[Any]:
    import pandas as pd

    types = {type(value) for value in values if value is not None}
    dtype = "boolean" if types == {bool} else "Int64" if types == {int} else "Float64"
    if types <= {int, float} or types == {bool}:
        return pd.Series(values, dtype=dtype)
    return pd.Series([None if value is None else str(value) for value in values], dtype="str")
