from itertools import combinations

import pytest
import torch

from cope_sweep.config import (
    Resources,
    estimates,
    expand,
    parameter_count,
    plan_of_recorded,
    row_of,
    suggested_estimates,
    total_seconds,
)
from cope_sweep.config.estimate import (
    WITHOUT_TRITON,
    Estimate,
    evaluation_batches,
    is_fused,
    memory_bytes,
    run_flops,
    shape_of,
    step_flops,
)
from cope_sweep.kernels import self_check, which
from cope_sweep.positions import ENCODINGS, Dims, check_together
from cope_sweep.positions.rope import RoPE
from tests.config.test_expand import BASE
from tests.helpers.ablation_texts import load
from tests.helpers.tiny import tiny_run

GPT2 = {
    "task.vocabulary": 50257,
    "model.layers": 12,
    "model.dim": 768,
    "model.heads": 12,
    "model.context": 1024,
}
CODE = {
    "task.vocabulary": 32000,
    "model.family": "llama",
    "model.tied": False,
    "model.layers": 4,
    "model.dim": 256,
    "model.heads": 8,
    "model.ffn_dim": 768,
    "model.context": 4096,
}
COPE = {"kind": "cope", "p_max": 64}
SHARED = COPE | {"share_layers": True}
RELATIVE = {"kind": "relative", "share_layers": True}


@pytest.mark.parametrize(
    ("model", "position", "parameters"),
    [
        (GPT2, ["absolute"], 124_439_808),
        (GPT2, [RELATIVE], 123_718_912),
        (GPT2, [SHARED], 123_657_472),
        (GPT2, [COPE], 123_702_528),
        (GPT2, [SHARED, RELATIVE], 123_723_008),
        (GPT2, [COPE | {"gate": "separate"}], 130_789_632),
        (GPT2, [SHARED | {"gate": "separate"}], 130_744_576),
        (CODE, ["rope"], 19_794_176),
        (CODE, ["absolute"], 20_842_752),
        (CODE, [SHARED | {"p_max": 4096, "per_head": True}], 20_842_752),
        (CODE, [COPE | {"p_max": 1024, "per_head": True}], 20_842_752),
    ],
)
def test_parameter_counts_of_the_paper_s_models(model, position, parameters):
    """The counts match the paper's columns (Tables 5 and 8) for these vocabulary sizes."""
    assert parameter_count(tiny_run(**model, **{"model.position": position})) == parameters


def test_memory_grows_with_stored_activations():
    small, large = tiny_run(), tiny_run(**{"train.batch": 64, "task.blanks": 500, "model.layers": 4})
    kept = memory_bytes(large, Resources())
    assert kept > memory_bytes(small, Resources())
    assert memory_bytes(large, Resources(attention="reference")) > kept
    assert memory_bytes(large, Resources(micro_batch=64)) == kept
    assert memory_bytes(large, Resources(micro_batch=16)) == memory_bytes(large, Resources(workers=4)) < kept
    assert memory_bytes(large, Resources(checkpoint_activations=True)) < kept


@pytest.mark.parametrize(
    ("resources", "measured"),
    [
        (Resources(), 5_039_837_184),
        (Resources(checkpoint_activations=True), 3_865_661_440),
        (Resources(micro_batch=1), 4_023_877_632),
        (Resources(micro_batch=1, checkpoint_activations=True), 3_620_483_072),
    ],
)
def test_memory_of_a_gpt2_is_within_a_tenth_of_what_was_measured(resources, measured):
    """Measured with 124 M parameters and context 1024 on a CPU."""
    text = {"kind": "wikitext", "tokens": 1024}
    run = tiny_run(**{"task": text, "model.position": [SHARED], "train.batch": 4} | GPT2)
    assert memory_bytes(run, resources) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("family", "position", "layers", "batch", "measured_mb"),
    [
        ("gpt2", [], 4, 8, 1466),
        ("gpt2", [], 1, 40, 1673),
        ("gpt2", ["rope"], 4, 8, 1707),
        ("gpt2", ["rope"], 2, 40, 2598),
        ("gpt2", ["path"], 1, 8, 1174),
        ("gpt2", ["selective_rope"], 1, 8, 1210),
        ("llama", [], 4, 8, 1819),
        ("post_norm", [], 4, 8, 1491),
    ],
)
def test_memory_is_within_a_tenth_of_what_was_measured(family, position, layers, batch, measured_mb):
    """Measured on a CPU with 1,023 tokens and a width of 256 (`tests/benchmarks/cope_benchmarks/memory.py`)."""
    task = {"kind": "selective_copy", "tokens": 8, "blanks": 1007, "vocabulary": 32}
    model = {"family": family, "layers": layers, "dim": 256, "heads": 4, "position": position}
    run = tiny_run(task=task, model=model, **{"train.batch": batch})
    assert memory_bytes(run, Resources(device="cpu")) == pytest.approx(1e6 * measured_mb, rel=0.1)


