import pytest
from pydantic import ValidationError

from cope_sweep.config import Resources, RunSpec
from cope_sweep.config.ablation import Ablation
from cope_sweep.config.explain import SYNONYMS, explain, suggest
from cope_sweep.config.run import EvaluateSpec, ModelSpec, TrainSpec
from cope_sweep.config.source import dotted
from tests.config.ablations import TEXT, error_of


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("steps: 6", "stepz: 6", "test.yaml:5: base.train.stepz: unknown key 'stepz'; did you mean 'steps'? accepted: batch,"),
        ("dim: 8", 'dim: "8"', 'test.yaml:4: base.model.dim: "8" is not a whole number'),
        ("heads: 2", "heads: 3", "test.yaml:4: base.model: model.heads = 3 does not divide model.dim = 8; heads that do: 1, 2, 4"),
        ("selective_copy", "selectiv_copy", "test.yaml:3: base.task: unknown kind 'selectiv_copy'; did you mean 'selective_copy'? accepted: flip_flop"),
        ("tokens: 2", "tokenz: 2", "test.yaml:3: base.task.tokenz: unknown key 'tokenz'; did you mean 'tokens'? accepted: blanks"),
        ("kind: selective_copy, ", "", "test.yaml:3: base.task: {\"tokens\": 2, \"blanks\": 2, \"dense_blanks\": 1, \"sparse_bla… has no `kind`; accepted: flip_flop"),
        ("[cope]", "[coppe]", "test.yaml:7: model.position[0]: unknown kind 'coppe'; did you mean 'cope'? accepted: absolute"),
        ("[cope]", "[{kind: cope, pmax: 3}]", "test.yaml:7: model.position[0].pmax: unknown key 'pmax'; did you mean 'p_max'?"),
        ("[cope]", "[{kind: cope, p_max: some}]", "test.yaml:7: model.position[0].p_max: \"some\" is not"),
        ("[cope]", "[{p_max: 3}]", "test.yaml:7: model.position[0]: {\"p_max\": 3} has no `kind`; accepted: absolute"),
        ("[cope]", "cope", 'test.yaml:7: model.position: "cope" is not a list'),
        ("steps: 6", "steps: 6, schedule: linaer", "unknown kind 'linaer'; did you mean 'linear'?"),
        (
            "title: A test",
            "title: A test\nresources: {precision: bf61}",
            "\"bf61\" is not one of the choices; did you mean 'bf16'?",
        ),
        ("steps: 6", "learning_rate: 0.1", "test.yaml:5: base.train.learning_rate: unknown key 'learning_rate'; did you mean 'lr'?"),
        ("train.lr:", "train.learning_rate:", "unknown key 'learning_rate'; did you mean 'lr'?"),
        ("steps: 6", "steps: true", "test.yaml:5: base.train.steps: true is not a whole number"),
        ("steps: 6", "eps: tiny", 'test.yaml:5: base.train.eps: "tiny" is not a number'),
        ("steps: 6", "betas: [0.9, high]", 'test.yaml:5: base.train.betas[1]: "high" is not a number'),
        ("steps: 6", "steps: 0", "test.yaml:5: base.train.steps: 0: input should be greater than or equal to 1"),
        ("dim: 8", "tied: 1, dim: 8", "test.yaml:4: base.model.tied: 1 is not true or false"),
        ("train: {steps: 6}", "train: 6", "test.yaml:5: base.train: 6 is not a mapping"),
        ("train.lr: [", "train.steps.x: [", "test.yaml:8: train.steps.x: train.steps is 6, which has no keys"),
        ("title: A test", "title: 3", "test.yaml:1: title: 3 is not text"),
    ],
)  # fmt: skip
def test_messages_name_file_line_key_value_and_what_is_accepted(before, after, message):
    assert before in TEXT
    assert message in error_of(TEXT.replace(before, after))


def test_all_problems_are_reported_together():
    text = TEXT.replace("dim: 8", "dimm: 8").replace("steps: 6", "stepz: 6").replace("[cope]", "[coppe]")
    assert len(error_of(text).splitlines()) == 3


def test_paths_do_not_contain_the_tags_of_unions():
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(
            {"task": {"kind": "counting", "variables": "x"}, "model": {"position": [{"kind": "t5", "buckets": "x"}]}}
        )
    paths = [dotted(explain(error, RunSpec)[0]) for error in caught.value.errors()]
    assert paths == ["task.variables", "model.position[0].buckets"]


def test_suggestions():
    assert suggest("lauers", ["layers", "heads"]) == "; did you mean 'layers'? accepted: layers, heads"
    assert suggest("zzz", iter(["layers", "heads"])) == "; accepted: layers, heads"
    assert suggest("zzz", []) == ""


def test_names_of_other_libraries_are_known():
    accepted = ["batch", "lr", "steps", "warmup", "weight_decay"]
    assert suggest("Learning-Rate", accepted).startswith("; did you mean 'lr'?")
    assert suggest("wd", accepted).startswith("; did you mean 'weight_decay'?")
    assert suggest("max_steps", accepted).startswith("; did you mean 'steps'?")
    assert suggest("warmup_steps", accepted).startswith("; did you mean 'warmup'?"), "not the similar `steps`"
    assert suggest("learning_rate", ["train/loss"]) == "; accepted: train/loss", "only what is accepted"


def test_each_synonym_means_one_key_that_exists():
    names = [name for each in SYNONYMS.values() for name in each]
    assert len(names) == len(set(names))
    models = (ModelSpec, TrainSpec, EvaluateSpec, Ablation, Resources)
    fields = {name for model in models for name in model.model_fields}
    assert set(SYNONYMS) <= fields
    assert not fields & set(names)


def test_suggestions_ignore_case():
    assert suggest("Cope", ["none", "CoPE"]) == "; did you mean 'CoPE'? accepted: none, CoPE"
    assert suggest("FLIPFLOP", ["flip_flop", "code"]).startswith("; did you mean 'flip_flop'?")
    assert suggest("ROPE", ["RoPE", "rope"]) == "; did you mean 'RoPE'? accepted: RoPE, rope"
