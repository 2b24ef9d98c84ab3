"""A sweep as a Ray job: this working tree is sent to the cluster, and `cope-sweep` runs there, beside the workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cope_sweep.sweep.cluster import first_line, listens
from cope_sweep.sweep.executor import INTERRUPT_S, ClusterError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

EXCLUDES = (
    ".git/", ".venv/", "venv/", ".uv/", "node_modules/", "dist/", "build/", "*.egg-info/",
    "__pycache__/", ".*_cache/", ".hypothesis/", "/store/", "/mlruns/", "*.db", "*.db-*", "*.log",
)  # fmt: skip
"""What is not sent, as .gitignore says it: what is large, and what changes while it is packed, which fails the job."""
POLL_S = 0.5
AGENT_S = 20.0
"""For a cluster that was started just now to be able to run jobs."""
STOP_S = 2 * INTERRUPT_S
"""For a stopped job to checkpoint its runs, before Ray kills it."""
ENDS = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class JobOutcome:
    """What became of a job."""

    job_id: str
    status: str
    """SUBMITTED (not followed), SUCCEEDED, FAILED or STOPPED."""
    exit_code: int
    """The sweep's own: 0 all finished, 1 some failed, 2 bad input, 130 stopped."""
    message: str | None = None
    """Why Ray could not run it."""


def submit(
    arguments: Sequence[str],
    *,
    address: str,
    working_dir: Path,
    follow: bool = True,
    on_line: Callable[[str], None] = lambda line: None,
    token: str | None = None,
    excludes: Sequence[str] = (),
) -> JobOutcome:
    """Run `cope-sweep ARGUMENTS` as a job of the cluster whose dashboard is at `address`, and pass its log on by lines.

    `token` defaults to Ray's own: RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token. `excludes` are
    patterns, as in .gitignore, of what else is not to be sent. Ctrl-C while following stops the job, which checkpoints
    its runs first: the outcome then has the exit code 130. Without `follow`, returns as soon as the job is accepted.

    Raises ClusterError where nothing answers at `address`, where that is no dashboard, where the token is missing or
    wrong, and where the working tree is too large to be sent.
    """
    if not (working_dir / "cope_sweep").is_dir():
        raise ClusterError(f"{working_dir.absolute()} is not a checkout of this project: there is no cope_sweep/ in it")
    client = _client(address, token)
    job_id = _submit(client, arguments, working_dir.absolute(), [*EXCLUDES, *excludes])
    if not follow:
        return JobOutcome(job_id, "SUBMITTED", 0)
    try:
        _follow(client, job_id, on_line)
        return _outcome(client, job_id)
    except KeyboardInterrupt:
        on_line(f"stopping job {job_id}: it checkpoints its runs, and ends")
        with contextlib.suppress(RuntimeError):
            client.stop_job(job_id)
        until = time.monotonic() + STOP_S
        while client.get_job_status(job_id) not in ENDS and time.monotonic() < until:
            time.sleep(POLL_S)
        return JobOutcome(job_id, str(client.get_job_status(job_id).value), 130)


def _client(address: str, token: str | None) -> JobSubmissionClient:
    """A client that is let in. Raises ClusterError."""
    url = address if "://" in address else f"http://{address}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClusterError(f"{address} is not the address of a Ray dashboard, as http://HOST:8265 is")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if (silence := listens(parts.hostname, port)) is not None:
        raise ClusterError(
            f"no Ray dashboard answers at {address} ({silence}): start a cluster with `ray start --head`, "
            "and see the port that it prints (8265, if it is free)"
        )
    # The client takes the environment's word over its argument's.
    overridden = {
        name: os.environ.pop(name) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS") if name in os.environ
    }
    try:
        from ray.job_submission import JobSubmissionClient

        token = token or _own_token()
        return JobSubmissionClient(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    except Exception as error:
        raise _explained(error, address, token) from error
    finally:
        os.environ.update(overridden)


def _own_token() -> str | None:
    """The token that Ray's own tools use, wherever they find it; unlike theirs, it needs no RAY_AUTH_MODE=token."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _explained(error: Exception, address: str, token: str | None) -> ClusterError:
    text = str(error)
    if type(error).__name__ == "AuthenticationError" or "401" in text or "403" in text:
        what = "does not accept the token" if token else "asks for a token"
        return ClusterError(
            f"the cluster at {address} {what}: put its own (`ray get-auth-token`, on its head node) into "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )
    if type(error).__name__ == "JSONDecodeError" or "404" in text or "Jobs API is not supported" in text:
        return ClusterError(f"what answers at {address} is no Ray dashboard; `ray start --head` prints the right port")
    return ClusterError(f"the cluster at {address}: {first_line(error)}")


def _submit(client: JobSubmissionClient, arguments: Sequence[str], working_dir: Path, excludes: list[str]) -> str:
    runtime_env: dict[str, Any] = {
        "working_dir": str(working_dir),
        "excludes": excludes,
        "env_vars": {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": str(int(STOP_S))},
    }
    until = time.monotonic() + AGENT_S
    while True:
        try:
            return str(client.submit_job(entrypoint=entrypoint(arguments), runtime_env=runtime_env))
        except ValueError as error:
            raise ClusterError(
                f"{working_dir} cannot be sent: {first_line(error)}; .rayignore leaves things out"
            ) from error
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > until:
                raise ClusterError(f"the cluster refused the job: {first_line(error)}") from error
        time.sleep(POLL_S)


def entrypoint(arguments: Sequence[str]) -> str:
    """The job's shell command. On a node that has it (this machine's), the interpreter of this environment runs it."""
    here = shlex.quote(sys.executable)
    return f"P={here}; [ -x $P ] || P=python; exec $P -m cope_sweep.cli {shlex.join(arguments)}"


def _follow(client: JobSubmissionClient, job_id: str, on_line: Callable[[str], None]) -> None:
    """Pass the log on until the job ends. A connection that breaks is taken up again where it broke."""
    heard = 0
    rest = ""

    def hear(text: str) -> None:
        nonlocal heard, rest
        heard += len(text)
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            on_line(line)

    async def tail() -> None:
        skip = heard
        async for chunk in client.tail_job_logs(job_id):
            fresh, skip = chunk[skip:], max(0, skip - len(chunk))
            if fresh:
                hear(fresh)

    while True:
        with contextlib.suppress(OSError, RuntimeError):
            asyncio.run(tail())
        if client.get_job_status(job_id) in ENDS:
            break
        time.sleep(POLL_S)
    with contextlib.suppress(OSError, RuntimeError):
        hear(client.get_job_logs(job_id)[heard:])
    if rest:
        on_line(rest)


def _outcome(client: JobSubmissionClient, job_id: str) -> JobOutcome:
    info = client.get_job_info(job_id)
    status = str(info.status.value)
    if status == "SUCCEEDED":
        return JobOutcome(job_id, status, 0)
    if status == "STOPPED":
        return JobOutcome(job_id, status, 130)
    message = None if info.driver_exit_code else info.message
    return JobOutcome(job_id, status, info.driver_exit_code or 1, message)
