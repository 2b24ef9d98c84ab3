"""Sweeps as Ray jobs: this working tree is sent to a cluster, where `cope-sweep` runs beside the workers.

`record_submission` writes the record of a sweep and what is to be run into the store, which the cluster shares.
`start_submission` starts its job, `cope-sweep run --submission SWEEP`. The command `submit` and the service use both.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from cope_sweep.config import LoadedAblation, Plan, expand, with_overrides
from cope_sweep.config.loading import validate
from cope_sweep.config.rows import only_rows
from cope_sweep.config.source import Source, parse_source, source_of
from cope_sweep.errors import ClusterError
from cope_sweep.proxies import bypass_proxies_here, proxy_data, through_proxy
from cope_sweep.redaction import has_secrets, redacted, redacted_url, remember
from cope_sweep.store import ACTIVE, Status, Store, Submission, new_sweep_id, read_submission, write_submission
from cope_sweep.store.artifacts import short_message
from cope_sweep.store.provenance import git_commit
from cope_sweep.store.store import INDEX_VARIABLE, STORE_VARIABLE
from cope_sweep.sweep.net import CONNECT_TIMEOUT_S, connection_error, first_line, within
from cope_sweep.sweep.sweep import ended_record, initial_record

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

EXCLUDES = (
    ".git/", ".venv/", "venv/", ".uv/", "node_modules/", "dist/", "build/", "*.egg-info/",
    "__pycache__/", ".*_cache/", ".hypothesis/", "/store/", "/mlruns/", "*.db", "*.db-*", "*.log",
)  # fmt: skip
"""Patterns of files that are not sent, in the syntax of .gitignore: large files, and files that may change while they
are packed, which would make the job fail."""
POLL_INTERVAL_S = 0.5
LOG_CHARACTERS_PER_S = 1e6
"""Each answer has the whole log, so a long one is asked for less often."""
AGENT_TIMEOUT_S = 60.0
"""Time limit for a cluster that was just started to become able to run jobs. It takes 2 to 10 s on an idle machine."""
STOP_TIMEOUT_S = 180
"""Time limit for a stopped job to end by itself, after which Ray kills it. It writes checkpoints (15 s at most), ends
its worker groups (60 s at most), and records the sweep; all of it takes 3 s on an idle machine."""
KILL_TIMEOUT_S = 30.0
"""Time limit for Ray to kill a job after `STOP_TIMEOUT_S` and to record its status."""
STOP_SIGNAL_TIMEOUT_S = 15.0
"""Time limit for Ray to signal a job that has asked to be stopped. It takes less than 1 s on an idle machine."""
VARIABLES = {"--store": STORE_VARIABLE, "--index": INDEX_VARIABLE, "--mlflow": "MLFLOW_TRACKING_URI"}
"""Option with a URL → the environment variable that replaces it."""
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets this environment variable for the driver of a job: JSON, with the job's metadata."""
_HIDING = threading.Lock()
"""Variables of the environment belong to all threads, and the service makes clients in several."""
RAY_UPLOAD_LOGGERS = {
    "ray._private.runtime_env.packaging": logging.WARNING,  # a line for each .gitignore
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,
    "ray._private.runtime_env.working_dir": logging.ERROR,  # a warning that .git is left out
}
"""What logs 20 to 30 lines while Ray sends a checkout, and the level from which on they matter."""
ANSWER_TIMEOUT_S = 60.0
"""A dashboard counts as lost after it has not answered for this long."""

T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """The cluster on which jobs are started, and their environment."""

    address: str
    """Address of the dashboard."""
    working_dir: Path
    """The checkout of this project that is sent."""
    excludes: Sequence[str] = ()
    """Patterns, as in .gitignore, of files that are not sent."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of jobs."""


