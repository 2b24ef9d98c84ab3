import json
import textwrap

import pytest

from cope_sweep.plan import expand
from cope_sweep.spec import Ablation, SpecError, load_ablation, name_of, with_overrides
from cope_sweep.spec.ablation import validate
from cope_sweep.spec.schema import ablation_schema
from cope_sweep.spec.source import parse_source

GOOD = textwrap.dedent("""\
    title: A test
    base:
      task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
      model: {dim: 8, heads: 2, layers: 1}
      train: {steps: 6}
    grid:
      model.position: {CoPE: [cope], none: []}
      train.lr: [1e-3, 2e-3]
    seeds: [0, 1]
    metrics: [{name: in_dist/token_error}]
    scales:
      wide: {set: {model.dim: 32}, seeds: [5], grid: {train.lr: [5e-3]}}
    """)


def loaded(text=GOOD):
    return validate(parse_source(text, "test.yaml"), "test")


def problem(text, **overrides):
    with pytest.raises(SpecError) as caught:
        expand(with_overrides(loaded(text), **overrides))
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("steps: 6", "stepz: 6", "test.yaml:5: base.train.stepz: unknown key 'stepz'; did you mean 'steps'? accepted: batch,"),
        ("dim: 8", 'dim: "8"', 'test.yaml:4: base.model.dim: "8" is not a whole number'),
        ("heads: 2", "heads: 3", "test.yaml:4: base.model: model.heads = 3 does not divide model.dim = 8; heads that do: 1, 2, 4"),
        ("selective_copy", "selectiv_copy", "test.yaml:3: base.task: unknown kind 'selectiv_copy'; did you mean 'selective_copy'?"),
        ("[cope]", "[coppe]", "test.yaml:7: model.position[0]: unknown kind 'coppe'; did you mean 'cope'? accepted: absolute"),
        ("[cope]", "[{kind: cope, pmax: 3}]", "test.yaml:7: model.position[0].pmax: unknown key 'pmax'; did you mean 'p_max'?"),
        ("[cope]", "[{kind: cope, p_max: some}]", "test.yaml:7: model.position[0].p_max: \"some\" is not"),
        ("[cope]", "[{p_max: 3}]", "test.yaml:7: model.position[0]: {\"p_max\": 3} has no `kind`"),
        ("[1e-3, 2e-3]", "[]", "the axis 'train.lr' is empty"),
        ("train.lr:", "train.rl:", "unknown key 'rl'"),
        ("seeds: [0, 1]", "seeds: [0, 0]", "test.yaml:9: seeds: seeds [0, 0] repeat"),
        ("seeds: [0, 1]", "seeds: []", "test.yaml:9: seeds"),
        ("token_error}", "tokn_error}", "did you mean 'in_dist/token_error'?"),
        ("title: A test\n", "", "test.yaml: the key 'title' is missing"),
        ("title:", "tilte:", "test.yaml:1: tilte: unknown key 'tilte'; did you mean 'title'?"),
        ("steps: 6", "steps: 6, schedule: linaer", "\"linaer\" is not one of the choices; did you mean 'linear'?"),
        ("seeds: [0, 1]", "seeds: [0]\nexclude: [{model.positoin: CoPE}]", "no axis is called 'model.positoin'; did you mean 'model.position'?"),
        ("seeds: [0, 1]", "seeds: [0]\nexclude: [{train.lr: [1e-3, 2e-3]}]", "no row left"),
        ("seeds: [0, 1]", "seeds: [0]\nzip: [{model.dim: [8, 16], model.heads: [1]}]", "model.dim has 2, model.heads has 1"),
    ],
)  # fmt: skip
def test_problems_name_file_line_key_value_and_way_out(before, after, message):
    assert before in GOOD
    assert message in problem(GOOD.replace(before, after))


