"""Requests that are generated from the OpenAPI document, valid and invalid ones: every answer is as it documents.

No answer is an error of the server, or has a status, a media type, a header or a body that the document does not have.
`COPE_OPENAPI_EXAMPLES=100` asks for more requests than the usual ones.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi import checks

from tests.services.sample_store import SampleStore

EXAMPLES = int(os.environ.get("COPE_OPENAPI_EXAMPLES", "6"))
"""Requests for each operation and mode."""
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_answers_are_as_documented(client: httpx.Client, sample: SampleStore, mode: GenerationMode) -> None:
    document = client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    statuses: Counter[int] = Counter()
    failures = []
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            try:
                _ask(
                    operation,
                    mode,
                    sample,
                    statuses,
                    base_url=str(client.base_url).rstrip("/"),
                    session=session,
                    timeout=120,
                )
            except Unsatisfiable:
                assert mode == GenerationMode.NEGATIVE  # an operation without parameters has no invalid requests
            except (AssertionError, BaseExceptionGroup) as failure:
                failures.append(f"{operation.label}: {_text(failure)}")
    print(f"{mode.value}: {statuses.total()} requests: {dict(sorted(statuses.items()))}")  # noqa: T201
    assert not failures, "\n\n".join(failures)
    assert statuses.total() >= len(document["paths"])
    if mode == GenerationMode.POSITIVE:
        assert statuses[200] > 0  # the generated requests do reach the runs of the store


def _ask(
    operation: APIOperation, mode: GenerationMode, sample: SampleStore, statuses: Counter[int], **call: Any
) -> None:
    real = {
        "run_id": sample.ids,
        "model": sample.ids,
        "name": ["tiny", "broken"],
        "ablation": ["tiny"],
        "file": ["model.safetensors"],
    }

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, 3), st.data())
    def ask(case: Case, choice: int, data: st.DataObject) -> None:
        if choice:  # most random ids are of nothing
            for name in case.path_parameters or {}:
                if name in real:
                    case.path_parameters[name] = data.draw(st.sampled_from(real[name]))
        response = case.call(**call)
        statuses[response.status_code] += 1
        if response.status_code == 400 and response.content == b"Invalid HTTP request received.":
            return  # no HTTP: uvicorn answers, the service never sees it
        # The service has no Ray cluster, which it says with a 503.
        no_cluster = response.status_code == 503 and response.json()["code"] == "no_cluster"
        case.validate_response(response, checks=CHECKS[1:] if no_cluster else CHECKS)

    ask()


def _text(failure: BaseException) -> str:
    if isinstance(failure, BaseExceptionGroup):
        return "\n".join(map(_text, failure.exceptions))
    return f"{type(failure).__name__}: {failure}"