@pytest.mark.parametrize(
    ("family", "encoding", "attention", "measured_mb"),
    [
        ("gpt2", "path", "auto", 1820),
        ("llama", "path", "auto", 1943),
        ("gpt2", "tra", "auto", 1722),
        ("post_norm", "tra", "auto", 1671),
        ("gpt2", "dape", "auto", 2649),
        ("gpt2", "wall", "auto", 2286),
        ("llama", "dape", "auto", 2737),
        ("gpt2", "cope", "auto", 1109),
        ("llama", "cope", "auto", 1275),
        ("llama", "t5", "auto", 1267),
        ("post_norm", "kerple", "auto", 1087),
        ("gpt2", "cope", "reference", 1896),
        ("gpt2", "cope_mlp", "reference", 1788),
        ("gpt2", "relative", "reference", 1650),
        ("gpt2", "stick_breaking", "reference", 1755),
        ("gpt2", "rope", "reference", 1261),
        ("gpt2", "fox", "reference", 1287),
        ("gpt2", "alibi", "reference", 1270),
        ("gpt2", "t5", "reference", 1291),
        ("gpt2", "kerple", "reference", 1312),
        ("gpt2", "fire", "reference", 1277),
        ("gpt2", "cope_alibi", "reference", 1434),
        ("gpt2", "grape_ap", "reference", 1677),
    ],
)
def test_memory_of_whole_matrices_is_within_a_tenth_of_what_was_measured(family, encoding, attention, measured_mb):
    """Measured with 127 tokens, where attention without a fused kernel keeps (T, T) matrices: 1 to 23 for each head."""
    task = {"kind": "selective_copy", "tokens": 8, "blanks": 111, "vocabulary": 32}
    model = {"family": family, "layers": 4, "dim": 128, "heads": 4, "position": [encoding]}
    run = tiny_run(task=task, model=model, **{"train.batch": 64})
    assert memory_bytes(run, Resources(device="cpu", attention=attention)) == pytest.approx(1e6 * measured_mb, rel=0.1)


def test_on_a_gpu_the_logits_of_a_chunk_take_more_memory():
    """A GPU computes 2**27 logits at a time, a CPU 10 * 2**20: three float32 arrays of each."""
    run = tiny_run(**{"task": {"kind": "wikitext", "tokens": 1024}, "train.batch": 16} | GPT2)
    on_cpu, on_gpu = (memory_bytes(run, Resources(device=device)) for device in ("cpu", "cuda"))
    assert on_gpu - on_cpu == 4 * 3 * (2**27 - 10 * 2**20)
    assert memory_bytes(run, Resources(gpus=1)) == on_gpu
    assert memory_bytes(run, Resources()) == on_cpu


def test_a_divided_optimiser_state_takes_less_memory():
    run = tiny_run(**GPT2, **{"train.batch": 4})
    whole, divided = (memory_bytes(run, Resources(workers=4, shard=shard)) for shard in ("off", "optimizer"))
    assert whole - divided == pytest.approx(8 * 3 / 4 * parameter_count(run))


def test_evaluations_add_to_the_cost():
    run = tiny_run()
    training = run.train.steps * step_flops(run, Resources())
    assert training < run_flops(run, Resources()) < 10 * training
    often, once = tiny_run(**{"evaluate.every": 1}), tiny_run(**{"evaluate.every": 6})
    assert run_flops(often, Resources()) > run_flops(run, Resources()) > run_flops(once, Resources())


def test_recomputing_activations_adds_a_third():
    again = Resources(checkpoint_activations=True)
    assert step_flops(tiny_run(), again) == pytest.approx(4 / 3 * step_flops(tiny_run(), Resources()))