def package_cluster(address: str, environment: Mapping[str, str]) -> Cluster:
    """A cluster to which only the installed package cope_sweep is sent, not the folder in which this process runs."""
    return Cluster(address, Path(__file__).resolve().parents[2], ("/*", "!/.", "!/cope_sweep"), environment)


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job."""

    job_id: str
    status: str
    """SUBMITTED (not followed), SUCCEEDED, FAILED or STOPPED; RUNNING if it could not be stopped."""
    exit_code: int
    """The exit code of the sweep: 0 all runs finished, 1 some failed, 2 bad input, 130 stopped."""
    message: str | None = None
    """Why Ray could not run or stop the job."""

    @property
    def has_ended(self) -> bool:
        """Its process has ended, if it had started: nothing trains any more."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


# -- jobs --------------------------------------------------------------------------------------------------------------


def submit_job(
    arguments: Sequence[str],
    cluster: Cluster,
    *,
    follow: bool = True,
    on_line: Callable[[str], None] = lambda line: None,
    job_id: str | None = None,
    name: str | None = None,
) -> JobOutcome:
    """Run `cope-sweep ARGUMENTS` as a job on a cluster.

    Ctrl-C while following stops the job, which first writes the checkpoints of its runs. The outcome then has the exit
    code 130. A second Ctrl-C returns at once.

    Args:
        arguments: The arguments of `cope-sweep`.
        cluster: Where.
        follow: Wait for the job's end. Otherwise the call returns when the job is accepted.
        on_line: Called with every line of the job's log.
        job_id: The id of the job and its sweep; None: Ray chooses one. Where there is a job with this id, no other is
            started.
        name: What Ray's dashboard calls the job.

    Raises:
        ClusterError: Nothing answers at the address, it is not a Ray dashboard, the token is missing or wrong, the
            working tree is too large, or the dashboard stops answering.
    """
    client = check_cluster(cluster)
    job_id = _submit(client, arguments, cluster, job_id, name)
    if not follow:
        return JobOutcome(job_id, "SUBMITTED", 0)
    try:
        return _outcome(job_id, _follow(client, job_id, on_line))
    except KeyboardInterrupt:
        on_line(f"stopping job {job_id}; runs write checkpoints first")
        return _stop(client, job_id)


def check_cluster(cluster: Cluster) -> JobSubmissionClient:
    """A client of the cluster, to which the working tree can be sent. Raises ClusterError."""
    if not (cluster.working_dir / "cope_sweep").is_dir():
        folder = cluster.working_dir.absolute()
        raise ClusterError(
            f"{folder} is not a checkout of this project: there is no cope_sweep/ in it",
            code="no_checkout",
            file=str(folder),
        )
    return _client(cluster.address)


def _client(address: str) -> JobSubmissionClient:
    """A client that the dashboard accepts, with the token of Ray's own settings. Raises ClusterError."""
    url = address if "://" in address else f"http://{address}"
    remember(url)
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") else None
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # brackets, or a port that is no number: perhaps a password that was not escaped
        host = None
    address = redacted_url(address)
    if not host:
        raise ClusterError(
            f"{address} is not the address of a Ray dashboard; write it as http://HOST:8265",
            code="invalid_address",
            address=address,
        )
    bypass_proxies_here(url)
    proxy = through_proxy(url)
    # Behind a proxy, the cluster itself may be out of reach.
    if not proxy and (error := connection_error(host, port)) is not None:
        raise ClusterError(
            f"no Ray dashboard answers at {address} ({error}): start a cluster with `ray start --head` "
            "(and --dashboard-host=0.0.0.0, to reach it from other machines), and use the port that it prints",
            address=address,
        )
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    token = _ray_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with _without_address_variables():
            return within(CONNECT_TIMEOUT_S, lambda: JobSubmissionClient(url, headers=headers))
    except AuthenticationError as error:
        problem = "does not accept the token" if token else "asks for a token"
        raise ClusterError(
            f"the cluster at {address} {problem}: put its own (`ray get-auth-token`, on its head node) into "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token",
            code="wrong_token" if token else "no_token",
            address=address,
        ) from error
    except (ConnectionError, TimeoutError) as error:
        raise ClusterError(
            f"the Ray dashboard at {address} does not answer: {first_line(error)}{proxy}",
            address=address,
            **proxy_data(url),
        ) from error
    except Exception as error:
        # The client asks for Ray's version. Any other answer, or one that is not JSON, comes from another service.
        raise ClusterError(
            f"what answers at {address} is not a Ray dashboard ({first_line(error)}){proxy}; `ray start --head` prints "
            "the right port",
            code="not_a_dashboard",
            address=address,
            **proxy_data(url),
        ) from error


