"""Submissions (`submissions/<sweep id>.json`): what a job executes. A job on any node finds it in the store."""

from __future__ import annotations

import json
import shlex
from typing import Any

from pydantic import Field, ValidationError

from cope_sweep.config.loading import option_words
from cope_sweep.errors import NotFoundError
from cope_sweep.records import SWEEP_ID, Budget, Status
from cope_sweep.store.errors import DamagedError
from cope_sweep.store.files import parse_json
from cope_sweep.store.store import Store


class Submission(Budget):
    """A submitted sweep."""

    sweep_id: str
    ablation: str
    """Its name."""
    typed: list[str] = Field(default=[])
    """How the command line that submitted it named it: name or path, and options. Empty: just the name."""
    data: dict[str, Any]
    """The content of the ablation file with what it inherits, before scale and `sets`."""
    file_text: str
    """The file as it was written, for the record of the sweep."""
    scale: str | None = None
    sets: list[str] = Field(default=[])
    """`KEY=VALUE`, as after `--set`."""
    rows: list[str] = Field(default=[])
    """Names of rows and conditions, as after `--rows`. Empty: all rows."""
    leave_out: list[Status] = Field(default=[])
    """Runs with these statuses are not trained."""
    mlflow: str | None = None
    """MLflow's address as the cluster sees it; null: the database in the store."""
    no_mlflow: bool = False
    retry_of: str | None = None
    """The sweep whose runs it trains again."""
    git_commit: str | None = None
    """The commit that was submitted. The job cannot tell: its code is sent without the Git repository."""
    submitted_ms: int
    request: str = ""
    """A digest of the request that submitted it, to recognise it when it is repeated; empty if it need not be."""

    @property
    def command(self) -> list[str]:
        """The command that trains the same runs, for the record of the sweep."""
        options = option_words(self.scale, self.sets, self.rows)
        return ["cope-sweep", "run", *(self.typed or [self.ablation]), *options]

    def __str__(self) -> str:
        return shlex.join(self.command)


def write_submission(store: Store, submission: Submission) -> None:
    """Write a submission to the store, atomically. Raises StoreError."""
    document = json.dumps(submission.model_dump(mode="json"), indent=1, allow_nan=False) + "\n"
    store.write(_name(submission.sweep_id), document.encode())


def read_submission(store: Store, sweep_id: str) -> Submission:
    """The submission of a sweep.

    Raises:
        NotFoundError: There is none.
        StoreError: It cannot be read.
    """
    content = store.read(_name(sweep_id)) if SWEEP_ID.fullmatch(sweep_id) else None
    if content is None:
        raise NotFoundError(
            f"no submission of a sweep {sweep_id[:40]!r} in the store {store.location}; a job needs the very store "
            "that the sweep was submitted with",
            sweep_id=sweep_id[:40],
            store=str(store.location),
        )
    name = f"{store.location}/{_name(sweep_id)}"
    try:
        return Submission.model_validate(parse_json(content, name))
    except ValidationError as error:
        raise DamagedError(f"{name}: not a submission ({error.errors()[0]['msg']})", file=name) from error


def _name(sweep_id: str) -> str:
    return f"submissions/{sweep_id}.json"
