"""The OpenAI protocol: scores and texts agree with the Predictor; errors, and what lm-eval relies on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from cope_sweep import inference
from tests.services.prose_store import ProseStore

TEXTS = ["the cat is a species", "日本 , naïve lobster of the European", "a"]


def ask(client: httpx.Client, path: str, body: Any, status: int = 200) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def complete(client: httpx.Client, run_id: str, prompt: Any, status: int = 200, **fields: Any) -> Any:
    return ask(client, "/v1/completions", {"model": run_id, "prompt": prompt} | fields, status)


def test_many_tokens_are_decoded_outside_of_the_event_loop(
    prose_client: httpx.Client, prose: ProseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500,000 of them take 0.2 s."""
    decode = inference.decode

    def checked(*args: Any) -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return decode(*args)

    monkeypatch.setattr(inference, "decode", checked)
    text = ask(prose_client, "/detokenize", {"model": prose.cope[0], "tokens": [1] * 500_000})["prompt"]
    assert text == "!" * 500_000


def test_models_are_the_finished_runs(prose_client: httpx.Client, prose: ProseStore) -> None:
    models = prose_client.get("/v1/models").json()
    assert {model["id"] for model in models["data"]} == {*prose.cope, *prose.absolute, prose.flip_flop}
    assert {model["row"] for model in models["data"] if model["id"] in prose.cope} == {"CoPE"}
    one = prose_client.get(f"/v1/models/{prose.cope[0]}").json()
    assert one in models["data"]
    assert (one["object"], one["owned_by"], one["created"] > 1e9) == ("model", "cope-sweep", True)
    assert prose_client.get("/v1/models?limit=2").json()["data"] == models["data"][:2]
    missing = prose_client.get("/v1/models/0123456789abcdef")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("row", ["cope", "absolute"])