@contextlib.contextmanager
def _without_address_variables() -> Iterator[None]:
    """Hide the environment variables that the client prefers to its argument, from one thread at a time."""
    names = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
    with _HIDING:
        hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
        try:
            yield
        finally:
            os.environ.update(hidden)


def _ray_token() -> str | None:
    """The token that Ray's own tools use. Unlike with them, RAY_AUTH_MODE=token need not be set."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _submit(
    client: JobSubmissionClient, arguments: Sequence[str], cluster: Cluster, job_id: str | None, name: str | None
) -> str:
    """The id of the submitted job. Raises ClusterError."""
    working_dir = cluster.working_dir.absolute()
    runtime_env: dict[str, Any] = {
        "working_dir": str(working_dir),
        "excludes": [*cluster.excludes, *EXCLUDES],
        "env_vars": {**_environment(), **cluster.environment},
    }
    metadata = {"job_name": name} if name else {}  # Ray's dashboard shows it
    metadata |= {"sweep_id": job_id} if job_id else {}
    for logger, level in RAY_UPLOAD_LOGGERS.items():
        logging.getLogger(logger).setLevel(level)
    until = time.monotonic() + AGENT_TIMEOUT_S
    while True:
        try:
            job = client.submit_job(
                entrypoint=entrypoint(arguments), runtime_env=runtime_env, submission_id=job_id, metadata=metadata
            )
            return str(job)
        except ValueError as error:
            raise ClusterError(
                f"{working_dir} cannot be sent: {first_line(error)}; list files to leave out in .rayignore",
                code="not_sent",
                file=str(working_dir),
                reason=first_line(error),
            ) from error
        except RuntimeError as error:
            if job_id is not None:
                with contextlib.suppress(OSError, RuntimeError):
                    client.get_job_info(job_id)
                    return job_id  # an earlier request was accepted
            # Where the cluster's job agent is still starting, try again. Ray 2.60 raises a plain RuntimeError for every
            # refusal, without the HTTP status; its text is all there is.
            if "No available agent" not in str(error) or time.monotonic() > until:
                too_large = "413" in str(error) or "body size" in str(error)
                remedy = f"; list large files of {working_dir} in .rayignore" if too_large else ""
                raise ClusterError(
                    f"the cluster refused the job: {first_line(error)}{through_proxy(client.get_address())}{remedy}",
                    code="job_too_large" if too_large else "job_refused",
                    reason=first_line(error),
                    **proxy_data(client.get_address()),
                ) from error
        time.sleep(POLL_INTERVAL_S)


def job_outcome(address: str, job_id: str) -> JobOutcome | None:
    """The end of a job; its status is PENDING or RUNNING while it has not ended. None: no such job in the cluster.

    Raises ClusterError: the dashboard does not answer, or refuses the token.
    """
    client = _client(address)
    try:
        jobs = within(CONNECT_TIMEOUT_S, client.list_jobs)
    except (OSError, RuntimeError) as error:
        raise _dashboard_lost(client, job_id, error, f"does not say how job {job_id} has ended") from error
    return next((_outcome(job_id, job) for job in jobs if job.submission_id == job_id), None)


def stop_job(address: str, job_id: str) -> None:
    """Ask the cluster to stop a job; no effect on a job that has ended, or that it does not know.

    Raises ClusterError, like `job_outcome`.
    """
    with contextlib.suppress(OSError, RuntimeError):
        _client(address).stop_job(job_id)


def stop_own_job() -> None:
    """In the driver of a job: let Ray stop it, so that it ends as STOPPED; another exit code than 0 is FAILED.

    Has no effect in a process that is not a job, or where the dashboard does not answer.
    """
    job_id = json.loads(os.environ.get(JOB_VARIABLE) or "{}").get("metadata", {}).get("job_submission_id")
    if job_id is None:
        return
    from ray.job_submission import JobSubmissionClient

    signalled = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: signalled.set())
    with contextlib.suppress(Exception):
        # Of a job, RAY_ADDRESS is its own cluster, which knows its dashboard.
        within(CONNECT_TIMEOUT_S, lambda: JobSubmissionClient().stop_job(job_id))
        signalled.wait(STOP_SIGNAL_TIMEOUT_S)


def escaped_pattern(path: str) -> str:
    """The pattern of .gitignore that matches this path alone."""
    return re.sub(r"([\\*?\[\]!#\s])", r"\\\1", path)


def entrypoint(arguments: Sequence[str]) -> str:
    """The job's command: the Python of this process where the node has it, else the node's, as `_environment` says."""
    own = Path(sys.executable)
    python = own.with_name("python")  # the name that every environment has; some systems have `python3` alone
    return shlex.join([python.name if python.exists() else own.name, "-m", "cope_sweep.cli", *arguments])


def _environment() -> dict[str, str]:
    """The environment variables of every job.

    Ray starts workers with the `py_executable` of a runtime environment, but a job's command by a shell: PATH decides
    which Python that finds.
    """
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}${{PATH}}",  # Ray puts in the node's own
        "PYTHONUNBUFFERED": "1",
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_TIMEOUT_S),
    }


def _follow(client: JobSubmissionClient, job_id: str, on_line: Callable[[str], None]) -> JobDetails:
    """Report the lines of the log until the job ends. None is lost while the dashboard does not answer for a while.

    Ray's `tail_job_logs` needs asyncio, which takes Ctrl-C for itself, and starts anew after a lost connection.
    """
    reported = 0
    while True:
        details = _details(client, job_id)  # before the log: if the job has ended, its log is complete
        ended = details.status.is_terminal()
        log = _log(client, job_id, ANSWER_TIMEOUT_S if ended else 0.0)
        if ended and log is None:
            on_line(f"the rest of the log of job {job_id} cannot be read")
        log = log or ""
        end = len(log) if ended else log.rfind("\n") + 1
        if end > reported:
            for line in log[reported:end].removesuffix("\n").split("\n"):
                on_line(line)
            reported = end
        if ended:
            return details
        time.sleep(POLL_INTERVAL_S + reported / LOG_CHARACTERS_PER_S)


def _log(client: JobSubmissionClient, job_id: str, timeout_s: float) -> str | None:
    """The whole log of a job; None if the cluster has not answered for `timeout_s`."""
    with contextlib.suppress(OSError, RuntimeError):
        return _asked(lambda: client.get_job_logs(job_id), timeout_s)
    return None


def _details(client: JobSubmissionClient, job_id: str) -> JobDetails:
    """Details of a job. Raises ClusterError if the cluster has not answered for `ANSWER_TIMEOUT_S`."""
    try:
        return _asked(lambda: client.get_job_info(job_id), ANSWER_TIMEOUT_S)
    except (OSError, RuntimeError) as error:
        problem = f"has not answered for {ANSWER_TIMEOUT_S:.0f} s"
        remedy = f"; job {job_id} may still be running; `ray job status`, on a node of the cluster, says whether it is"
        raise _dashboard_lost(client, job_id, error, problem, remedy) from error


def _asked(request: Callable[[], T], timeout_s: float) -> T:
    """The answer to a request, which is repeated until the cluster answers; after `timeout_s` its error is raised."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            return request()
        except (OSError, RuntimeError):
            if time.monotonic() >= until:
                raise
        time.sleep(POLL_INTERVAL_S)


