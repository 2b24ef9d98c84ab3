"""The facts of a finished run."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cope_sweep.config import Resources
from cope_sweep.config.estimate import model_flops_per_token
from cope_sweep.kernels import dispatch, native, self_check
from cope_sweep.model import Transformer
from cope_sweep.train import Runtime, Trainer, train_run
from cope_sweep.train import facts as facts_module
from cope_sweep.train.facts import Clock, peak_flops_per_s, speed_facts
from cope_sweep.train.runtime import has_bf16
from tests.helpers.tiny import tiny_run


class ManualTime:
    """A clock that tests advance by hand."""

    def __init__(self):
        self.at_s = 1000.0

    def __call__(self):
        return self.at_s


def test_training_time_excludes_setup_warm_up_and_pauses():
    time, trainer = ManualTime(), Trainer(tiny_run(), Runtime())
    tokens = 4 * trainer.spec.task.length("train")
    clock = Clock(time)
    time.at_s += 100  # the model is built, a text tokenised
    clock.start(trainer, {"train_s": 7.0, "wall_s": 70.0})
    trainer.train_step()
    time.at_s += 30  # the first step builds kernels
    clock.end_warm_up()
    assert clock.tokens_per_s() == round(tokens / 30, 1)  # there is no other step yet
    for _ in range(3):
        trainer.train_step()
        time.at_s += 2
        with clock.paused():
            time.at_s += 50  # an evaluation
    assert clock.tokens_per_s() == round(3 * tokens / 6, 1)
    assert clock.durations() == {"train_s": 7 + 30 + 6, "wall_s": 70 + 100 + 30 + 6 + 150}


@pytest.mark.parametrize(
    ("capabilities", "has"),
    [
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_f": True, "avx512_bf16": False}, False),
        ({"avx2": True}, False),
    ],
)
def test_cpus_with_bfloat16(capabilities, has):
    assert has_bf16(capabilities) is has


@pytest.mark.parametrize("has", [True, False])
def test_emulated_bfloat16_is_a_warning(has, monkeypatch, caplog):
    monkeypatch.setattr("cope_sweep.train.runtime.has_bf16", lambda: has)
    with caplog.at_level(logging.WARNING):
        runtime = Runtime.of(Resources(device="cpu", precision="bf16"), worker_id="here")
        assert runtime.precision == "bf16"
        Runtime.of(Resources(device="cpu"), worker_id="here")
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (0 if has else 1)
    assert has or "use fp32 here" in warnings[0]


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200", "fp32", None),
        ("Tesla T4", "bf16", None),
        ("cpu", "bf16", None),
    ],
)
def test_peaks(name, precision, peak):
    assert peak_flops_per_s(name, precision) == peak


@pytest.mark.parametrize("tied", [True, False])
def test_flops_of_a_token_are_those_of_its_matrix_products(tied):
    """The products of the layers of `tiny_run`, counted by torch for one sequence without gates and biases."""
    run = tiny_run(**{"model.family": "llama", "model.tied": tied, "model.position": ["absolute"]})
    model, tokens = Transformer(run), run.task.length("train")
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)  # gains, which are no products
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, tokens, dtype=torch.long))
    products = {torch.ops.aten.mm, torch.ops.aten.addmm}
    linear = sum(flops for operator, flops in counter.get_flop_counts()["Global"].items() if operator in products)
    attention = 12 * run.model.layers * run.model.dim * tokens
    assert model_flops_per_token(run) - attention - 6 * vectors == 3 * linear / tokens


def test_the_share_of_the_peak_is_a_fact(monkeypatch):
    trainer = Trainer(tiny_run(), Runtime(precision="bf16"))
    assert "mfu" not in speed_facts(trainer, 1000.0)
    monkeypatch.setattr(facts_module, "peak_flops_per_s", lambda name, precision: 1e9)
    per_token = model_flops_per_token(trainer.spec)
    facts = speed_facts(trainer, 1000.0)
    assert facts["model_flops_per_s"] == 1000 * per_token
    assert facts["mfu"] == pytest.approx(1000 * per_token / 1e9, abs=1e-4)


@pytest.fixture
def attention_of(store):
    def trained(attention="auto", **changes):
        run = tiny_run(**{"model.position": ["cope"], "task.blanks": 30, "train.steps": 1, **changes})
        train_run(run, store.run(run.run_id), Runtime(attention=attention))
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
