import pytest

from cope_sweep.config import RunSpec
from cope_sweep.families import FAMILIES
from cope_sweep.optim import OPTIMIZERS, SCHEDULES
from cope_sweep.positions import ENCODINGS, Relative
from cope_sweep.tasks import SelectiveCopy
from tests.helpers.errors import raises
from tests.helpers.tiny import tiny_run


def test_golden_ids():
    """These ids exist in stores. If one changes: give the new field the old behaviour as its default."""
    assert tiny_run().run_id == "b47662f63f2dfe6f"
    assert tiny_run(seed=1).run_id == "951f3503878e2f29"
    assert tiny_run(**{"model.position": ["cope"]}).run_id == "3a78258c9dae4f92"
    assert tiny_run(**{"model.position": [{"kind": "cope", "p_max": 16}, "rope"]}).run_id == "f5c56ef40fac9781"
    assert RunSpec.model_validate_json('{"task": {"kind": "flip_flop"}}').run_id == "1a9e9ee2afeedda1"
    sizes = {"model.layers": 3, "model.dim": 16, "train.steps": 9}
    llama = {"model.family": "llama", "model.position": ["cope"], "train.schedule": "linear", "train.warmup": 1}
    assert tiny_run(**sizes | llama, seed=1).run_id == "c46d2efb45481434"
    post_norm = {"model.family": "post_norm", "model.position": ["absolute", "rope"], "train.schedule": "cosine"}
    more = {"train.warmup": 2, "model.ffn_dim": 24}
    assert tiny_run(**sizes | post_norm | more, seed=2).run_id == "446029765343c08f"


def test_the_identity_has_the_values_that_are_not_default():
    assert RunSpec(task=SelectiveCopy(tokens=8)).identity == {
        "spec": {"task": {"kind": "selective_copy", "tokens": 8}},
        "versions": {"selective_copy": 1},
    }


def test_a_default_that_is_written_out_changes_nothing():
    assert tiny_run(**{"model.dropout": 0.0, "train.schedule": "constant"}).run_id == tiny_run().run_id
    assert tiny_run(**{"model.position": [{"kind": "cope", "p_max": 64}]}) == tiny_run(**{"model.position": ["cope"]})


def test_a_data_seed_is_part_of_the_id():
    assert tiny_run(**{"task.data_seed": None}).run_id == tiny_run().run_id
    assert tiny_run(**{"task.data_seed": 0}).run_id != tiny_run().run_id


VARIANTS = {"capped": {"relative.far": "last"}}


def test_variants_have_metrics_of_their_own_and_are_part_of_the_id():
    relative = {"model.position": ["relative"]}
    run, nested = (
        tiny_run(**relative | {"evaluate.variants": variants})
        for variants in (VARIANTS, {"capped": {"relative": {"far": "last"}}})
    )
    assert run == nested
    assert hash(run) == hash(nested)
    assert run.run_id == nested.run_id != tiny_run(**relative).run_id
    assert tiny_run(**relative | {"evaluate.variants": {}}).run_id == tiny_run(**relative).run_id
    assert run.variant("capped") == (Relative(far="last"),)
    assert {"capped/in_dist/token_error", "in_dist/token_error"} <= set(run.metrics)
    assert not [name for name in run.metrics_in_training if "capped" in name]
    assert RunSpec.model_validate_json(run.model_dump_json()) == run


def test_one_evaluation_has_one_id_however_a_variant_is_written():
    def run_id(position="rope", **changes):
        return tiny_run(**{"model.position": [position], "evaluate.variants": {"long": {"rope": changes}}}).run_id

    pi = {"scaling": "pi", "factor": 2}
    same = [{"factor": 2.0}, {"trained": None}, {"base": 10000}, {"base": 10_000.0, "rotated": 1}]
    assert {run_id(**pi | each) for each in same} == {run_id(**pi)}
    halved = {"kind": "rope", "base": 5000}
    assert run_id(halved, **pi) == run_id(halved, **pi, base=5000.0) != run_id(halved, **pi, base=10_000)
    two = {"model.layers": 2, "model.position": [{"kind": "rope", "layers": [n], "base": 10.0 + n} for n in range(2)]}
    one = tiny_run(**two | {"evaluate.variants": {"same": {"rope.base": 10}}})
    assert one.identity["spec"]["evaluate"]["variants"] == {"same": {"rope": {"base": 10}}}


def test_the_versions_of_variants_are_part_of_the_id():
    part = {"model.dim": 8, "evaluate.variants": {"part": {"rope.rotated": 0.75}}}
    assert tiny_run(**part | {"model.position": ["rope"]}).versions["rope"] == 2


@pytest.mark.parametrize(
    ("variants", "code", "key"),
    [
        ({"capped": {"relative.positions": 3}}, "variant_of_parameters", "evaluate.variants.capped"),
        ({"capped": {"cope.gate": "values"}}, "variant_of_no_encoding", "evaluate.variants.capped.cope"),
        ({"capped": {"relative.fra": "last"}}, "unknown_key", "evaluate.variants.capped.relative"),
        ({"capped": {"relative.far": "lsat"}}, "literal_error", "relative.far"),
        ({"capped": {"relative": "last"}}, "dict_type", "evaluate.variants.capped.relative"),
        ({"capped": {"relative": {}}}, "no_effect", "evaluate.variants.capped"),
        ({"capped": {"relative.far": "none"}}, "no_effect", "evaluate.variants.capped"),
        ({"in_dist": {"relative.far": "last"}}, "variant_of_split", "evaluate.variants.in_dist"),
        ({"a/b": {"relative.far": "last"}}, "string_pattern_mismatch", "evaluate.variants.a/b.[key]"),
    ],
)
def test_impossible_variants_are_errors(variants, code, key):
    with raises(code, key=key):
        tiny_run(**{"model.position": ["relative"], "evaluate.variants": variants})