def _dashboard_lost(
    client: JobSubmissionClient, job_id: str, error: Exception, problem: str, remedy: str = ""
) -> ClusterError:
    url, reason = client.get_address(), first_line(error)
    address = redacted_url(url)
    return ClusterError(
        f"the Ray dashboard at {address} {problem}: {reason}{through_proxy(url)}{remedy}",
        code="dashboard_lost",
        address=address,
        job=job_id,
        reason=reason,
        **proxy_data(url),
    )


def _stop(client: JobSubmissionClient, job_id: str) -> JobOutcome:
    """Stop a job and wait for its end. The request is repeated until the cluster accepts it."""
    accepted = False
    until = time.monotonic() + STOP_TIMEOUT_S + KILL_TIMEOUT_S
    while not (status := _details(client, job_id).status).is_terminal() and time.monotonic() < until:
        if not accepted:
            # A busy cluster may refuse the first request.
            with contextlib.suppress(OSError, RuntimeError):
                client.stop_job(job_id)
                accepted = True
        time.sleep(POLL_INTERVAL_S)
    message = None if status.is_terminal() else f"the job was asked to stop and has not ended: ray job stop {job_id}"
    return JobOutcome(job_id, str(status.value), 130, message)


def _outcome(job_id: str, details: JobDetails) -> JobOutcome:
    status = str(details.status.value)
    if status == "SUCCEEDED":
        return JobOutcome(job_id, status, 0)
    if status == "STOPPED":
        return JobOutcome(job_id, status, 130)
    if not details.status.is_terminal():
        return JobOutcome(job_id, status, 0)
    # A job without an exit code did not run; the message says why.
    message = None if details.driver_exit_code else details.message
    return JobOutcome(job_id, status, details.driver_exit_code or 1, message)


