"""Dynamic batching: the same numbers as alone, bounds, turns, and what a client that leaves frees."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from cope_services.http.errors import BusyError
from cope_services.models import batching
from cope_services.models.batching import BATCH_SIZES, Batcher
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep import inference
from cope_sweep.inference import NotFiniteError, Predictor, Window, score, scoring
from cope_sweep.signals import ExitError
from tests.helpers.processes import until
from tests.helpers.sample_store import API, serving
from tests.services.prose_store import ProseStore
from tests.test_generation import predictor, prompt

MODELS = {name: predictor(*name.split("+")) for name in ("cope", "absolute", "rope", "cope+relative", "alibi")}
PATIENCE_S = 60


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def batcher(**changes: int) -> Batcher:
    return Batcher(**({"max_inferences": 1, "max_queue_tokens": 10_000} | changes))


class Gate:
    """Makes `score` wait until it is opened, and notes the batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.batches: list[list[int]] = []
        monkeypatch.setattr(inference, "score", self.score)

    def score(self, model: Any, spec: Any, windows: list[Window], *, top: int = 0) -> Any:
        self.batches.append([window.reads for window in windows])
        assert self.opened.wait(PATIENCE_S)
        return score(model, spec, windows, top=top)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


async def occupied(queue: Batcher, gate: Gate) -> asyncio.Task[Any]:
    """The scores of a window that occupies the queue's only worker until the gate is opened."""
    scores = asyncio.create_task(queue.score(MODELS["cope"], [Window(prompt(10))]))
    while not gate.batches:
        await asyncio.sleep(0.001)
    return scores


@given(
    requests=st.lists(
        st.tuples(st.sampled_from(list(MODELS)), st.lists(st.integers(1, 24), min_size=1, max_size=5)),
        min_size=1,
        max_size=8,
    ),
    workers=st.integers(1, 3),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_mixed_requests_have_the_scores_of_single_ones(requests: list[tuple[str, list[int]]], workers: int) -> None:
    windows = [[Window(prompt(length + 1, length)) for length in lengths] for _, lengths in requests]

    async def together() -> list[Any]:
        queue = batcher(max_inferences=workers)
        scored = await asyncio.gather(
            *(queue.score(MODELS[name], some, top=index % 3) for index, ((name, _), some) in enumerate(zip(requests, windows, strict=True)))
        )  # fmt: skip
        assert queue.waiting == 0
        return list(scored)

    for (name, _), some, scored in zip(requests, windows, run(together), strict=True):
        for window, scores in zip(some, scored, strict=True):
            [alone] = score(MODELS[name].model, MODELS[name].run, [window])
            np.testing.assert_allclose(scores.log_probabilities_N, alone.log_probabilities_N, atol=1e-10)


def test_waiting_windows_of_similar_lengths_share_a_batch(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "FREE_PADDING", 0)
    monkeypatch.setattr(scoring, "MAX_PADDING", 0.1)
    lengths = [20, 3, 19, 3, 21, 20, 3]

    async def work() -> None:
        queue = batcher()
        first = await occupied(queue, gate)
        rest = [asyncio.create_task(queue.score(MODELS["cope"], [Window(prompt(n + 1))])) for n in lengths]
        other = asyncio.create_task(queue.score(MODELS["rope"], [Window(prompt(21))]))
        while queue.waiting < len(lengths) + 1:
            await asyncio.sleep(0.001)
        gate.opened.set()
        await asyncio.gather(first, *rest, other)

    run(work)
    assert [sorted(batch) for batch in gate.batches] == [[9], [19, 20, 20, 21], [3, 3, 3], [20]]


def test_what_is_counted(gate: Gate) -> None:
    async def work() -> None:
        queue = batcher(max_queue_tokens=100)
        first = await occupied(queue, gate)
        rest = asyncio.create_task(queue.score(MODELS["cope"], [Window(prompt(n)) for n in (11, 11, 12)]))
        await asyncio.sleep(0)
        with queue.admitted(90), pytest.raises(BusyError), queue.admitted(11):
            pass
        with queue.admitted(7):
            assert (queue.running, queue.waiting, queue.queued_tokens, queue.counts.refused) == (1, 3, 7, 1)
        gate.opened.set()
        await asyncio.gather(first, rest)
        assert (queue.running, queue.waiting, queue.queued_tokens) == (0, 0, 0)
        counts = queue.counts
        assert (counts.windows, counts.scored_tokens, counts.padding_tokens) == (4, 9 + 10 + 10 + 11, 2)
        sizes = dict(zip((*BATCH_SIZES, "larger"), counts.sizes, strict=True))
        assert {size: count for size, count in sizes.items() if count} == {1: 1, 4: 1}

    run(work)


def test_an_error_belongs_to_the_requests_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: Any, spec: Any, windows: list[Window], *, top: int = 0) -> Any:
        if model is MODELS["rope"].model:
            raise NotFiniteError("damaged")
        return score(model, spec, windows, top=top)

    monkeypatch.setattr(inference, "score", failing)

    async def work() -> None:
        queue = batcher()
        good, bad = await asyncio.gather(
            queue.score(MODELS["cope"], [Window(prompt(5))]),
            queue.score(MODELS["rope"], [Window(prompt(5)), Window(prompt(9))]),
            return_exceptions=True,
        )
        assert isinstance(bad, NotFiniteError)
        assert len(good) == 1
        await queue.score(MODELS["cope"], [Window(prompt(5))])

    run(work)