def test_every_problem_is_told_at_once():
    text = GOOD.replace("dim: 8", "dimm: 8").replace("steps: 6", "stepz: 6").replace("[cope]", "[coppe]")
    assert len(problem(text).splitlines()) == 3


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.dimm=3", "--set model.dimm=3: base.model.dimm: unknown key"),
        ("model.dim=wide", '--set model.dim=wide: base.model.dim: "wide" is not a whole number'),
        ("modl.dim=3", "no key 'modl.dim'; it starts with one of task, model"),
        ("model.dim", "expected key=value"),
        ("seeds=[]", "--set seeds=[]: seeds"),
        ("seed=3", "no key 'seed'"),
        ("model.dim=[", "--set model.dim=["),
        ("resources.cpu=1", "unknown key 'cpu'; did you mean 'cpus'?"),
    ],
)
def test_problems_of_options_name_the_option(assignment, message):
    assert message in problem(GOOD, assignments=[assignment])


def test_overrides_replace_base_and_axes():
    plan = expand(with_overrides(loaded(), assignments=["model.dim=16", "train.lr=1e-2", "seeds=[3]"]))
    assert [run.model.dim for run in plan.runs] == [16, 16]
    assert {run.train.lr for run in plan.runs} == {0.01}
    assert {run.seed for run in plan.runs} == {3}
    assert [row.name for row in plan.rows] == ["CoPE", "none"]


def test_scales():
    plan = expand(with_overrides(loaded(), scale="wide"))
    assert {(run.model.dim, run.seed, run.train.lr) for run in plan.runs} == {(32, 5, 5e-3)}
    assert "unknown scale 'huge'; it has wide" in problem(GOOD, scale="huge")


TWO_AXES = GOOD.replace("train.lr: [1e-3, 2e-3]", "train.lr: {slow: 1e-3, fast: 2e-3}") + textwrap.dedent("""\
    published:
      - {match: {train.lr: slow, model.position: CoPE}, values: {in_dist/token_error: 1.0}}
      - {match: {train.lr: fast, model.position: CoPE}, values: {in_dist/token_error: 2.0}}
    exclude: [{train.lr: fast, model.position: none}]
    when: [{if: {train.lr: [slow, fast]}, set: {train.steps: 7}}, {if: {train.lr: slow}, set: {train.batch: 3}}]
    """)


@pytest.mark.parametrize(
    ("lr", "rows", "published", "steps", "batch"),
    [("2e-3", ["CoPE"], [2.0], 7, 64), ("1e-3", ["CoPE", "none"], [1.0], 7, 3), ("5e-3", ["CoPE", "none"], [], 6, 64)],
)
def test_what_is_said_of_an_axis_holds_where_it_is_fixed(lr, rows, published, steps, batch):
    plan = expand(with_overrides(loaded(TWO_AXES), assignments=[f"train.lr={lr}"]))
    assert [row.labels["model.position"] for row in plan.rows] == rows
    assert [each for row in plan.rows if row.published for each in row.published.values.values()] == published
    assert {(run.train.steps, run.train.batch) for run in plan.runs} == {(steps, batch)}


def test_a_scale_may_have_columns_of_its_own():
    text = GOOD.replace("scales:\n  wide: {", "scales:\n  wide: {metrics: [{name: dense/loss}], ")
    assert text != GOOD
    content = with_overrides(validate(parse_source(text, "file.yaml"), "file"), scale="wide").content
    assert [metric.name for metric in content.metrics] == ["dense/loss"]


def test_overrides_leave_the_rest_as_it_was():
    assert with_overrides(loaded()).content == loaded().content


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (["cope", "relative"], "cope+relative"),
        ([{"kind": "cope", "p_max": 16}], "cope(p_max=16)"),
        ([], "none"),
        (128, "128"),
        (1e-3, "0.001"),
        (True, "true"),
        ("cosine", "cosine"),
    ],
)
def test_names_of_values(value, name):
    assert name_of(value) == name


def test_the_published_schema_is_the_current_one(request):
    published = json.loads((request.config.rootpath / "ablations" / "schema.json").read_text())
    assert published == ablation_schema(), "write it anew: cope-sweep schema > ablations/schema.json"


def test_the_schema_knows_every_key():
    schema = ablation_schema()
    assert set(schema["properties"]) == set(Ablation.model_json_schema()["properties"])
    assert set(schema["properties"]["base"]["properties"]) == {"task", "model", "train", "evaluate"}


def test_a_file_s_name_is_the_ablation_s(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert load_ablation(tmp_path / "mine.yaml").name == "mine"
