"""`services/README.md` documents every endpoint, setting and error code of the service, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from cope_services.http import errors
from cope_services.http.settings import ENV_PREFIX, Settings

README = (Path(__file__).parents[2] / "services/README.md").read_text(encoding="utf-8")


def test_every_endpoint(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    endpoints = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(re.findall(r"`((?:GET|POST) /[^`]*)`", README)) == endpoints


def test_every_setting_with_its_default() -> None:
    rows = dict(re.findall(rf"\| `{ENV_PREFIX}(\w+)` \| `?([^`|]*?)`? \|", README))
    assert rows == {
        name.upper(): str(field.default).lower() if field.annotation is bool else str(field.default)
        for name, field in Settings.model_fields.items()
    }


def test_every_error_code() -> None:
    listed = {
        (int(status), code)
        for status, codes in re.findall(r"\| (\d{3}) \| (.*?) \|", README)
        for code in re.findall(r"`(\w+)`", codes)
    }
    classes = {(cls.status, cls.code) for cls in errors.ServiceError.__subclasses__()}
    assert classes | set(errors.USER_ERRORS.values()) <= listed


def test_every_example_uses_a_documented_path(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    patterns = [re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path)) for path in paths]
    examples = re.findall(r"\$B(/[^\s\"'?]*)", README)
    assert len(examples) >= 8
    for example in examples:
        assert any(re.fullmatch(pattern, f"/api/v1{example}") for pattern in patterns), example
