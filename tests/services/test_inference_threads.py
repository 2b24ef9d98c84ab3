"""The threads of inference: always the same ones, and cores that they share."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from cope_services.models import inference_threads
from cope_services.models.inference_threads import InferenceThreads


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_threads, "_cores", lambda: 4)


def test_what_is_alone_has_all_cores_and_others_share_them() -> None:
    before = torch.get_num_threads()
    both = threading.Barrier(2, timeout=60)

    def cores() -> int:
        return torch.get_num_threads()

    def cores_together() -> int:
        both.wait()
        return torch.get_num_threads()

    async def work() -> None:
        threads = InferenceThreads(2)
        assert await threads.run(cores, alone=True) == 4
        assert await threads.run(cores, alone=False) == 2
        together = [asyncio.create_task(threads.run(cores_together, alone=alone)) for alone in (False, True)]
        assert await asyncio.gather(*together) == [2, 2]
        assert threads.running == 0
        assert await InferenceThreads(9).run(cores, alone=False) == 1

    asyncio.run(work())
    assert torch.get_num_threads() == before


def test_models_are_computed_in_as_many_threads_as_there_are() -> None:
    async def work() -> None:
        threads = InferenceThreads(2)
        used = await asyncio.gather(*(threads.run(threading.get_ident, alone=False) for _ in range(50)))
        assert len(set(used)) <= 2

    asyncio.run(work())