def test_a_variant_in_more_layers_needs_parameters_that_they_share():
    def run(kind, layers, changed, **fields):
        position = [{"kind": kind, "layers": layers, **fields}]
        variants = {"moved": {kind: {"layers": changed}}}
        return tiny_run(**{"model.layers": 2, "model.position": position, "evaluate.variants": variants})

    for layers in (None, [1]):
        with raises("variant_of_parameters", key="evaluate.variants.moved", kind="cope"):
            run("cope", [0], layers)
    for accepted in (run("cope", None, [1]), run("cope", [0], None, share_layers=True), run("alibi", [0], None)):
        assert accepted.variant("moved")[0].serves(1)


def test_the_version_of_dropout_is_part_of_the_ids_of_runs_that_have_it(monkeypatch):
    """Version 2: masks no longer depend on how a batch is divided. Runs without dropout keep their ids."""
    run, without = tiny_run(**{"model.dropout": 0.1}), tiny_run().run_id
    assert run.versions == {"selective_copy": 1, "model.dropout": 2}
    assert "model.dropout" not in tiny_run(**{"model.dropout": 0.0}).versions
    assert run.run_id == "bc6b840faa141cfd"
    monkeypatch.setattr("cope_sweep.config.run.DROPOUT_VERSION", 3)
    assert tiny_run(**{"model.dropout": 0.1}).run_id != run.run_id
    assert tiny_run().run_id == without


FAMILY, OPTIMIZER, SCHEDULE = "model.family", "train.optimizer", "train.schedule"


@pytest.mark.parametrize(
    ("key", "cls", "name"),
    [(FAMILY, cls, f"family.{kind}") for kind, cls in FAMILIES.items()]
    + [(OPTIMIZER, cls, f"optimizer.{kind}") for kind, cls in OPTIMIZERS.items()]
    + [(SCHEDULE, cls, f"schedule.{kind}") for kind, cls in SCHEDULES.items()]
    + [("model.position", cls, kind) for kind, cls in ENCODINGS.items()],
)
def test_every_version_is_part_of_the_identity(monkeypatch, key, cls, name):
    """Version 1 of families, optimisers and schedules is not listed: ids are older than these versions."""
    kind = name.rpartition(".")[2]
    value = [kind] if key == "model.position" else kind
    others = {key: [] if key == "model.position" else next(k for k in REGISTRIES[key] if k != kind)}
    used, unused = tiny_run(**{key: value}), tiny_run(**others)
    before, unused_before = used.run_id, unused.run_id
    assert used.versions.get(name, 1) == cls.VERSION
    assert (name in used.versions) == (key == "model.position" or cls.VERSION > 1)
    monkeypatch.setattr(cls, "VERSION", cls.VERSION + 1)
    assert tiny_run(**{key: value}).versions[name] == cls.VERSION
    assert tiny_run(**{key: value}).run_id != before
    assert tiny_run(**others).run_id == unused_before


REGISTRIES = {FAMILY: FAMILIES, OPTIMIZER: OPTIMIZERS, SCHEDULE: SCHEDULES}


@pytest.mark.parametrize(
    ("key", "value", "code", "data"),
    [
        ("model.heads", 3, "invalid_value", {"key": "model.heads", "value": 3, "allowed": [1, 2, 4]}),
        ("model.context", 3, "invalid_value", {"key": "model.context", "value": 3, "smallest": 8}),
        ("evaluate.contexts", [64], "invalid_value", {"key": "evaluate.contexts", "task": "selective_copy"}),
        ("evaluate.positions", 64, "invalid_value", {"key": "evaluate.positions", "task": "selective_copy"}),
        ("evaluate", {"contexts": [64, 32, 64]}, "invalid_value", {"key": "evaluate.contexts", "value": 64}),
        ("evaluate", {"positions": 64, "stride": 8}, "no_effect", {"key": "evaluate.stride"}),
        ("evaluate", {"contexts": [64, 32], "stride": 33}, "invalid_value", {"key": "evaluate.stride", "largest": 32}),
        ("evaluate", {"lengths": [2, 4, 2]}, "invalid_value", {"key": "evaluate.lengths", "value": 2}),
        ("train.warmup", 99, "invalid_value", {"key": "train.warmup", "value": 99, "largest": 6}),
        ("model.position", [{"kind": "cope", "p_max": 0}], "greater_than_equal", {"ge": 1}),
        ("model.position", ["learned"], "union_tag_invalid", {"tag": "learned"}),
        ("train.schedule", {"kind": "cosine", "cycles": 2}, "extra_forbidden", {}),
    ],
)
def test_impossible_runs_are_refused(key, value, code, data):
    with raises(code, **data):
        tiny_run(**{key: value})


def test_a_validation_set_is_evaluated_where_it_is_wanted():
    plain, validated = tiny_run(), tiny_run(**{"evaluate.validation": True})
    assert tiny_run(**{"evaluate.validation": False}).run_id == plain.run_id != validated.run_id
    assert plain.test_sets == plain.task.TESTS
    assert validated.test_sets == (*plain.task.TESTS, "validation")
    assert "validation/token_error" in validated.metrics
    assert "validation/token_error" in validated.metrics_in_training
    assert not any(name.startswith("validation/") for name in plain.metrics)
    with raises("variant_of_split", key="evaluate.variants.validation"):
        tiny_run(**{"model.position": ["relative"], "evaluate.variants": {"validation": {"relative.far": "last"}}})