def test_longer_windows_longer_sequences_and_variants_cost_more():
    text = {"kind": "code", "tokens": 64, "vocabulary": 300}
    windows = [{"contexts": [64]}, {"contexts": [4096]}, {"contexts": [4096], "stride": 64}]
    variants = [{"model.position": ["relative"]}, {"evaluate.variants": {"capped": {"relative.far": "last"}}}]
    for runs in (
        [tiny_run(task=text, evaluate=each) for each in windows],
        [tiny_run(evaluate={"lengths": lengths}) for lengths in ([], [2], [2, 16])],
        [tiny_run(**variants[0] | each) for each in ({}, variants[1])],
    ):
        costs = [run_flops(run, Resources()) for run in runs]
        assert costs == sorted(set(costs))


def test_times_follow_the_measured_rates_of_equal_shapes_or_their_median():
    plan = expand(load(BASE + "grid: {model.layers: [1, 2, 3]}\nseeds: [0, 1]\n"))
    one, two, three = (row.runs for row in plan.rows)
    resources = Resources()
    without = estimates(plan)
    assert without.keys() == {run.run_id for run in plan.runs}
    assert all("rule of thumb" in estimate.basis for estimate in without.values())

    rates = {shape_of(one[0]): 2e-9, shape_of(two[0]): 4e-9}
    measured = estimates(plan, rates)
    for run in one:
        assert measured[run.run_id].seconds == pytest.approx(2e-9 * run_flops(run, resources))
        assert "measured on this store" in measured[run.run_id].basis
    for run in three:
        assert measured[run.run_id].seconds == pytest.approx(3e-9 * run_flops(run, resources))
        assert "scaled from this store" in measured[run.run_id].basis


def test_what_a_search_will_suggest_costs_the_mean_of_its_extremes():
    text = BASE + "search: {kind: optuna, samples: 5, space: {model.layers: {int_uniform: [1, 9]}}}\nseeds: [0]\n"
    loaded = load(text)
    found = estimates(expand(loaded))
    low, high = (found[row.runs[0].run_id] for row in expand(loaded).examples)
    suggested = suggested_estimates(expand(loaded), found)
    assert [each.seconds for each in suggested] == [pytest.approx((low.seconds + high.seconds) / 2)] * 5
    assert suggested[0].memory_bytes == high.memory_bytes
    rows = [row_of(loaded, {"model.layers": layers}) for layers in (3, 4)]
    plan = plan_of_recorded(loaded, [(row.runs[0].run_id, row.labels) for row in rows])
    assert len(suggested_estimates(plan, estimates(plan))) == 3
    assert suggested_estimates(expand(load(BASE)), {}) == []


def test_rows_of_equal_cost_share_an_estimate():
    text = BASE + "grid: {train.lr: [1e-3, 2e-3], model.layers: [1, 2], train.optimizer: [adamw, muon]}\n"
    plan = expand(load(text))
    found = estimates(plan)
    for run in plan.runs:
        assert found[run.run_id].parameters == parameter_count(run)
        assert found[run.run_id].memory_bytes == memory_bytes(run, Resources())
    assert len({id(estimate) for estimate in found.values()}) == 4


def test_the_rule_of_thumb_counts_cores_of_workers_that_have_a_sequence():
    def seconds(**resources):
        content = BASE.replace("layers: 1}", "layers: 1}\n  train: {batch: 2, steps: 10}") + f"resources: {resources}\n"
        plan = expand(load(content))
        return estimates(plan)[plan.runs[0].run_id].seconds

    assert seconds(cpus=1) > seconds(cpus=2) == seconds(workers=2) == seconds(workers=8)


def test_each_run_starts_as_soon_as_there_is_room():
    def total(*seconds, parallel):
        return total_seconds([Estimate(0, s, 0, "") for s in seconds], parallel)

    assert total(4, 2, 2, parallel=2) == 4
    assert total(4, 2, 2, parallel=1) == 8
    assert total(1, 5, 1, 1, 4, parallel=2) == 7
    assert total(3, 1, parallel=5) == 3
    assert total(*[1] * 3000, parallel=3) == 1000
    assert total(parallel=2) == 0