def test_the_request_of_lm_eval_has_the_scores_of_the_predictor(
    prose_client: httpx.Client, prose: ProseStore, row: str
) -> None:
    run_id = getattr(prose, row)[0]
    predictor = prose.predictor(run_id)
    prompts = [predictor.text_tokens(text)[:17].tolist() for text in TEXTS]
    assert len(prompts[1]) == 17  # a whole window: one token more than the model reads in training
    answer = complete(prose_client, run_id, prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    expected = predictor.log_probabilities(prompts)
    for index, (prompt, scores) in enumerate(zip(prompts, expected, strict=True)):
        choice = answer["choices"][index]
        logprobs = choice["logprobs"]
        assert choice["index"] == index
        assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        np.testing.assert_allclose(logprobs["token_logprobs"][1:-1], scores[1:], atol=1e-5)
        with torch.no_grad():
            logits_TV = predictor.model(torch.tensor([prompt[: predictor.longest_read]]))[0]
        for t, token in enumerate(prompt[1:]):
            top = logprobs["top_logprobs"][t + 1]
            # lm-eval decides with `==` whether the token is the most probable one.
            is_best = logprobs["token_logprobs"][t + 1] == max(top.values())
            assert is_best == (token == int(logits_TV[t].argmax()))
            assert len(top) == (1 if is_best else 2)
    assert answer["usage"] == {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": 3, "total_tokens": sum(map(len, prompts)) + 3}  # fmt: skip


def test_all_requests_of_lm_eval(prose_client: httpx.Client, prose: ProseStore) -> None:
    """As lm-eval 0.4.13 (`local-completions`) sends them for a choice and a generation: recorded, with other token ids."""
    base, predictor = f"/openai/{prose.absolute[0]}", prose.predictor(prose.absolute[0])

    def send(path: str, body: Any) -> Any:
        return ask(prose_client, base + path, body)

    info = prose_client.get(f"{base}/tokenizer_info", headers={"content-type": "application/json"}).json()
    assert info["eos_token"] == "<|endoftext|>"
    context, both = (
        send("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        for text in ("the cat is", "the cat is a")
    )
    score = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    [choice] = send("/v1/completions", {"model": None, "prompt": [both]} | score)["choices"]
    log_p = sum(choice["logprobs"]["token_logprobs"][len(context) : -1])
    assert log_p == pytest.approx(predictor.log_probabilities([both])[0][len(context) :].sum(), rel=1e-5)
    stop = ["\n\n", ".", info["eos_token"]]
    generate = {"model": None, "max_tokens": 4, "temperature": 0, "stop": stop, "seed": 1234}
    [generated] = send("/v1/completions", {"prompt": [context]} | generate)["choices"]
    ids = list(context)
    for _ in range(generate["max_tokens"]):
        with torch.no_grad():
            ids.append(int(predictor.model(torch.tensor([ids]))[0, -1].argmax()))
    greedy = b"".join(map(predictor.vocabulary.piece, ids[len(context) :])).decode(errors="replace")
    assert generated["text"] == min((greedy.partition(each)[0] for each in stop), key=len)


def test_text_and_ids_are_the_same_prompt(prose_client: httpx.Client, prose: ProseStore) -> None:
    run_id = prose.cope[0]
    fields = {"temperature": 0, "max_tokens": 4, "logprobs": 2, "echo": True}
    tokens = ask(prose_client, f"/openai/{run_id}/tokenize", {"prompt": TEXTS[0]})["tokens"]
    by_text = complete(prose_client, run_id, TEXTS[0], **fields)["choices"]
    assert by_text == complete(prose_client, run_id, tokens, **fields)["choices"]
    assert by_text == complete(prose_client, run_id, [TEXTS[0]], **fields)["choices"]
    [choice] = by_text
    assert choice["text"].startswith(TEXTS[0])
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    pinned = ask(prose_client, f"/openai/{run_id}/v1/completions", {"prompt": tokens} | fields)["choices"]
    assert pinned == by_text


def test_a_character_of_the_prompt_and_the_completion_is_whole(prose_client: httpx.Client, prose: ProseStore) -> None:
    run_id = prose.cope[0]
    piece = prose.predictor(run_id).vocabulary.piece
    prompt = [next(token for token in range(300) if piece(token) == bytes([byte])) for byte in "日".encode()[:2]]
    fields = {"max_tokens": 1, "temperature": 10, "seed": 0, "echo": True}
    choices = complete(prose_client, run_id, [prompt] * 40, **fields)["choices"]
    assert {choice["text"] for choice in choices} & set(map(chr, range(0x65C0, 0x6600)))


def test_sampling_depends_on_the_seed_alone(prose_client: httpx.Client, prose: ProseStore) -> None:
    def texts(*prompts: str, **fields: Any) -> list[str]:
        choices = complete(prose_client, prose.cope[0], list(prompts), max_tokens=9, **fields)["choices"]
        return [choice["text"] for choice in choices]

    assert texts(TEXTS[0], seed=1) == texts(TEXTS[0], seed=1)
    assert texts(TEXTS[0], TEXTS[2], seed=1)[0] == texts(TEXTS[0], seed=1)[0]
    assert texts(TEXTS[0], seed=1) != texts(TEXTS[0], seed=2)
    assert texts(TEXTS[0], temperature=0) == texts(TEXTS[0], temperature=0)


def test_a_row_is_its_best_finished_run(prose_client: httpx.Client, prose: ProseStore) -> None:
    fields = {"prompt": TEXTS[0], "max_tokens": 4, "temperature": 0, "logprobs": 1, "echo": True}
    by_row = ask(prose_client, "/v1/completions", {"model": "prose/CoPE"} | fields)
    perplexities = {
        run: prose_client.get(f"/api/v1/runs/{run}").json()["metrics"]["test/perplexity"] for run in prose.cope
    }
    best = min(perplexities, key=perplexities.__getitem__)
    by_run = ask(prose_client, "/v1/completions", {"model": best} | fields)
    assert (by_row["model"], by_row["choices"]) == (best, by_run["choices"])
    tokens = ask(prose_client, "/tokenize", {"model": "prose/CoPE", "prompt": TEXTS[0]})
    assert tokens == ask(prose_client, "/tokenize", {"model": best, "prompt": TEXTS[0]})
    for unknown in ("prose/Rope", "proses/CoPE", "x/", "/", "a" * 300 + "/CoPE"):
        assert complete(prose_client, unknown, [1], 404)["code"] == "not_found", unknown


def test_stop_texts_and_the_context_end_a_completion(prose_client: httpx.Client, prose: ProseStore) -> None:
    run_id = prose.cope[0]
    [whole] = complete(prose_client, run_id, "the", max_tokens=10, temperature=0)["choices"]
    middle = whole["text"][2:4]
    [stopped] = complete(prose_client, run_id, "the", max_tokens=10, temperature=0, stop=middle)["choices"]
    assert stopped["text"] == whole["text"][: whole["text"].index(middle)]
    assert stopped["finish_reason"] == "stop"
    [long] = complete(prose_client, run_id, "the", max_tokens=300, temperature=0, logprobs=0, echo=True)["choices"]
    assert (len(long["logprobs"]["tokens"]), long["finish_reason"]) == (18, "length")


def test_a_prompt_of_one_token(prose_client: httpx.Client, prose: ProseStore) -> None:
    for row in (prose.cope, prose.absolute):
        fields = {"echo": True, "logprobs": 1, "temperature": 0}
        [alone] = complete(prose_client, row[0], [5], max_tokens=0, **fields)["choices"]
        assert (alone["logprobs"]["token_logprobs"], alone["finish_reason"]) == ([None], "length")
        [more] = complete(prose_client, row[0], [5], max_tokens=1, **fields)["choices"]
        [known] = complete(prose_client, row[0], [5], max_tokens=3, logprobs=1, temperature=0)["choices"]
        assert len(more["logprobs"]["tokens"]) == 2
        assert more["logprobs"]["tokens"][1] == known["logprobs"]["tokens"][0]


def test_a_long_prompt_is_scored_as_far_as_encodings_reach(prose_client: httpx.Client, prose: ProseStore) -> None:
    prompt = list(range(40))
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0}
    [choice] = complete(prose_client, prose.cope[0], prompt, **fields)["choices"]
    [scores] = prose.predictor(prose.cope[0]).log_probabilities([prompt])
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], scores[1:], atol=1e-5)
    assert complete(prose_client, prose.absolute[0], prompt, 400, **fields)["code"] == "too_long"


