import pytest
from pydantic import ValidationError

from cope_sweep.config import Resources, RunSpec
from cope_sweep.config.ablation import Ablation
from cope_sweep.config.explain import SYNONYMS, explain, suggest
from cope_sweep.config.run import EvaluateSpec, ModelSpec, TrainSpec
from cope_sweep.config.source import dotted
from tests.helpers.ablation_texts import TEXT, error_of, located


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("steps: 6", "stepz: 6", ("unknown_key", "test.yaml:5", "base.train.stepz")),
        ("dim: 8", 'dim: "8"', ("wrong_type", "test.yaml:4", "base.model.dim")),
        ("heads: 2", "heads: 3", ("invalid_value", "test.yaml:4", "base.model")),
        ("selective_copy", "selectiv_copy", ("unknown_kind", "test.yaml:3", "base.task")),
        ("selective_copy", "1.10", ("unknown_kind", "test.yaml:3", "base.task")),
        ("tokens: 2", "tokenz: 2", ("unknown_key", "test.yaml:3", "base.task.tokenz")),
        ("kind: selective_copy, ", "", ("missing_kind", "test.yaml:3", "base.task")),
        ("[cope]", "[coppe]", ("unknown_kind", "test.yaml:7", "model.position[0]")),
        ("[cope]", "[{kind: cope, pmax: 3}]", ("unknown_key", "test.yaml:7", "model.position[0].pmax")),
        ("[cope]", "[{kind: cope, p_max: some}]", ("wrong_type", "test.yaml:7", "model.position[0].p_max")),
        ("[cope]", "[{p_max: 3}]", ("missing_kind", "test.yaml:7", "model.position[0]")),
        ("[cope]", "cope", ("wrong_type", "test.yaml:7", "model.position")),
        ("steps: 6", "steps: 6, schedule: linaer", ("unknown_kind", "test.yaml:5", "base.train.schedule")),
        (
            "title: A test",
            "title: A test\nresources: {precision: bf61}",
            ("unknown_choice", "test.yaml:2", "resources.precision"),
        ),
        ("steps: 6", "learning_rate: 0.1", ("unknown_key", "test.yaml:5", "base.train.learning_rate")),
        ("train.lr:", "train.learning_rate:", ("unknown_key", "test.yaml:8", "train.learning_rate")),
        ("steps: 6", "steps: true", ("wrong_type", "test.yaml:5", "base.train.steps")),
        ("steps: 6", "eps: tiny", ("wrong_type", "test.yaml:5", "base.train.eps")),
        ("steps: 6", "betas: [0.9, high]", ("wrong_type", "test.yaml:5", "base.train.betas[1]")),
        ("steps: 6", "steps: 0", ("invalid_value", "test.yaml:5", "base.train.steps")),
        ("dim: 8", "tied: 1, dim: 8", ("wrong_type", "test.yaml:4", "base.model.tied")),
        ("train: {steps: 6}", "train: 6", ("wrong_type", "test.yaml:5", "base.train")),
        ("train.lr: [", "train.steps.x: [", ("no_keys", "test.yaml:8", "train.steps.x")),
        ("title: A test", "title: 3", ("wrong_type", "test.yaml:1", "title")),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_key(before, after, expected):
    assert before in TEXT
    assert located(error_of(TEXT.replace(before, after))) == expected


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("steps: 6", "stepz: 6", ["'stepz'", "'steps'", "batch"]),
        ("steps: 6", "learning_rate: 0.1", ["'learning_rate'", "'lr'"]),
        ("[cope]", "[coppe]", ["'coppe'", "'cope'", "absolute"]),
        ("[cope]", "[learned_decay]", ["'learned_decay'", "absolute", "COPE_SWEEP_PLUGINS"]),
        ("selective_copy", "1.10", ["1.1 is not text; quote it", "flip_flop"]),
        ("kind: selective_copy, ", "", ['{"tokens": 2, "blanks": 2', "flip_flop"]),
        ("steps: 6", "betas: [0.9, high]", ['"high"', "a number"]),
        ("heads: 2", "heads: 3", ["model.heads = 3", "model.dim = 8", "1, 2, 4"]),
        ("[1e-3, 2e-3]", "64", ["grid.train.lr: 64 is not a list; write [64], or 64 is not a mapping"]),
    ],
)
def test_messages_name_the_value_and_what_is_accepted(before, after, named):
    message = str(error_of(TEXT.replace(before, after)))
    assert all(each in message for each in named)


def test_all_problems_are_reported_together():
    text = TEXT.replace("dim: 8", "dimm: 8").replace("steps: 6", "stepz: 6").replace("[cope]", "[coppe]")
    error = error_of(text)
    assert len(str(error).splitlines()) == len(error.data["problems"]) == 3


def test_paths_do_not_contain_the_tags_of_unions():
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(
            {"task": {"kind": "counting", "variables": "x"}, "model": {"position": [{"kind": "t5", "buckets": "x"}]}}
        )
    paths = [dotted(explain(error, RunSpec).path) for error in caught.value.errors()]
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
