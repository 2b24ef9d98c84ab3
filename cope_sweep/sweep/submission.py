"""Submits a sweep to a cluster: the record and what is to be run go into the store, and a job executes them.

`cope-sweep submit` and the REST service use `submit_sweep`. The job is `cope-sweep run --submission SWEEP`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cope_sweep.plan import Plan, expand
from cope_sweep.queries import recorded_plan
from cope_sweep.queries.progress import ACTIVE
from cope_sweep.spec import LoadedAblation, SpecError, with_overrides
from cope_sweep.spec.ablation import validate
from cope_sweep.spec.inherit import with_inherited
from cope_sweep.spec.source import Source, parse_source, source_of
from cope_sweep.store import Status, Store, Submission, read_submission, write_submission
from cope_sweep.sweep.record import ended_record, initial_record, new_sweep_id

if TYPE_CHECKING:
    from cope_sweep.sweep.submit import JobOutcome


@dataclass(frozen=True)
class Cluster:
    """Where and how jobs are started."""

    address: str
    """Of the dashboard."""
    working_dir: Path
    """The checkout of this project that is sent."""
    excludes: Sequence[str] = ()
    """Patterns, as in .gitignore, of files that are not sent."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of jobs."""
    token: str | None = None
    """The cluster's token; None: that of Ray's own settings."""


def package_cluster(address: str, environment: Mapping[str, str]) -> Cluster:
    """A cluster to which only the installed package cope_sweep is sent, not the folder in which this process runs."""
    return Cluster(address, Path(__file__).resolve().parents[2], ("/*", "!/.", "!/cope_sweep"), environment)


def parsed_spec(spec: str | Mapping[str, object], name: str, folder: Path | None) -> LoadedAblation:
    """The ablation in a text or a mapping that came from outside. It is validated as a file is, and may name no plugin.

    Args:
        spec: The text of an ablation file, or the same as a mapping.
        name: The ablation's name.
        folder: The only folder of files that it may inherit from; None: it may not inherit.

    Raises SpecError.
    """
    source = parse_source(spec, name) if isinstance(spec, str) else source_of(dict(spec), name)
    return validate(source, name, folder=folder, allow_plugins=False)


def check_paths(plan: Plan, allowed: Plan | None = None) -> None:
    """Raise SpecError where a run names a folder or a file of this machine, unless a run of `allowed` names it too."""
    known = set(_paths(allowed)) if allowed is not None else set()
    for key, value in _paths(plan):
        if (key, value) not in known:
            raise SpecError(
                f"{plan.name}: {key}: {value!r} names a place on the machines that train; name a corpus that the "
                "operator has put into $COPE_SWEEP_DATA, and remove the key"
            )


def _paths(plan: Plan) -> Iterator[tuple[str, str]]:
    """Key and value of what names places, of each distinct task of the plan."""
    seen = {id(run.task): run.task for row in (*plan.rows, *plan.examples) for run in row.runs}
    for task in seen.values():
        for name in task.NON_IDENTITY_FIELDS:
            if (value := getattr(task, name)) is not None:
                yield f"task.{name}", str(value)


def new_submission(
    loaded: LoadedAblation, *, file_text: str, scale: str | None, sets: Sequence[str], **options: object
) -> Submission:
    """What a job needs to execute an ablation at a scale with the values of `--set`.

    Args:
        loaded: The ablation before scale and `sets`.
        file_text: The text of its file.
        scale: The scale.
        sets: `KEY=VALUE`.
        options: Other fields of a Submission.
    """
    source = loaded.source
    if source.data.get("inherit") is not None and not source.parents:
        source = with_inherited(source, Path(source.name).parent)
    data = {key: value for key, value in source.data.items() if key != "inherit"}
    return Submission.model_validate(
        {
            "sweep_id": new_sweep_id(),
            "submitted_ms": int(time.time() * 1000),
            "ablation": loaded.name,
            "data": data,
            "file_text": file_text,
            "scale": scale,
            "sets": list(sets),
            **options,
        }
    )


def submitted_plan(submission: Submission) -> Plan:
    """The plan of a submission, with its scale and the values of `--set`. Raises SpecError."""
    loaded = validate(Source(submission.ablation, dict(submission.data)), submission.ablation)
    return expand(with_overrides(loaded, scale=submission.scale, assignments=submission.sets))


