import pytest

from cope_sweep.model import Transformer
from cope_sweep.plan import estimates, expand, parameter_count, total_seconds
from cope_sweep.plan.estimate import Estimate, memory_bytes, run_flops, step_flops
from cope_sweep.record import Ledger
from cope_sweep.spec import Resources
from cope_sweep.spec.ablation import validate
from cope_sweep.spec.source import parse_source
from tests.plan.test_expand import BASE
from tests.tiny import tiny_run


@pytest.mark.parametrize(
    "position",
    [
        [],
        ["absolute"],
        ["rope", "t5"],
        ["cope", "absolute"],
        [
            {"kind": "cope", "gate": "separate", "layers": [0], "per_head": True},
            {"kind": "relative", "share_layers": True},
        ],
        [{"kind": "cope_mlp", "share_layers": True}, {"kind": "cope_alibi", "slopes": "learned"}],
    ],
)
@pytest.mark.parametrize("family", ["gpt2", "llama", "post_norm"])
@pytest.mark.parametrize("more", [{}, {"model.tied": False, "model.layers": 3, "model.ffn_dim": 20}])
def test_parameters_are_counted_to_the_unit(position, family, more):
    run = tiny_run(**{"model.position": position, "model.family": family} | more)
    assert parameter_count(run) == sum(p.numel() for p in Transformer(run).parameters())


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
def test_the_papers_models_to_the_unit(model, position, parameters):
    """What fits the paper's columns (Tables 5 and 8), the vocabulary being the text's."""
    assert parameter_count(tiny_run(**model, **{"model.position": position})) == parameters


def test_memory_grows_with_what_is_kept():
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
        (Resources(), 8_462_868_480),
        (Resources(checkpoint_activations=True), 6_432_968_704),
        (Resources(micro_batch=1), 4_637_487_104),
        (Resources(micro_batch=1, checkpoint_activations=True), 4_093_411_328),
    ],
)
def test_memory_is_about_what_gpt2_took(resources, measured):
    """Measured: 124 M parameters, context 1024, on a CPU."""
    text = {"kind": "wikitext", "tokens": 1024}
    run = tiny_run(**{"task": text, "model.position": [SHARED], "train.batch": 4} | GPT2)
    assert memory_bytes(run, resources) == pytest.approx(measured, rel=0.2)


def test_evaluations_take_time():
    run = tiny_run()
    training = run.train.steps * step_flops(run, Resources())
    assert training < run_flops(run, Resources()) < 10 * training
    often, once = tiny_run(**{"evaluate.every": 1}), tiny_run(**{"evaluate.every": 6})
    assert run_flops(often, Resources()) > run_flops(run, Resources()) > run_flops(once, Resources())


def test_activations_computed_again_cost_a_third():
    again = Resources(checkpoint_activations=True)
    assert step_flops(tiny_run(), again) == pytest.approx(4 / 3 * step_flops(tiny_run(), Resources()))


def test_longer_windows_cost_their_attention():
    text = {"kind": "code", "tokens": 64, "vocabulary": 300}
    short, long, sliding = (
        run_flops(tiny_run(task=text, evaluate={"contexts": contexts, "stride": stride}), Resources())
        for contexts, stride in (([64], None), ([4096], None), ([4096], 64))
    )
    assert short < long < sliding


def test_time_comes_from_this_store_where_it_can(tmp_path):
    plan = expand(validate(parse_source(BASE + "grid: {model.layers: [1, 2]}\nseeds: [0, 1]\n", "t"), "t"))
    ledger = Ledger(tmp_path, create=True)
    before = estimates(plan, ledger)
    assert {"rule of thumb" in e.basis for e in before.values()} == {True}

    first = plan.rows[0].runs[0]
    folder = ledger.run(first.run_id)
    with folder.lock():
        folder.begin(first, "here")
        folder.finish({}, {"steps": first.train.steps, "resumed_from_step": 0, "wall_s": 50.0})
    after = estimates(plan, ledger)
    same, other = plan.rows[0].runs[1], plan.rows[1].runs[0]
    assert after[same.run_id].seconds == pytest.approx(50)
    assert "measured" in after[same.run_id].basis
    assert after[other.run_id].seconds > 50
    assert "scaled" in after[other.run_id].basis


def test_runs_share_the_groups():
    def taking(*seconds):
        return [Estimate(0, s, 0, "") for s in seconds]

    assert total_seconds(taking(4, 2, 2), 2) == 4
    assert total_seconds(taking(4, 2, 2), 1) == 8
    assert total_seconds([], 3) == 0
