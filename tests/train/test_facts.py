"""The facts of a finished run."""

import pytest

from cope_sweep.kernels import dispatch, native, self_check
from cope_sweep.train import Runtime, train_run
from tests.tiny import tiny_run


@pytest.fixture
def attention_of(store):
    def trained(attention="auto", **changes):
        run = tiny_run(**{"model.position": ["cope"], "task.blanks": 30, "train.steps": 1, **changes})
        train_run(run, store, Runtime(attention=attention))
        return store.run(run.run_id).result["facts"]["attention"]

    return trained


def test_the_kernels_of_attention(attention_of):
    assert attention_of() == "native"
    in_one = {"model.position": [{"kind": "cope", "layers": [2]}], "model.layers": 3}
    assert attention_of(**in_one) == "layers 0–1: sdpa, layers 2–2: native"
    assert attention_of("blocked", **{"train.lr": 0.1}) == "blocked"


def test_a_kernel_that_is_wrong_on_this_machine(attention_of, monkeypatch, tmp_path, request):
    original = native.backward

    def wrong(*arguments):
        original(*arguments)
        arguments[-1][0].mul_(2)

    monkeypatch.setattr(native, "backward", wrong)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for cached in (self_check._checked, dispatch._cached_log):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    attention = attention_of()
    assert attention.startswith("reference (native is not used, its results on this ")
    assert "gradient of q by 1" in attention