def submit_sweep(
    submission: Submission,
    plan: Plan,
    store: Store,
    cluster: Cluster,
    *,
    follow: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
) -> JobOutcome:
    """Write the record of a sweep to the store and start the job that executes it; the job has the id of the sweep.

    Args:
        submission: What is to be executed.
        plan: Its plan.
        store: The store, which this machine and the cluster share.
        cluster: Where to start the job.
        follow: Whether to wait for the job's end.
        on_line: Called with every line of the job's log.

    Raises:
        ClusterError: The cluster cannot be used. If it answered at first, the sweep is recorded as failed.
        StoreError: The store cannot be written.
    """
    check_cluster(cluster)  # before anything is written
    record_submission(submission, plan, store)
    return start_submission(submission, store, cluster, follow=follow, on_line=on_line)


def check_cluster(cluster: Cluster) -> None:
    """Raise ClusterError where the cluster does not answer, or there is nothing to send to it."""
    from cope_sweep.sweep.submit import check  # imports ray

    check(cluster.address, cluster.working_dir, cluster.token)


def record_submission(submission: Submission, plan: Plan, store: Store) -> None:
    """Write a submission and the record of its sweep, which is pending, to the store. Raises StoreError."""
    plan = recorded_plan(plan, store)
    statuses = store.index.statuses(run.run_id for run in plan.runs)
    reused = [run.run_id for run in plan.runs if statuses.get(run.run_id) == "finished"]
    record = initial_record(plan, reused, "ray", submission.file_text, submission)
    write_submission(store, submission)
    store.write_sweep(record.model_copy(update={"status": "pending"}))


def start_submission(
    submission: Submission,
    store: Store,
    cluster: Cluster,
    *,
    follow: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
) -> JobOutcome:
    """Start the job of a recorded submission. Raises ClusterError, after the sweep was recorded as failed."""
    arguments = ["run", "--submission", submission.sweep_id, "--store", store.location]
    with failing(store, submission.sweep_id):
        outcome = submit_job(arguments, cluster, follow=follow, on_line=on_line, job_id=submission.sweep_id)
    if follow:
        settle_submission(store, submission.sweep_id, outcome.message)
    return outcome


def submit_job(
    arguments: Sequence[str],
    cluster: Cluster,
    *,
    follow: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
    job_id: str | None = None,
) -> JobOutcome:
    """Run `cope-sweep ARGUMENTS` as a job: `submit.submit`. Raises ClusterError."""
    from cope_sweep.sweep.submit import submit  # imports ray

    return submit(
        arguments,
        address=cluster.address,
        working_dir=cluster.working_dir,
        excludes=cluster.excludes,
        environment=cluster.environment,
        token=cluster.token,
        follow=follow,
        on_line=on_line,
        job_id=job_id,
    )


@contextlib.contextmanager
def failing(store: Store, sweep_id: str) -> Iterator[None]:
    """Where the block raises before the sweep has begun, record the sweep as failed, with the reason."""
    try:
        yield
    except BaseException as error:
        text = " ".join(str(error).split()) or type(error).__name__
        with contextlib.suppress(Exception):  # the error of the block matters more
            end_submission(store, sweep_id, f"the sweep did not begin: {text}", ("pending",))
        raise


def settle_submission(store: Store, sweep_id: str, message: str | None) -> None:
    """Record the end of a sweep whose job has ended without recording it."""
    reason = message or "its log is in Ray's dashboard"
    end_submission(store, sweep_id, f"the job ended before the sweep did: {' '.join(reason.split())}", ACTIVE)


def end_submission(store: Store, sweep_id: str, note: str, statuses: Sequence[Status]) -> None:
    """Record that a sweep with one of these statuses is over: failed if it had not begun, else interrupted."""
    known, record = store.index.sweep(sweep_id), store.sweep(sweep_id)
    if known is None or record is None or known.status not in statuses:
        return
    status: Status = "failed" if known.status == "pending" else "interrupted"
    store.write_sweep(ended_record(record, status, [*record.notes, note]))
    store.forget_stop(sweep_id)


def retried(submission: Submission, request: str = "") -> Submission:
    """A submission that trains again what a submitted sweep has not finished."""
    changes = {
        "sweep_id": new_sweep_id(),
        "submitted_ms": int(time.time() * 1000),
        "retry_of": submission.sweep_id,
        "leave_out": [],
        "request": request,
    }
    return submission.model_copy(update=changes)


def job_submission(store: Store, sweep_id: str) -> tuple[Submission, Plan]:
    """What the job of a sweep has to execute. Raises NotFoundError, StoreError, SpecError."""
    submission = read_submission(store, sweep_id)
    return submission, submitted_plan(submission)
