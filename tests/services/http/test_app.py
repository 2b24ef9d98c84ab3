"""The application: health checks, web page and API documentation."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import get_args

import httpx
import pytest
from cope_services.http import errors
from cope_services.http.settings import load_settings

from cope_sweep.records import Status
from tests.api.test_questions import QUESTIONS
from tests.helpers.sample_store import API, SampleStore, serving


def test_health(client: httpx.Client) -> None:
    assert client.get("/health/live").json() == {"status": "live"}
    assert client.get("/health/ready").json() == {"status": "ready"}


def test_not_ready_without_the_folder_of_ablations(own_sample: SampleStore) -> None:
    with serving(own_sample.settings()) as client:
        shutil.rmtree(own_sample.ablations)
        response = client.get("/health/ready")
        assert response.status_code == 503
        assert response.json()["code"] == "not_ready"


def test_a_missing_store_has_no_runs(sample: SampleStore) -> None:
    with serving(sample.settings(store=sample.store_folder / "none")) as client:
        assert client.get("/health/ready").status_code == 200
        assert client.get(f"{API}/runs").json()["total"] == 0
        assert client.get(f"{API}/ablations/tiny").json()["counts"] == {"pending": 4}
        assert client.get(f"{API}/ablations/tiny/table").json()["complete"] is False


@pytest.mark.parametrize("status", get_args(Status))
def test_the_page_has_a_sign_and_a_colour_for_every_status(client: httpx.Client, status: str) -> None:
    assert f' {status}: "' in client.get("/static/status.js").text.partition("SIGNS = {")[2].partition("}")[0]
    assert f"--{status}: light-dark(" in client.get("/static/style.css").text
    style = client.get("/static/parts.css").text
    assert f".{status} {{ background: var(--{status}); fill: var(--{status}); }}" in style


def test_the_api_documentation_has_every_endpoint_and_its_errors(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    paths = document["paths"]
    assert len(paths.keys() - {API + question.PATH for question in QUESTIONS}) == 23
    for path in ("/runs", "/runs/export", "/diff", "/curves"):  # an invalid ablation file, a row that is not finished
        assert "409" in paths[API + path]["get"]["responses"], path
    problem = document["components"]["schemas"]["ProblemDetails"]
    assert {"title", "status", "detail", "code"} <= set(problem["required"])
    for path, operations in paths.items():
        for operation in operations.values():
            if path.startswith(API):
                assert {"404", "422", "500"} < set(operation["responses"])
                for status, response in operation["responses"].items():
                    if status >= "400":
                        assert list(response["content"]) == ["application/problem+json"]
                        schema = response["content"]["application/problem+json"]["schema"]
                        assert schema["$ref"] == "#/components/schemas/ProblemDetails"
                assert ("requestBody" in operation) == ("415" in operation["responses"])
            elif path.startswith(("/v1", "/openai", "/token", "/detok")):
                schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
                assert schema["$ref"].endswith("/OpenAIError")
                assert "422" not in operation["responses"]


# -- settings from arguments and the environment -----------------------------------------------------------------------


def test_arguments_have_priority_over_the_environment(sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ABLATIONS": str(sample.ablations), "STORE": "none", "PORT": "1", "MAX_TOKENS": "5"}.items():
        monkeypatch.setenv(f"COPE_SWEEP_{name}", value)
    settings = load_settings(port=2)
    assert (settings.ablations, settings.store) == (sample.ablations, "none")
    assert (settings.port, settings.max_tokens, settings.max_inferences) == (2, 5, 0)
    assert load_settings().port == 1
    assert 1 <= settings.inferences() <= 4
    assert load_settings(max_inferences=9).inferences() == 9


# -- messages name files of the service, not where they are on its machine ---------------------------------------------


def test_folders_of_the_service_are_named_without_those_above(sample: SampleStore, tmp_path: Path) -> None:
    (tmp_path / "real" / "ablations").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    shown = sample.settings(ablations=tmp_path / "link" / "ablations", store=tmp_path / "store").hide_folders
    assert shown(f"{tmp_path}/link/ablations/a.yaml:3: model: wrong") == "ablations/a.yaml:3: model: wrong"
    assert shown(f"{tmp_path}/real/ablations/a.yaml: wrong") == "ablations/a.yaml: wrong"
    assert shown(f"no run in the store {tmp_path}/store") == "no run in the store store"
    assert shown("/etc/passwd and ablations/a.yaml") == "/etc/passwd and ablations/a.yaml"
    at_the_root = sample.settings(store="/store").hide_folders
    assert at_the_root("the store /store/x and https://host/store") == "the store /store/x and https://host/store"


def test_no_answer_tells_where_the_files_are(client: httpx.Client, sample: SampleStore) -> None:
    asked = ["/ablations", "/ablations/broken", "/ablations/broken/table", "/ablations/none", "/runs/" + "0" * 16]
    asked += ["/sweeps/20260101-000000-none", "/runs?sweep=none", f"/diff?left={sample.ids[0]}&right=none"]
    texts = {path: client.get(API + path).text for path in asked}
    assert "ablations/broken.yaml:3" in texts["/ablations/broken"]
    assert "metricz" in texts["/ablations/broken/table"]
    assert [path for path, text in texts.items() if str(sample.root) in text] == []


# -- docs/reference/rest.md documents every error code, and its examples are requests that the service has --------------


REFERENCE = (Path(__file__).parents[3] / "docs/reference/rest.md").read_text(encoding="utf-8")


def test_every_error_code() -> None:
    listed = {
        (int(status), code)
        for status, codes in re.findall(r"\| (\d{3}) \| (.*?) \|", REFERENCE)
        for code in re.findall(r"`(\w+)`", codes)
    }
    own = {(cls.status, cls.default_code) for cls in errors.HttpError.__subclasses__()}
    assert own | {(status, cls.default_code) for cls, status in errors.USER_ERRORS.items()} <= listed


def test_every_example_uses_a_documented_path(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    patterns = [re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path)) for path in paths]
    examples = re.findall(r"\$B(/[^\s\"'?]*)", REFERENCE)
    assert len(examples) >= 8
    for example in examples:
        assert any(re.fullmatch(pattern, f"/api/v1{example}") for pattern in patterns), example