# -- submissions -------------------------------------------------------------------------------------------------------


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


def new_submission(
    loaded: LoadedAblation,
    *,
    file_text: str,
    scale: str | None,
    sets: Sequence[str],
    sweep_id: str | None = None,
    **options: object,
) -> Submission:
    """A submission: all that a job needs to execute an ablation at a scale with the values of `--set`.

    Args:
        loaded: The ablation before scale and `sets`.
        file_text: The text of its file.
        scale: The scale.
        sets: `KEY=VALUE`.
        sweep_id: Its id; None: a new one.
        options: Other fields of a Submission.
    """
    return Submission.model_validate(
        {
            "sweep_id": sweep_id or new_sweep_id(),
            "submitted_ms": int(time.time() * 1000),
            "git_commit": git_commit(),
            "ablation": loaded.name,
            "data": loaded.data,
            "file_text": file_text,
            "scale": scale,
            "sets": list(sets),
            **options,
        }
    )


def submitted_plan(submission: Submission) -> Plan:
    """The plan of a submission, with its scale, the values of `--set`, and its rows. Raises UserError."""
    loaded = validate(Source(submission.ablation, dict(submission.data)), submission.ablation)
    plan = expand(with_overrides(loaded, scale=submission.scale, assignments=submission.sets))
    return only_rows(plan, submission.rows)


def record_submission(
    submission: Submission, plan: Plan, store: Store, *, is_known: Callable[[], bool] = lambda: False
) -> bool:
    """Write a submission and the record of its sweep, which is pending, to the store.

    Args:
        submission: The submission.
        plan: Its plan, with the rows that earlier sweeps have recorded.
        store: The store.
        is_known: Another process has recorded it. Asked while no other process can.

    Returns:
        False: `is_known` says so, and nothing was written. Raises StoreError.
    """
    statuses = store.index.statuses(run.run_id for run in plan.runs)
    reused = [run.run_id for run in plan.runs if statuses.get(run.run_id) == "finished"]
    skipped = {*plan.done_statuses, *submission.leave_out}
    record = initial_record(plan, reused, "ray", submission.file_text, submission, skipped)
    with store.adding_sweep(record.model_copy(update={"status": "pending"})) as add:
        if is_known():
            return False
        write_submission(store, submission)
        add()
    return True


