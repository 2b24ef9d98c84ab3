"""Probes over REST agree with the library, have limits, and answer invalid requests with clear errors."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
from cope_services.http import settings
from cope_services.models import probing

from cope_sweep.inference import Predictor
from cope_sweep.inference.probe import head_statistics, loads_of_heads, probe
from tests.helpers.sample_store import API, SampleStore, serving
from tests.services.prose_store import ProseStore

IDS = [1, 14, 14, 2, 3, 14, 15, 15]


def ask(client: httpx.Client, run_id: str, tokens: Any = IDS, status: int = 200, **more: Any) -> Any:
    response = client.post(f"{API}/runs/{run_id}/probe", json={"tokens": tokens} | more)
    assert response.status_code == status, response.text
    return response.json()


def square(rows: list[list[float]]) -> np.ndarray:
    """The matrix with its lower triangle."""
    matrix = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        assert len(row) == i + 1
        matrix[i, : i + 1] = row
    return matrix


def test_the_values_are_those_of_the_library(client: httpx.Client, sample: SampleStore) -> None:
    predictor = Predictor.load(sample.store.run(sample.ids[0]).checkpoint, "cpu")
    answer = ask(client, sample.ids[0])
    [layer] = probe(predictor, IDS).layers
    marks = predictor.run.task.marks(np.array(IDS))
    assert answer["run_id"] == sample.ids[0]
    assert answer["labels"] == ["1", "_", "_", "2", "3", "_", ">", ">"]
    for row, (answered, head) in enumerate(
        zip(answer["heads"], head_statistics(predictor, [IDS], [marks]), strict=True)
    ):
        assert (answered["layer"], answered["head"]) == (0, row)
        [cope] = answered["encodings"]
        close(cope["gates"], layer.contextual["cope"].gates_HTT[row])
        close(cope["positions"], layer.contextual["cope"].positions_HTT[row])
        close(cope["scores"], layer.scores_HTT["cope"][row])
        assert layer.position_only_attention_HTT is not None
        close(answered["position_only_attention"], layer.position_only_attention_HTT[row])
        close(answered["attention"], layer.attention_HTT[row])
        assert (cope["kind"], cope["limit"], cope["clamped"]) == ("cope", 63, 0)
        assert (cope["position_mean"], cope["position_max"]) == (head.position_mean, head.position_max)
        assert cope["marks"] == {name: vars(found) for name, found in head.marks.items()}


def close(rows: list[list[float]], matrix_TT: np.ndarray) -> None:
    np.testing.assert_allclose(square(rows), matrix_TT, atol=1e-6)


def test_only_the_requested_matrices(client: httpx.Client, sample: SampleStore) -> None:
    [head] = ask(client, sample.ids[0], heads=[1], layers=[0], matrices=["gates"])["heads"]
    assert head["head"] == 1
    assert set(head) == {"layer", "head", "encodings"}
    assert "gates" in head["encodings"][0]
    assert "scores" not in head["encodings"][0]
    [head] = ask(client, sample.ids[0], heads=[0], matrices=[], marks={"own": [0, 3]})["heads"]
    [cope] = head["encodings"]
    assert set(cope) == {"kind", "limit", "clamped", "position_mean", "position_max", "marks"}
    assert (cope["marks"]["own"]["tokens_on"], cope["marks"]["own"]["tokens_off"]) == (2, 6)


def test_loads_are_those_of_the_library(client: httpx.Client, sample: SampleStore) -> None:
    predictor = Predictor.load(sample.store.run(sample.ids[0]).checkpoint, "cpu")
    heads = ask(client, sample.ids[0], matrices=[], load=True)["heads"]
    for answered, expected in zip(heads, loads_of_heads(predictor, [IDS]), strict=True):
        [cope] = answered["encodings"]
        assert cope["load"]["load"] == pytest.approx(expected.load)
        assert cope["load"]["spans"] == [[tokens, pytest.approx(span)] for tokens, span in expected.spans]
    assert "load" not in ask(client, sample.ids[0], matrices=[])["heads"][0]["encodings"][0]


def test_a_model_without_gates_has_only_attention(client: httpx.Client, sample: SampleStore) -> None:
    heads = ask(client, sample.ids[1])["heads"]
    assert [(head["encodings"], head["position_only_attention"]) for head in heads] == [([], None)] * 2
    np.testing.assert_allclose(square(heads[0]["attention"]).sum(-1), 1, atol=1e-5)


def test_a_text_is_that_of_its_tokens(prose_client: httpx.Client, prose: ProseStore) -> None:
    text = "the cat is a species . \n the cat"
    predictor = prose.predictor(prose.cope[0])
    answer = ask(prose_client, prose.cope[0], None, text=text)
    tokens = predictor.text_tokens(text).tolist()
    assert answer["token_ids"] == tokens
    assert answer == ask(prose_client, prose.cope[0], tokens)
    assert answer["labels"][0] == "¶"  # the end-of-text token, as before each text in training
    assert "".join(answer["labels"][1:]) == text
    [cope] = answer["heads"][0]["encodings"]
    assert cope["marks"]["newline"]["tokens_on"] == 1


def test_labels_are_the_text_of_other_tasks(client: httpx.Client, sample: SampleStore) -> None:
    assert ask(client, sample.ids[0], None, text="1 _ _ 2 3 _ > >")["token_ids"] == IDS


def picture(client: httpx.Client, run_id: str, status: int = 200, **request: Any) -> httpx.Response:
    url, headers = f"{API}/runs/{run_id}/probe", request.pop("headers", {})
    response = client.post(url, params=request.pop("params", {}), json={"tokens": IDS} | request, headers=headers)
    assert response.status_code == status, response.text
    return response


def heatmaps(svg: bytes) -> list[str]:
    """The ids of the heatmaps in a drawing: row of the head, and column."""
    ids = [element.get("id", "") for element in ElementTree.fromstring(svg).iter()]
    return [each for each in ids if re.fullmatch(r"\d+-\d+", each)]


@pytest.mark.slow
def test_pictures_have_a_row_of_heatmaps_for_each_head(client: httpx.Client, sample: SampleStore) -> None:
    run_id = sample.ids[0]
    drawn = picture(client, run_id, headers={"accept": "image/svg+xml"})
    assert drawn.headers["content-type"] == "image/svg+xml"
    assert heatmaps(drawn.content) == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-1", "1-2", "1-3"]
    assert picture(client, run_id, params={"format": "svg"}).content == drawn.content
    one = picture(client, run_id, params={"format": "svg"}, heads=[1], matrices=["gates", "positions", "scores"])
    assert heatmaps(one.content) == ["0-0", "0-1"]
    assert b"Layer 0 \xc2\xb7 head 1" in one.content
    assert heatmaps(picture(client, sample.ids[1], params={"format": "svg"}).content) == ["0-0", "1-0"]  # attention
    png = picture(client, run_id, headers={"accept": "image/png;q=0.9, text/html;q=0.5"}, heads=[0], matrices=["gates"])
    assert png.headers["content-type"] == "image/png"
    assert png.content.startswith(b"\x89PNG")


def test_the_format_is_that_of_the_header_or_the_query(client: httpx.Client, sample: SampleStore) -> None:
    run_id = sample.ids[0]
    for accept in ("*/*", "application/json, image/png;q=0.5", "image/png;q=0, application/*"):
        answer = picture(client, run_id, headers={"accept": accept})
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["vary"].split(", ")[0] == "Accept"
    error = picture(client, run_id, 406, headers={"accept": "image/gif"}).json()
    assert error["code"] == "not_acceptable"
    assert picture(client, run_id, 422, params={"format": "gif"}).json()["code"] == "invalid_request"


def test_pictures_that_cannot_be_drawn(client: httpx.Client, sample: SampleStore, monkeypatch: Any) -> None:
    params = {"format": "svg"}
    error = picture(client, sample.ids[1], 422, params=params, matrices=["gates"]).json()
    assert (error["code"], error["data"]["matrices"]) == ("no_such_map", ["gates"])
    error = picture(client, sample.ids[0], 422, params=params, matrices=["scores"]).json()
    assert (error["code"], error["data"]["matrices"]) == ("no_such_map", ["scores"])
    monkeypatch.setattr(probing, "MAX_DRAWN_HEADS", 1)
    error = picture(client, sample.ids[0], 413, params=params).json()
    assert (error["code"], error["data"]) == ("too_large", {"heads": 2, "limit": 1})


def test_pictures_wait_for_a_slot_of_drawings(sample: SampleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "LIMITS", {**settings.LIMITS, "drawings": settings.Limit(0, 0, 5)})
    with serving(sample.settings()) as client:
        assert ask(client, sample.ids[0])["heads"]
        error = picture(client, sample.ids[0], 429, params={"format": "png"}).json()
    assert (error["code"], error["data"]["work"]) == ("too_many_requests", "drawings")


@pytest.mark.parametrize(
    ("body", "code", "data"),
    [
        ({"tokens": [10**300]}, "token_out_of_range", {"position": 0}),
        ({"layers": [1]}, "no_such_layer", {"value": 1, "largest": 0}),
        ({"matrices": ["keys"]}, "invalid_request", {"keys": ["body.matrices[0]"]}),
        ({"marks": {"x" * 101: [0]}}, "invalid_request", {}),
        ({"marks": {"own": [8]}}, "no_such_token", {"marks": "own", "value": 8, "largest": 7}),
        ({"text": "1 _"}, "invalid_request", {"keys": ["body"]}),
        ({"tokens": None}, "invalid_request", {"keys": ["body"]}),
        ({"tokens": None, "text": "hello"}, "unknown_label", {"label": "hello"}),
    ],
)
def test_invalid_requests(
    client: httpx.Client, sample: SampleStore, body: dict[str, Any], code: str, data: dict[str, Any]
) -> None:
    error = ask(client, sample.ids[0], status=422, **body)
    assert (error["code"], error["data"] | data) == (code, error["data"])
    assert len(error["detail"]) < 1000


def test_responses_are_limited(sample: SampleStore) -> None:
    values = 2 * 5 * 8 * 9 // 2  # heads, matrices, pairs
    with serving(sample.settings(max_probe_values=values, max_tokens=100)) as client:
        assert len(ask(client, sample.ids[0])["heads"]) == 2
        error = ask(client, sample.ids[0], [*IDS, 1], 413)
        assert (error["code"], error["data"]) == ("too_large", {"values": 450, "limit": 360})
        assert len(ask(client, sample.ids[0], [*IDS, 1], heads=[0])["heads"]) == 1
        assert ask(client, sample.ids[0], [1] * 101, 413)["data"] == {"tokens": 101, "limit": 100}
    with serving(sample.settings(max_probe_values=10**9)) as client:
        assert ask(client, sample.ids[1], [1] * 40, 422)["code"] == "too_long"