@pytest.mark.parametrize("blanks", [200, 500])
def test_memory_for_all_scores_where_attention_is_not_computed_in_blocks(blanks):
    relu, gelu = (
        tiny_run(**{"task.blanks": blanks, "train.batch": 16, "model.position": [position]})
        for position in ({"kind": "cope_mlp"}, {"kind": "cope_mlp", "activation": "gelu"})
    )
    fused, whole = memory_bytes(relu, Resources()), memory_bytes(relu, Resources(attention="reference"))
    assert whole > fused
    assert memory_bytes(gelu, Resources()) == (whole if blanks < 250 else fused)


@pytest.mark.parametrize(
    ("position", "device"),
    [({"kind": "fox", "scaled": False}, "cpu"), ({"kind": "inkling", "curves": 64}, "cpu")]
    + [({"kind": kind}, "cuda") for kind in WITHOUT_TRITON],
)
def test_memory_for_all_scores_where_no_kernel_of_the_device_computes_them(position, device):
    run = tiny_run(**{"task.blanks": 200, "train.batch": 16, "model.position": [position]})
    found, whole = (memory_bytes(run, Resources(device=device, attention=name)) for name in ("auto", "reference"))
    assert found == whole


OPTIONS = [
    {"kind": "alibi", "sampled": 64},
    {"kind": "cope", "gate": "values"},
    {"kind": "cope", "gate": "separate", "gate_bias": 1.0},
    {"kind": "cope", "rotated_query": True},
    {"kind": "cope_alibi", "gate": "values"},
    {"kind": "cope_alibi", "gate_after_rotation": True},
    {"kind": "cope_alibi", "gate_bias": 1.0},
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_fused_kernel_computes_the_pairs_that_the_estimate_says(device, monkeypatch):
    if device == "cuda":
        pytest.importorskip("triton")
    monkeypatch.setattr(self_check, "why_not", lambda *_: None)  # it would compute attention
    dims = Dims(32, 2, 1, 64)
    found = [ENCODINGS.validate(each) for each in (*ENCODINGS, *OPTIONS)]
    scoring = [each for each in found if each.scores or each.weighs]
    # A rotation decides whether there is one problem for a kernel, which is the same on all devices.
    rotations = ([], [RoPE()]) if device == "cpu" else ([],)
    wrong = []
    for encodings in ([*pair, *rope] for pair in combinations(scoring, 2) for rope in rotations):
        try:
            check_together(encodings, dims)
        except ValueError:
            continue
        name, reason = which(encodings, dims, device=device, dtype=torch.float32)
        if is_fused(encodings, dims, on_cuda=device == "cuda") != (name in ("native", "triton")):
            wrong.append((encodings, reason))
    assert not wrong


@pytest.mark.parametrize("pair", [["cope", "stick_breaking"], ["cope", "cope_mlp"], ["t5", "kerple"]])
def test_memory_for_all_scores_in_the_layers_in_which_no_kernel_computes_both(pair):
    def memory(*layers, **resources):
        position = [{"kind": pair[0], "layers": [0]}, {"kind": pair[1], "layers": list(layers)}]
        run = tiny_run(**{"task.blanks": 200, "train.batch": 16, "model.layers": 2, "model.position": position})
        return memory_bytes(run, Resources(**resources))

    assert memory(1) < memory(0) < memory(0, attention="reference")
    assert memory(0) - memory(1) > 10 * 2**20


@pytest.mark.parametrize("kind", ENCODINGS)
def test_the_kinds_without_kernels_for_gpus_are_known(kind):
    """Of padded sequences, since torch's own attention computes others where there are no scores."""
    pytest.importorskip("triton")
    encodings, dims = [ENCODINGS[kind]()], Dims(64, 2, 2, 300)
    name, reason = which(encodings, dims, device="cuda", dtype=torch.bfloat16, padded=True)
    expected = ("triton", True) if is_fused(encodings, dims, on_cuda=True) else ("blocked", False)
    assert (name, reason is None) == expected


def test_batches_of_evaluations_take_time():
    run = tiny_run(
        **{"train.steps": 6, "train.batch": 4, "evaluate": {"every": 3, "sequences": 8, "final_sequences": 10}}
    )
    at_once = 2 + 3
    assert evaluation_batches(run) == len(run.test_sets) * at_once
    longer = tiny_run(**{"train.batch": 4, "evaluate": {"final_sequences": 10, "lengths": [2]}})
    assert (
        evaluation_batches(longer)
        - evaluation_batches(tiny_run(**{"train.batch": 4, "evaluate": {"final_sequences": 10}}))
        == 3
    )