def test_tokenizer_routes(prose_client: httpx.Client, prose: ProseStore) -> None:
    run_id = prose.cope[0]
    info = prose_client.get(f"/openai/{run_id}/tokenizer_info").json()
    assert info == prose_client.get(f"/tokenizer_info?model={run_id}").json()
    assert (info["eos_token"], info["max_model_len"], info["vocabulary_size"]) == ("<|endoftext|>", 17, 300)
    end = ask(prose_client, f"/openai/{run_id}/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})
    assert end["tokens"] == [prose.predictor(run_id).tokenizer.end_of_text]
    for text in (*TEXTS, "", " \n<|endoftext|>\x00"):
        tokens = ask(prose_client, "/tokenize", {"model": run_id, "prompt": text})
        assert tokens["count"] == len(tokens["tokens"])
        assert ask(prose_client, "/detokenize", {"model": run_id, "tokens": tokens["tokens"]})["prompt"] == text


def test_a_task_without_text_has_labels(prose_client: httpx.Client, prose: ProseStore) -> None:
    run_id = prose.flip_flop
    assert prose_client.get(f"/tokenizer_info?model={run_id}").json()["eos_token"] is None
    fields = {"max_tokens": 2, "temperature": 0, "logprobs": 0, "echo": True}
    by_label = complete(prose_client, run_id, "w 0 i 1 r", **fields)["choices"]
    assert by_label == complete(prose_client, run_id, [2, 0, 3, 1, 4], **fields)["choices"]
    assert by_label[0]["logprobs"]["tokens"][:5] == [" w", " 0", " i", " 1", " r"]
    fields["max_tokens"] = 0
    [choice] = complete(prose_client, run_id, "w 0 i 1 r 0 i 1", **fields)["choices"]
    logprobs = choice["logprobs"]["token_logprobs"]  # the task trains the bit after `r` only
    assert [value is not None for value in logprobs] == [False, False, False, False, False, True, False, False]
    assert logprobs[5] == pytest.approx(prose.predictor(run_id).log_probabilities([[2, 0, 3, 1, 4, 0]])[0][5], rel=1e-5)
    assert complete(prose_client, run_id, "hello", 400)["code"] == "unknown_label"


@pytest.mark.parametrize(
    ("body", "status", "code", "named"),
    [
        ({"prompt": [1]}, 400, "no_model", "model"),
        ({"model": "no", "prompt": [1]}, 404, "not_found", "'no'"),
        ({"model": "0123456789abcdef", "prompt": [1]}, 404, "not_found", "'0123456789abcdef'"),
        ({"prompt": [1] * 18}, 400, "prompt_length", "17"),
        ({"prompt": [1] * 401, "max_tokens": 0, "echo": True, "logprobs": 0}, 413, "too_large", "400"),
        ({"prompt": [[1, 2]] * 1000}, 413, "too_large", "4000"),
        ({"prompt": [1, "a"]}, 400, "invalid_request", "body.prompt"),
        ({"prompt": [1], "stop": [""]}, 400, "invalid_request", "body.stop"),
        ({"prompt": [1], "n": 2}, 400, "invalid_request", "body.n"),
        ({"prompt": [1], "stream": True}, 400, "invalid_request", "body.stream"),
        ({"prompt": [1], "max_token": 1}, 400, "invalid_request", "body.max_token"),
        ({"prompt": "\ud800"}, 400, "invalid_request", ""),
    ],
)
def test_errors_are_those_of_openai(
    prose_client: httpx.Client, prose: ProseStore, body: dict[str, Any], status: int, code: str, named: str
) -> None:
    model = {} if code == "no_model" else {"model": prose.cope[0]}
    content = json.dumps(model | body)
    response = prose_client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert named in error["message"]  # the protocol has no place for the data


def test_a_path_and_a_request_that_name_different_models(prose_client: httpx.Client, prose: ProseStore) -> None:
    path = f"/openai/{prose.cope[0]}/v1/completions"
    assert ask(prose_client, path, {"model": prose.cope[1], "prompt": [1]}, 400)["code"] == "two_models"
    assert len(ask(prose_client, path, {"model": prose.cope[0], "prompt": [1]})["choices"]) == 1


def test_values_choose_the_model_of_a_row(prose_client: httpx.Client, prose: ProseStore) -> None:
    body = {"model": "prose/CoPE", "prompt": "the"}
    for number, run_id in enumerate(prose.cope):
        query = f"?set=seeds=[{number}]"
        assert ask(prose_client, f"/v1/completions{query}", body | {"max_tokens": 1})["model"] == run_id
        info = prose_client.get(f"/tokenizer_info{query}&model=prose/CoPE")
        assert info.json()["model"] == run_id
        for path, own in (("/tokenize", {"prompt": "the"}), ("/detokenize", {"tokens": [1]})):
            assert ask(prose_client, path + query, {"model": "prose/CoPE"} | own)
            assert ask(prose_client, f"{path}{query}&model=prose/CoPE", own)
    assert ask(prose_client, "/v1/completions?set=sedes=[1]", body, 400)["code"] == "unknown_key"
    assert ask(prose_client, "/v1/completions?scale=small", body, 400)["code"] == "unknown_scale"
    by_id = {"model": prose.cope[0], "prompt": [1]}
    assert ask(prose_client, "/v1/completions?set=seeds=[0]", by_id, 400)["code"] == "set_of_no_ablation"
    in_path = f"/openai/{prose.cope[0]}/v1/completions?scale=small"
    assert ask(prose_client, in_path, {"prompt": [1]}, 400)["code"] == "scale_of_no_ablation"


def test_the_parameters_of_the_query_are_documented(prose_client: httpx.Client) -> None:
    paths = prose_client.get("/openapi.json").json()["paths"]
    for path, method, names in (
        ("/v1/completions", "post", {"scale", "set"}),
        ("/tokenizer_info", "get", {"scale", "set", "model"}),
        ("/openai/{run_id}/tokenize", "post", {"scale", "set", "model", "run_id"}),
    ):
        parameters = paths[path][method]["parameters"]
        assert {each["name"] for each in parameters if each["in"] != "header"} == names
