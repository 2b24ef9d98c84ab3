"""Runs the services of deploy/compose.yaml as processes of this machine, with the commands and settings of that file.

Names of services become 127.0.0.1, each with a free port; `/data` and `/run/secrets` become folders. PostgreSQL is
that of pgserver, the object store moto's server, which keeps objects in memory: `stop` copies them out, and `start`
back in. Proxy, Prometheus and Grafana are left out.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import time
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import boto3
import psutil
from cope_services.keys import KeysFile
from ruamel.yaml import YAML

from tests.sweep.ports import free_port
from tests.sweep.runs import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # XDG_RUNTIME_DIR is not set in containers
    import pgserver

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
PASSWORD, TOKEN = "0123456789abcdef", "a" * 64
BUCKET = "cope-sweep"
AGENT_TIMEOUT_S = 240


class Composition:
    """The services, in `folder`, which keeps their data."""

    def __init__(self, folder: Path, ablations: Path) -> None:
        self.folder, self.ablations = folder, ablations
        self.services: dict[str, Any] = YAML(typ="safe", pure=True).load((DEPLOY / "compose.yaml").read_text())[
            "services"
        ]
        names = ("postgres:5432", "objects:8333", "mlflow:5000", "service:8000", "ray-head:6379", "ray-head:8265")
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        self.objects: dict[str, bytes] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("secrets", "data", "home", "r"):
            (folder / name).mkdir()
        (folder / "secrets" / "postgres_password").write_text(PASSWORD)
        (folder / "secrets" / "ray_token").write_text(TOKEN)
        self.key = KeysFile(folder / "secrets" / "api_keys").create("test", ["read", "submit"])
        credentials = "[default]\naws_access_key_id = key\naws_secret_access_key = secret\n"
        (folder / "secrets" / "aws_credentials").write_text(credentials)

    def url(self, name: str) -> str:
        return f"http://{self.addresses[name]}"

    def local(self, text: str) -> str:
        """A setting of the file, for this machine."""
        for name, address in self.addresses.items():
            port = name.split(":")[1]
            text = text.replace(name, address).replace(f"--port={port}", f"--port={address.split(':')[1]}")
            text = text.replace(f"--dashboard-port={port}", f"--dashboard-port={address.split(':')[1]}")
            if text == port:
                text = address.split(":")[1]
        text = text.replace("/run/secrets", str(self.folder / "secrets")).replace("0.0.0.0", "127.0.0.1")
        text = text.replace("--metrics-export-port=8080", f"--metrics-export-port={free_port()}")
        text = text.replace("/make_bucket.py", str(DEPLOY / "compose" / "make_bucket.py"))
        text = text.replace("${WORKER_CPUS:-2}", "1").replace("${MLFLOW_HOST:-mlflow.localhost}", "mlflow.localhost")
        text = text.replace("${SERVICE_HOST:-localhost}", "localhost")
        return text.replace("/data/", f"{self.folder}/data/")

    def environment(self, name: str) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("COPE_SWEEP", "MLFLOW", "RAY", "AWS"))
        }
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        return kept | {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'services'}",
            "PYTHONPYCACHEPREFIX": f"/tmp/cope-sweep-pycache-{os.getuid()}",  # compiled once, not by every process
            "PYTHONUNBUFFERED": "1",
            "HOME": str(self.folder / "home"),
            "RAY_TMPDIR": str(self.folder / "r"),
            "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "300",  # on a busy machine, 30 s are too short
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "POSTGRES_HOST": self.addresses["postgres:5432"],
            "POSTGRES_PASSWORD_FILE": str(self.folder / "secrets" / "postgres_password"),
            "COPE_SWEEP_ABLATIONS": str(self.ablations),
            **{key: self.local(value) for key, value in self.services[name].get("environment", {}).items()},
        }

    def command(self, name: str, *more: str) -> list[str]:
        words = [self.local(word) for word in self.services[name]["command"]]
        return ["sh", str(DEPLOY / "compose" / "with-secrets.sh"), *words, *more]

    def run(self, name: str, words: list[str], limit_s: float = 280) -> subprocess.CompletedProcess[str]:
        """A command with the settings of a service, as `docker compose exec` gives them."""
        command = ["sh", str(DEPLOY / "compose" / "with-secrets.sh"), *words]
        done = subprocess.run(
            command, env=self.environment(name), cwd=self.folder, capture_output=True, text=True, timeout=limit_s
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def submit_job(self, words: list[str]) -> str:
        """`ray job submit`, repeated until the head has its agent, which starts after the dashboard; the output."""
        submit = ["ray", "job", "submit", "--address", self.url("ray-head:8265"), "--"]
        until = time.monotonic() + AGENT_TIMEOUT_S
        while True:
            try:
                return self.run("ray-head", [*submit, *words]).stdout
            except AssertionError as error:
                if "No available agent" not in str(error) or time.monotonic() > until:
                    raise

    def start(self) -> None:
        """Start every part as soon as it can start, and wait until it answers."""
        agent = [f"--dashboard-agent-listen-port={free_port()}"]
        head = self.command("ray-head", *agent, f"--ray-client-server-port={free_port()}")
        self._spawn("ray-head", head, self.environment("ray-head"))
        self.start_stores("service")
        self._wait("ray-head", f"{self.url('ray-head:8265')}/api/version", {"Authorization": f"Bearer {TOKEN}"})
        agent = [f"--dashboard-agent-listen-port={free_port()}"]
        self._spawn("ray-worker", self.command("ray-worker", *agent), self.environment("ray-worker"))
        self.wait_for_mlflow()
        self._wait("service", f"{self.url('service:8000')}/health/ready")

    def start_stores(self, *more: str) -> None:
        """Start PostgreSQL, the object store, MLflow, and `more` that needs them; do not wait for MLflow and `more`."""
        port = self.addresses["objects:8333"].split(":")[1]
        self._spawn("objects", [str(BIN / "moto_server"), "--host", "127.0.0.1", "--port", port], {})
        self._start_postgres()
        for name in ("mlflow", *more):
            self._spawn(name, self.command(name), self.environment(name))
        self._wait("objects", f"{self.url('objects:8333')}/moto-api/")
        self.run("bucket", [self.local(word) for word in self.services["bucket"]["command"]])
        self._restore_objects()

    def wait_for_mlflow(self) -> None:
        self._wait("mlflow", f"{self.url('mlflow:5000')}/health")

    def stop(self) -> None:
        """End everything, as `docker compose stop` does: SIGTERM, then SIGKILL."""
        self._save_objects()
        self.kill()
        self._pg_ctl("-m", "fast", "stop")

    def kill(self) -> None:
        """End the processes, and what they started."""
        family = []
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                family += psutil.Process(process.pid).children(recursive=True)
            process.terminate()
        _, alive = psutil.wait_procs(
            [psutil.Process(each.pid) for each in self.processes.values() if each.poll() is None], 10
        )
        for each in [*alive, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        for process in self.processes.values():
            process.wait()
        self.processes.clear()

    def remove(self) -> None:
        self.kill()
        with contextlib.suppress(subprocess.CalledProcessError):
            self._pg_ctl("-m", "immediate", "stop")
        shutil.rmtree(self.folder, ignore_errors=True)

    def client(self) -> Any:
        """A client of the object store."""
        return boto3.client(
            "s3", endpoint_url=self.url("objects:8333"), region_name="us-east-1",
            aws_access_key_id="key", aws_secret_access_key="secret",
        )  # fmt: skip

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def postgres_url(self, database: str) -> str:
        return f"postgresql://cope:{PASSWORD}@{self.addresses['postgres:5432']}/{database}"

    def psql(self, tool: str, *words: str) -> str:
        """A program of PostgreSQL: psql, pg_dump, pg_restore. Returns its output."""
        command = [pgserver._commands.POSTGRES_BIN_PATH / tool, *words]
        return subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE, text=True).stdout

    def _spawn(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=environment or None, cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def _wait(self, name: str, url: str, headers: dict[str, str] | None = None) -> None:
        def answers() -> bool:
            assert self.processes[name].poll() is None, self.log(name)[-3000:]
            try:
                with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=10):
                    return True
            except OSError:
                return False

        wait_until(answers)

    def _start_postgres(self) -> None:
        data = self.folder / "postgres"
        if not data.exists():
            data.mkdir()
            if os.geteuid() == 0:  # PostgreSQL refuses to run as root
                from pgserver.utils import ensure_prefix_permissions, ensure_user_exists

                ensure_user_exists("pgserver")
                ensure_prefix_permissions(data)
                os.chown(data, pwd.getpwnam("pgserver").pw_uid, pwd.getpwnam("pgserver").pw_gid)
                os.chmod(self.folder / "secrets", 0o755)
            words = [
                "-U",
                "cope",
                "--auth=scram-sha-256",
                f"--pwfile={self.folder}/secrets/postgres_password",
                "--no-sync",
            ]
            pgserver._commands.initdb(words, pgdata=data, **self._postgres_user())
            self._pg_ctl(*self._postgres_options(), "start")
            self.psql("psql", self.postgres_url("postgres"), "-q", "-c", "CREATE DATABASE cope_sweep")
            self.psql("psql", self.postgres_url("cope_sweep"), "-q", "-f", str(DEPLOY / "compose" / "databases.sql"))
        else:
            self._pg_ctl(*self._postgres_options(), "start")

    def _postgres_options(self) -> list[str]:
        port = self.addresses["postgres:5432"].split(":")[1]
        data = self.folder / "postgres"
        return ["-w", "-t", "120", "-l", str(data / "log"), "-o", f"-h 127.0.0.1 -p {port} -k {data} -F"]

    def _postgres_user(self) -> dict[str, str]:
        return {"user": "pgserver"} if os.geteuid() == 0 else {}

    def _pg_ctl(self, *words: str) -> None:
        pgserver._commands.pg_ctl(list(words), pgdata=self.folder / "postgres", **self._postgres_user())

    def _save_objects(self) -> None:
        client = self.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for each in page.get("Contents", []):
                self.objects[each["Key"]] = client.get_object(Bucket=BUCKET, Key=each["Key"])["Body"].read()

    def _restore_objects(self) -> None:
        client = self.client()
        for key, content in self.objects.items():
            client.put_object(Bucket=BUCKET, Key=key, Body=content)
