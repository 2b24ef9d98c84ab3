"""The models on Ray Serve, as `serve run` starts them: two replicas answer as the service does, and one may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cope_services.http.access import KeysFile
from cope_services.http.app import create_model_app
from cope_services.serve import AnnouncedModel
from ray import serve as ray_serve
from ruamel.yaml import YAML
from starlette.testclient import TestClient

from tests.deploy.test_kuberay import load_all
from tests.helpers.processes import free_port, until
from tests.helpers.sample_store import API, serving
from tests.services.prose_store import ProseStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TEXT = "the cat is a species of European lobster"


@dataclass(frozen=True)
class Serve:
    """The process of `serve run`, and its address and key."""

    process: psutil.Process
    url: str
    key: str

    def replicas(self) -> list[psutil.Process]:
        """The processes of the model replicas."""
        found = []
        for each in self.process.children(recursive=True):
            try:
                if "ServeReplica:models:models" in " ".join(each.cmdline()):
                    found.append(each)
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def serve(prose: ProseStore) -> Iterator[Serve]:
    # Ray's sockets are below this folder, and the path of a socket may have 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="sv", dir="/tmp"))
    for name in ("r", "home"):
        (folder / name).mkdir()
    keys = KeysFile(folder / "keys.txt")
    key = keys.create("reader")
    [manifest] = load_all((ROOT / "deploy" / "kuberay" / "models" / "rayservice.yaml").read_text())
    config = YAML(typ="safe", pure=True).load(manifest["spec"]["serveConfigV2"])
    port = free_port()
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    [application] = config["applications"]
    application["args"] |= {"min_replicas": 2, "max_replicas": 2, "cpus": 0}
    YAML(typ="safe", pure=True).dump(config, folder / "config.yaml")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("COPE_SWEEP", "RAY", "PYTHONDONTWRITE"))}
    environment = kept | {
        "HOME": str(folder / "home"),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "services"))),
        "PYTHONPYCACHEPREFIX": f"{tempfile.gettempdir()}/cope-sweep-pycache-{os.getuid()}",
        "RAY_TMPDIR": str(folder / "r"),
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": "300",  # on a busy machine, 30 s are too short
        "COPE_SWEEP_STORE": str(prose.store_folder),
        "COPE_SWEEP_ABLATIONS": str(prose.ablations),
        "COPE_SWEEP_KEYS_FILE": str(keys.path),
        "COPE_SWEEP_CACHE": str(prose.root / "cache"),
        "COPE_SWEEP_DEVICE": "cpu",
        "COPE_SWEEP_MAX_QUEUE_TOKENS": str(1 << 22),  # one replica can take all requests of these tests
    }
    command = [str(Path(sys.executable).parent / "serve"), "run", "--address", "local", str(folder / "config.yaml")]
    url = f"http://127.0.0.1:{port}"
    try:
        with (folder / "log").open("w") as log:
            started = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
        with ending(started):
            until(lambda: started.poll() is not None or is_ready(url, key), timeout_s=600)
            assert started.poll() is None, (folder / "log").read_text()[-3000:]
            yield Serve(psutil.Process(started.pid), url, key)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ending(started: subprocess.Popen[bytes]) -> Iterator[None]:
    """At the end of the block, end the process and what it has started."""
    try:
        yield
    finally:
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(started.pid).children(recursive=True)
        for each in [started, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        started.wait()


def is_ready(url: str, key: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", headers=bearer(key), timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


REQUESTS: dict[str, tuple[str, str, Any]] = {
    "perplexity": ("POST", f"{API}/perplexity", {"models": ["COPE"], "text": TEXT, "log_probabilities": True, "top": 2}),
    "several models": ("POST", f"{API}/perplexity", {"models": ["COPE", {"ablation": "prose", "row": "Absolute"}], "text": [TEXT, "a"]}),
    "completion": ("POST", "/v1/completions", {"model": "COPE", "prompt": TEXT[:7], "max_tokens": 6, "seed": 3, "logprobs": 2}),
    "completion in the path": ("POST", "/openai/COPE/v1/completions", {"prompt": [1, 2], "max_tokens": 4, "temperature": 0, "echo": True}),
    "completion of a row": ("POST", "/v1/completions", {"model": "prose/Absolute", "prompt": TEXT[:7], "max_tokens": 4, "temperature": 0}),
    "probe": ("POST", f"{API}/runs/COPE/probe", {"tokens": [3, 14, 0, 14], "matrices": ["gates"]}),
    "tokenize": ("POST", "/tokenize", {"model": "COPE", "prompt": TEXT}),
    "models": ("GET", "/v1/models", None),
    "one model": ("GET", "/v1/models/COPE", None),
    "tokenizer": ("GET", "/tokenizer_info?model=COPE", None),
    "unknown run": ("POST", f"{API}/perplexity", {"models": ["0123456789abcdef"], "text": TEXT}),
    "unknown model": ("POST", "/v1/completions", {"model": "0123456789abcdef", "prompt": TEXT}),
    "invalid": ("POST", f"{API}/perplexity", {"models": ["COPE"], "tokens": [[1]]}),
    "invalid completion": ("POST", "/v1/completions", {"model": "COPE", "prompt": TEXT, "n": 0}),
    "too large": ("POST", f"{API}/perplexity", {"models": ["COPE"], "text": "a" * (1 << 20)}),
    "method": ("GET", f"{API}/perplexity", None),
}  # fmt: skip


def answer(client: httpx.Client, name: str, run_id: str) -> tuple[int, str | None, Any]:
    """Status, media type and content, without what differs from answer to answer."""
    method, path, body = REQUESTS[name]
    if body is not None:
        body = {k: [run_id if e == "COPE" else e for e in v] if isinstance(v, list) else v for k, v in body.items()}
        body = {k: run_id if v == "COPE" else v for k, v in body.items()}
    response = client.request(method, path.replace("COPE", run_id), json=body)
    media = response.headers.get("content-type")
    content = response.json()
    for key in ("id", "created"):
        content.pop(key, None) if content.get("object") == "text_completion" else None
    return response.status_code, media, content


def test_serve_answers_as_the_service_does(serve: Serve, prose: ProseStore) -> None:
    with serving(prose.settings()) as service, httpx.Client(base_url=serve.url, timeout=120) as client:
        client.headers.update(bearer(serve.key))
        for name in REQUESTS:
            expected = answer(service, name, prose.cope[0])
            assert answer(client, name, prose.cope[0]) == expected, name


def test_keys_and_hosts_are_checked(serve: Serve, prose: ProseStore) -> None:
    path, body = f"{serve.url}{API}/perplexity", {"models": [prose.cope[0]], "tokens": [[1, 2]]}
    assert httpx.post(path, json=body).status_code == 401
    assert httpx.post(path, json=body, headers=bearer("cope_wrong")).status_code == 401
    assert httpx.post(path, json=body, headers=bearer(serve.key) | {"Host": "x.example"}).status_code == 421
    for run_id, status in ((prose.cope[0], 200), ("0123456789abcdef", 404)):
        with_model = bearer(serve.key) | {"serve_multiplexed_model_id": run_id}
        named = body | {"models": [run_id]}
        assert httpx.post(path, json=named, headers=with_model, timeout=60).status_code == status
    assert httpx.get(f"{serve.url}/-/healthz").text == "success"  # Serve's own, for load balancers


def test_a_refused_request_loads_no_model(prose: ProseStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeysFile(tmp_path / "keys.txt")
    service = create_model_app(prose.settings(keys_file=keys.path))
    loaded: list[str] = []

    async def load(run_id: str) -> str:
        await service.components.predictor(run_id)
        loaded.append(run_id)
        if len(loaded) > 1:
            await asyncio.sleep(60)
        return run_id

    service.add_middleware(AnnouncedModel, load=load)
    monkeypatch.setattr("cope_services.serve.LOADING_S", 0.5)
    monkeypatch.setattr(ray_serve, "get_multiplexed_model_id", lambda: prose.cope[0])  # of the request's header
    client = TestClient(service, "http://localhost")
    valid = bearer(keys.create("reader"))
    refused = {421: valid | {"Host": "evil.example"}, 401: {}, 403: {"Sec-Fetch-Site": "cross-site"}}
    for status, headers in refused.items():
        assert client.get("/v1/models", headers=headers).status_code == status
    assert client.get("/static/style.css").status_code == 404  # this path needs no key
    assert service.components.predictors.loads == 0
    assert client.get("/v1/models", headers=valid).status_code == 200
    assert client.get("/v1/models", headers=valid).status_code == 200  # although its model takes too long
    assert loaded == [prose.cope[0]] * 2


@pytest.mark.thorough
def test_clients_repeat_requests_that_a_killed_replica_was_answering(serve: Serve, prose: ProseStore) -> None:
    """One of the two replicas is killed while both compute: its requests get a 5xx, and are answered when repeated."""
    runs = [*prose.cope, *prose.absolute]
    body = {"tokens": [[(7 * position) % 300 for position in range(3000)]], "context": 16, "stride": 1}

    def computing() -> psutil.Process | None:
        percent, replica = max(((each.cpu_percent(0.2), each) for each in serve.replicas()), key=lambda each: each[0])
        return replica if percent > 20 else None

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=serve.url, headers=bearer(serve.key), timeout=300) as client:

            async def ask(run_id: str) -> list[httpx.Response]:
                responses = [await client.post(f"{API}/perplexity", json=body | {"models": [run_id]})]
                while responses[-1].status_code >= 500 and len(responses) < 20:
                    await asyncio.sleep(1)
                    responses.append(await client.post(f"{API}/perplexity", json=body | {"models": [run_id]}))
                return responses

            requests = [asyncio.create_task(ask(runs[number % len(runs)])) for number in range(24)]
            # The last answers may come with the first: a replica is killed before.
            while (busy := await asyncio.to_thread(computing)) is None:
                pass
            busy.kill()
            assert not all(each.done() for each in requests)
            return [(await each)[-1] for each in requests]

    assert len(serve.replicas()) == 2
    responses = asyncio.run(ask_all())
    assert [each.status_code for each in responses] == [200] * 24
    answers = [each.json()["results"][0] for each in responses]
    for number, answer in enumerate(answers):
        assert answer["run_id"] == runs[number % len(runs)]
        assert answer["total"] == answers[number % len(runs)]["total"]
    until(lambda: len(serve.replicas()) == 2)  # Serve has started another one
