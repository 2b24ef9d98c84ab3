"""Sweep records (`sweeps/<id>.json`): what a sweep executed, on which code and machine."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from cope_sweep.config.overrides import variant_of
from cope_sweep.frozen import Frozen
from cope_sweep.records import Status, SweepSummary
from cope_sweep.redaction import redacted_command, redacted_value
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.files import parse_json


class SweepRun(Frozen):
    """A run of a sweep, and its place in the ablation's table."""

    run_id: str
    row: str
    labels: dict[str, str]
    seed: int


class SweepRecord(Frozen):
    """One sweep. It is the content of `<store>/sweeps/<sweep_id>.json`."""

    sweep_id: str
    ablation: str
    title: str
    hypothesis: str
    file_text: str = ""
    """The ablation file."""
    data: dict[str, Any] = Field(default={})
    """Its content with what it inherits, before scale and `--set`: the store knows the ablation without the file.
    Empty in records of older versions."""
    executor: str
    command: Annotated[list[str], AfterValidator(redacted_command)]
    """Without secrets, also where an older version has recorded them."""
    scale: str | None = None
    sets: list[str] = Field(default=[])
    """`KEY=VALUE`, as after `--set`."""
    status: Status
    started_ms: int
    ended_ms: int | None = None
    git_commit: str | None = None
    versions: dict[str, str]
    machine: dict[str, Any]
    metrics: list[dict[str, Any]]
    """The columns of the table, as the ablation file declares them."""
    primary: str | None = None
    """The name of the primary metric; null: the first one."""
    runs: list[SweepRun]
    reused: list[str]
    """Ids of the runs that were finished before the sweep."""
    leave_out: list[Status] = Field(default=[])
    """Statuses of other runs that it does not train: `failed`, say. Empty in records of older versions."""
    notes: Annotated[list[str], AfterValidator(redacted_value)] = Field(default=[])
    """Notes for the user: nodes that were left out, a budget that was used up."""

    @property
    def summary(self) -> SweepSummary:
        """Its summary in the index."""
        fields = {"sweep_id", "ablation", "title", "scale", "status", "executor", "started_ms", "ended_ms"}
        same = self.model_dump(include=fields)
        return SweepSummary(**same, sets=variant_of(self.sets), runs=len(self.runs), reused=len(self.reused))


def parse_sweep(content: bytes, name: str) -> SweepRecord:
    """The record in `content`, the content of the file `name`. Raises DamagedError."""
    document = parse_json(content, name)
    for key in ("table", "mlflow"):  # records of older versions have the table at the end, and whether MLflow has it
        document.pop(key, None)
    try:
        return SweepRecord.model_validate(document)
    except ValidationError as error:
        problems = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
        reason = "; ".join(f"{key}: {message}" for key, message in problems[:3])
        keys = [key for key, _ in problems]
        raise DamagedError(f"{name}: not the record of a sweep ({reason})", file=str(name), keys=keys) from error


def sweep_members(record: SweepRecord) -> list[dict[str, Any]]:
    """The runs of a sweep as the index keeps them, in order."""
    reused = set(record.reused)
    return [{**run.model_dump(), "reused": run.run_id in reused} for run in record.runs]
