"""A Ray dashboard that accepts jobs and runs none: it answers Ray's own client as a test says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, TypeVar

from tests.helpers.processes import http_server

VERSION = b'{"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""}'


@dataclass
class ScriptedCluster:
    """The jobs of a cluster."""

    url: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Id → what the dashboard tells of the job. Tests change `status`."""
    submitted: list[dict[str, Any]] = field(default_factory=list)
    """The requests to submit a job."""
    stopped: list[str] = field(default_factory=list)
    """The jobs that were asked to stop."""
    refuses: bool = False
    """Whether jobs are refused."""
    packages: dict[str, bytes] | None = None
    """Uploaded code by name; None: all code is there, so that nothing is uploaded."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        match method, path.removeprefix("/api/").split("/"):
            case "GET", ["version"]:
                return 200, VERSION
            case "GET", ["packages", *name] if self.packages is None or "/".join(name) in self.packages:
                return 200, b""
            case "PUT", ["packages", *name] if self.packages is not None:
                self.packages["/".join(name)] = body
                return 200, b""
            case "POST", ["jobs", ""]:
                request = json.loads(body)
                if self.refuses or request["submission_id"] in self.jobs:
                    return 500, b"refused"
                self.submitted.append(request)
                job_id = request["submission_id"]
                self.jobs[job_id] = {
                    "type": "SUBMISSION", "submission_id": job_id, "status": "RUNNING", "entrypoint": "",
                    "driver_exit_code": None, "message": "a message",
                }  # fmt: skip
                return 200, json.dumps({"job_id": job_id, "submission_id": job_id}).encode()
            case "POST", ["jobs", job_id, "stop"] if job_id in self.jobs:
                self.stopped.append(job_id)
                return 200, b'{"stopped": true}'
            case "GET", ["jobs", ""]:
                return 200, json.dumps(list(self.jobs.values())).encode()
            case "GET", ["jobs", job_id] if job_id in self.jobs:
                return 200, json.dumps(self.jobs[job_id]).encode()
        return 404, b"unknown"


C = TypeVar("C", bound=ScriptedCluster)


@contextmanager
def serving_jobs(cluster: C) -> Iterator[C]:
    """Serve the dashboard of a scripted cluster."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, answer = cluster.answer(self.command, self.path, body)
            self.send_response(code)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None: ...

    with http_server(Handler) as cluster.url:
        yield cluster


def scripted_cluster() -> AbstractContextManager[ScriptedCluster]:
    """A cluster without jobs, with its dashboard."""
    return serving_jobs(ScriptedCluster())
