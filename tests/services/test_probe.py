"""A probe over REST is the library's, within limits, and whatever else is sent is answered clearly."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from house import House, serving

from cope_sweep.inference import Predictor
from cope_sweep.model import load_model, save_model
from cope_sweep.probe import heads_of, probe

API = "/api/v1"
IDS = [1, 14, 14, 2, 3, 14, 15, 15]


def ask(client: httpx.Client, run_id: str, tokens: Any = IDS, status: int = 200, **more: Any) -> Any:
    response = client.post(f"{API}/runs/{run_id}/probe", json={"tokens": tokens} | more)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def whole(rows: list[list[float]]) -> np.ndarray:
    """The matrix, of its lower half."""
    matrix = np.zeros((len(rows), len(rows)))
    for i, row in enumerate(rows):
        assert len(row) == i + 1
        matrix[i, : i + 1] = row
    return matrix


def test_it_says_what_the_library_says(client: httpx.Client, house: House) -> None:
    predictor = Predictor.load(house.ledger.run(house.ids[0]).checkpoint, "cpu")
    answer = ask(client, house.ids[0])
    [layer] = probe(predictor, IDS).layers
    marks = predictor.run.task.marks(np.array(IDS))
    assert answer["run_id"] == house.ids[0]
    assert answer["labels"] == ["1", "_", "_", "2", "3", "_", ">", ">"]
    for row, (said, head) in enumerate(zip(answer["heads"], heads_of(predictor, [IDS], [marks]), strict=True)):
        assert (said["layer"], said["head"]) == (0, row)
        [cope] = said["encodings"]
        close(cope["gates"], layer.counted["cope"].gates_HTT[row])
        close(cope["positions"], layer.counted["cope"].positions_HTT[row])
        close(cope["scores"], layer.scores_HTT["cope"][row])
        close(said["alone"], layer.alone_HTT[row] if layer.alone_HTT is not None else np.zeros(0))
        close(said["attention"], layer.attention_HTT[row])
        assert (cope["kind"], cope["limit"], cope["clamped"]) == ("cope", 63, 0)
        assert (cope["position_mean"], cope["position_max"]) == (head.position_mean, head.position_max)
        assert cope["marks"] == {name: vars(found) for name, found in head.marks.items()}


def close(rows: list[list[float]], matrix_TT: np.ndarray) -> None:
    np.testing.assert_allclose(whole(rows), matrix_TT, atol=1e-6)


def test_only_what_is_asked_for(client: httpx.Client, house: House) -> None:
    [head] = ask(client, house.ids[0], heads=[1], layers=[0], matrices=["gates"])["heads"]
    assert head["head"] == 1
    assert set(head) == {"layer", "head", "encodings"}
    assert "gates" in head["encodings"][0]
    assert "scores" not in head["encodings"][0]
    [head] = ask(client, house.ids[0], heads=[0], matrices=[], marks={"mine": [0, 3]})["heads"]
    [cope] = head["encodings"]
    assert set(cope) == {"kind", "limit", "clamped", "position_mean", "position_max", "marks"}
    assert (cope["marks"]["mine"]["tokens_on"], cope["marks"]["mine"]["tokens_off"]) == (2, 6)


def test_a_model_without_gates_has_attention_and_none_of_position_alone(client: httpx.Client, house: House) -> None:
    heads = ask(client, house.ids[1])["heads"]
    assert [(head["encodings"], head["alone"]) for head in heads] == [([], None)] * 2
    np.testing.assert_allclose(whole(heads[0]["attention"]).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tokens": [1, 99]}, "the sequence, position 1: token id 99 is out of range"),
        ({"tokens": [10**300]}, "of more than 60 digits is out of range"),
        ({"tokens": []}, "body.tokens: list should have at least 1 item"),
        ({"tokens": [[1]]}, "body.tokens[0]: input should be a valid integer"),
        ({"tokens": [True]}, "body.tokens[0]: input should be a valid integer"),
        ({"layers": [1]}, "there is no layer 1: this model has layers 0 … 0"),
        ({"heads": [2]}, "there is no head 2: this model has heads 0 … 1"),
        ({"heads": [-1]}, "body.heads[0]: input should be greater than or equal to 0"),
        ({"matrices": ["keys"]}, "body.matrices[0]: input should be 'gates'"),
        ({"marks": {"mine": [8]}}, "marks.mine: there is no token 8: the sequence has tokens 0 … 7"),
        ({"marks": {str(i): [] for i in range(17)}}, "body.marks: dictionary should have at most 16 items"),
        ({"text": "hello"}, "body.text: extra inputs are not permitted"),
    ],
)
def test_bad_questions(client: httpx.Client, house: House, body: dict[str, Any], message: str) -> None:
    error = ask(client, house.ids[0], status=422, **body)
    assert message in error["message"]
    assert len(error["message"]) < 1000
    assert error["type"] == ("invalid_tokens" if "out of range" in message else "invalid_request")


def test_answers_are_bounded(house: House) -> None:
    values = 2 * 5 * 8 * 9 // 2  # heads, matrices, pairs
    with serving(house.settings(max_probe_values=values, max_tokens=100)) as client:
        assert len(ask(client, house.ids[0])["heads"]) == 2
        error = ask(client, house.ids[0], [*IDS, 1], 413)
        assert error["type"] == "too_large"
        assert "9 tokens, 1 layers and 2 heads have 450 numbers; 360 are the most" in error["message"]
        assert len(ask(client, house.ids[0], [*IDS, 1], heads=[0])["heads"]) == 1
        assert "101 tokens came; one request may have 100" in ask(client, house.ids[0], [1] * 101, 413)["message"]
    with serving(house.settings(max_probe_values=10**9)) as client:
        assert "too long: absolute" in ask(client, house.ids[1], [1] * 40, 422)["message"]


def test_runs_that_cannot_answer(client: httpx.Client, house: House) -> None:
    assert ask(client, "0123456789abcdef", status=404)["type"] == "not_found"
    assert "is failed" in ask(client, house.ids[2], status=409)["message"]
    response = client.post(f"{API}/runs/{house.ids[0]}/probe", content=b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 415


def test_damaged_weights_are_said(own_house: House) -> None:
    folder = own_house.ledger.run(own_house.ids[0])
    model, spec = load_model(folder.checkpoint)
    model.embedding.weight.fill_(float("nan"))
    with folder.writing_checkpoint() as temporary:
        save_model(temporary, model, spec)
    with serving(own_house.settings()) as client:
        error = ask(client, own_house.ids[0], status=500)
    assert error["type"] == "damaged_checkpoint"
    assert "is not numbers" in error["message"]