# -- over HTTP


def ask(client: httpx.Client, run_id: str, tokens: list[list[int]]) -> httpx.Response:
    return client.post(f"{API}/perplexity", json={"models": [run_id], "tokens": tokens})


def test_overload_is_refused_with_429_and_the_rest_is_answered(prose: ProseStore, gate: Gate) -> None:
    run_id = prose.cope[0]
    with serving(prose.settings(max_queue_tokens=100)) as client, ThreadPoolExecutor(40) as threads:
        answers = [threads.submit(ask, client, run_id, [list(range(11))]) for _ in range(40)]
        until(lambda: sum(answer.done() for answer in answers) == 30)  # 10 tokens each; 100 have room
        gate.opened.set()
        responses = [answer.result() for answer in answers]
    assert sorted(response.status_code for response in responses) == [200] * 10 + [429] * 30
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.json()["code"] == "too_many_requests"
    assert int(refused.headers["retry-after"]) >= 1


@pytest.fixture
def batchers(monkeypatch: pytest.MonkeyPatch) -> list[Batcher]:
    """The queues that are made, in order."""
    made: list[Batcher] = []
    monkeypatch.setattr(Batcher, "__init__", _noting(made, Batcher.__init__))
    return made


def test_a_client_that_leaves_frees_the_queue(prose: ProseStore, gate: Gate, batchers: list[Batcher]) -> None:
    run_id = prose.cope[0]
    with serving(prose.settings(max_queue_tokens=100, max_inferences=1)) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask, client, run_id, [[1, 2, 3]])
        until(lambda: gate.batches)
        body = json.dumps({"models": [run_id], "tokens": [[7] * 91]}).encode()
        head = f"POST {API}/perplexity HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection((client.base_url.host, client.base_url.port)) as leaving:
            leaving.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: batchers[0].queued_tokens == 92)
            until(lambda: ask(client, run_id, [list(range(21))]).status_code == 429)
        until(lambda: batchers[0].queued_tokens == 2)
        gate.opened.set()
        assert first.result().status_code == 200
        assert ask(client, run_id, [list(range(21))]).status_code == 200
    assert gate.batches == [[2], [20]]


def _noting(made: list[Any], original: Callable[..., None]) -> Callable[..., None]:
    def noted(self: Any, *values: Any) -> None:
        original(self, *values)
        made.append(self)

    return noted


def test_a_request_over_the_time_limit_is_answered(prose: ProseStore, gate: Gate) -> None:
    Predictor.load(prose.store.run(prose.cope[0]).checkpoint)  # what is imported now does not count
    with serving(prose.settings(max_seconds=0.5)) as client:
        response = ask(client, prose.cope[0], [[1, 2, 3]])
        assert (response.status_code, response.json()["code"]) == (504, "time_limit")
        gate.opened.set()


# -- the threads of inference: always the same ones, and cores that they share -----------------------------------------


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_cores", lambda: 4)


def test_what_is_alone_has_all_cores_and_others_share_them() -> None:
    before = torch.get_num_threads()
    both = threading.Barrier(2, timeout=60)

    def cores() -> int:
        return torch.get_num_threads()

    def cores_together() -> int:
        both.wait()
        return torch.get_num_threads()

    async def work() -> None:
        batcher = Batcher(2, 1)
        assert await batcher.infer(cores) == 4
        together = [asyncio.create_task(batcher.infer(cores_together)) for _ in range(2)]
        assert await asyncio.gather(*together) == [4, 2]
        assert batcher.running == 0
        assert await Batcher(9, 1).infer(cores) == 4

    asyncio.run(work())
    assert torch.get_num_threads() == before


def test_model_code_that_exits_is_an_error_of_its_request() -> None:
    """SystemExit would end the event loop, and CancelledError would look as if the client had left."""

    def leave(error: BaseException) -> None:
        raise error

    async def work() -> None:
        compute = batcher()
        for error in (SystemExit(0), asyncio.CancelledError(), KeyboardInterrupt()):
            for ask in (compute.infer, compute.prepare):
                with pytest.raises(ExitError) as raised:
                    await ask(lambda error=error: leave(error))  # type: ignore[misc]
                assert raised.value.__cause__ is error

    run(work)