def start_submission(
    submission: Submission,
    store: Store,
    cluster: Cluster,
    *,
    follow: bool = False,
    on_line: Callable[[str], None] = lambda line: None,
) -> JobOutcome:
    """Start the job of a recorded submission, which has the id of its sweep. For the arguments, see `submit_job`.

    Raises ClusterError, after the sweep was recorded as failed.
    """
    cluster, options = job_options(cluster, {"--store": store.location})
    arguments = ["run", "--submission", submission.sweep_id, *options]
    folder = cluster.working_dir.absolute()
    if store.root.is_relative_to(folder):  # the nodes share the store: it does not travel with the job
        excludes = [f"/{escaped_pattern(store.root.relative_to(folder).as_posix())}/", *cluster.excludes]
        cluster = replace(cluster, excludes=excludes)
    with failing(store, submission.sweep_id):
        outcome = submit_job(
            arguments, cluster, follow=follow, on_line=on_line, job_id=submission.sweep_id, name=submission.ablation
        )
    if follow and outcome.has_ended:
        settle_submission(store, submission.sweep_id, outcome.message)
    return outcome


def job_options(cluster: Cluster, urls: Mapping[str, str | None]) -> tuple[Cluster, list[str]]:
    """The cluster and the arguments for a job with these options: `--store`, `--index` and `--mlflow`.

    A URL with secrets goes into the environment of the job. Its command line can be seen by all users of the nodes, in
    Ray's dashboard and in its logs; the environment only by those whom Ray's API answers.
    """
    environment, arguments = dict(cluster.environment), list[str]()
    for option, url in urls.items():
        if url is not None and has_secrets(url):
            environment[VARIABLES[option]] = url
        elif url is not None:
            arguments += [option, url]
    return replace(cluster, environment=environment), arguments


@contextlib.contextmanager
def failing(store: Store, sweep_id: str) -> Iterator[None]:
    """Record the sweep as failed, with the reason, if the block raises before the sweep has started."""
    try:
        yield
    except BaseException as error:
        text = redacted(" ".join(str(error).split())) or type(error).__name__
        with contextlib.suppress(Exception):  # the error of the block matters more
            end_submission(store, sweep_id, f"the sweep did not start: {text}", ("pending",))
        raise


def settle_submission(store: Store, sweep_id: str, message: str | None) -> None:
    """Record the end of a sweep whose job has ended without recording it."""
    lines = [line.strip() for line in (message or "its log is in Ray's dashboard").splitlines() if line.strip()]
    # Of a traceback, the last line has the error.
    reason = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    end_submission(store, sweep_id, f"the job ended before the sweep did: {short_message(reason)}", ACTIVE)


def stop_sweep(store: Store, sweep_id: str) -> bool:
    """Ask a sweep to stop: its runs write checkpoints first. One that has not started ends at once.

    Returns:
        Whether it had not started. Its job, if there is one, executes it no more.
    """
    store.index.request_stop(sweep_id)
    return end_submission(store, sweep_id, "it was stopped before it had started", ("pending",), "interrupted")


def end_submission(
    store: Store, sweep_id: str, note: str, statuses: Sequence[Status], unstarted: Status = "failed"
) -> bool:
    """Record the end of a sweep whose record has one of these statuses: `unstarted` if it is pending, else interrupted.

    The index knows less: a running sweep whose lease has expired reads as interrupted there.

    Returns:
        Whether the record had one of them.
    """
    record = store.sweep(sweep_id)
    if record is None or record.status not in statuses:
        return False
    status: Status = unstarted if record.status == "pending" else "interrupted"
    store.write_sweep(ended_record(record, status, [*record.notes, note]))
    return True


def retried(submission: Submission, request: str = "") -> Submission:
    """A submission that trains again what a submitted sweep has not finished."""
    changes = {
        "sweep_id": new_sweep_id(),
        "submitted_ms": int(time.time() * 1000),
        "git_commit": git_commit(),
        "retry_of": submission.sweep_id,
        "leave_out": [],
        "request": request,
    }
    return submission.model_copy(update=changes)


def job_submission(store: Store, sweep_id: str) -> tuple[Submission, Plan]:
    """Submission and plan of a sweep that its job has to execute. Raises NotFoundError, StoreError, SpecError."""
    submission = read_submission(store, sweep_id)
    return submission, submitted_plan(submission)
