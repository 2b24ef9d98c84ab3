import math
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cope_sweep.config import (
    SpecError,
    default_label,
    expand,
    with_overrides,
)
from cope_sweep.config.ablation import Curves, Distribution, Maps, Values
from cope_sweep.config.loading import validate
from cope_sweep.config.source import parse_source
from tests.config.ablations import TEXT, error_of, load


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[1e-3, 2e-3]", "[]", "test.yaml:6: grid: the axis 'train.lr' is empty"),
        ("seeds: [0, 1]", "seeds: [0, 0]", "test.yaml:9: seeds: seeds [0, 0] contain duplicates"),
        ("seeds: [0, 1]", "seeds: []", "test.yaml:9: seeds: []: list should have at least 1 item"),
        ("seeds: [0, 1]", "seeds: [0, -1]", "test.yaml:9: seeds[1]: -1: input should be greater than or equal to 0"),
        ("seeds: [0, 1]", "seeds: [2147483648]", "test.yaml:9: seeds[0]: 2147483648: input should be less than 2147483648"),
        ("seeds: [5]", "seeds: [-5]", "test.yaml:12: scales.wide.seeds[0]: -5: input should be greater"),
        ("title: A test\n", "", "test.yaml: the key 'title' is missing"),
        ("title:", "tilte:", "test.yaml:1: tilte: unknown key 'tilte'; did you mean 'title'?"),
        ("seeds: [0, 1]", "zip: [{model.dim: [8, 16], model.heads: [1]}]", "model.dim has 2, model.heads has 1"),
        ("seeds: [0, 1]", "zip: [{model.dim: []}]", "at least one: model.dim has 0"),
        ("token_error}", "token_error, goal: mni}", 'metrics[0].goal: "mni" is not one of the choices; did you mean \'min\'?'),
        ("seeds: [0, 1]", "plugins: [my-package]", "test.yaml:9: plugins[0]: 'my-package' is not the name of a Python module"),
        ("seeds: [0, 1]", "plugins: [a, b..c]", "test.yaml:9: plugins[1]: 'b..c' is not the name of a Python module"),
        ("seeds: [0, 1]", "plugins: [my.class]", "'my.class' is not the name of a Python module"),
    ],
)  # fmt: skip
def test_errors_name_file_line_key_and_value(before, after, message):
    assert before in TEXT
    assert message in error_of(TEXT.replace(before, after))


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (["cope", "relative"], "cope+relative"),
        ([{"kind": "cope", "p_max": 16}], "cope(p_max=16)"),
        ({"capped": {"relative.far": "last"}}, "capped=relative.far=last"),
        ([], "none"),
        (128, "128"),
        (1e-3, "0.001"),
        (True, "true"),
        (None, "null"),
        ("cosine", "cosine"),
    ],
)
def test_default_labels(value, label):
    assert default_label(value) == label


def test_former_metric_names_are_replaced():
    text = TEXT.replace(
        "metrics: [{name: in_dist/token_error}]",
        "metrics: [{name: in_dist/commonest_error}]\n"
        "published: [{match: {train.lr: 1e-3}, values: {in_dist/commonest_error: 78.0}, std: {in_dist/commonest_error: 1.0}}]",
    ).replace("wide: {", "wide: {metrics: [{name: longer/commonest_error, label: Base}], ")
    content = load(text).content
    assert [metric.name for metric in content.metrics] == ["in_dist/majority_baseline_error"]
    assert content.published[0].values == {"in_dist/majority_baseline_error": 78.0}
    assert content.published[0].std == {"in_dist/majority_baseline_error": 1.0}
    assert [metric.name for metric in content.scales["wide"].metrics] == ["longer/majority_baseline_error"]


PLUGIN = textwrap.dedent("""\
    from typing import Literal

    from cope_sweep.positions import ENCODINGS
    from cope_sweep.positions.base import Encoding


    @ENCODINGS.register
    class TestEncoding(Encoding):
        kind: Literal["KIND"] = "KIND"
    """)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes a module into the folder that plugins are imported from, and returns its name."""

    def write(name, source=PLUGIN):
        (tmp_path / f"{name}.py").write_text(source.replace("KIND", name))
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    return write


def with_plugins(*names):
    return TEXT.replace("seeds: [0, 1]", f"plugins: [{', '.join(names)}]").replace("[cope]", f"[{names[0]}]")


def test_a_missing_plugin_is_an_error_with_its_line(plugin):
    message = error_of(with_plugins(plugin("spec_test_empty", ""), "spec_test_missing"))
    assert message.startswith("test.yaml:9: plugins[1]: the plugin spec_test_missing cannot be imported")
    assert "ModuleNotFoundError" in message


def test_plugins_can_be_refused_and_are_not_imported_then(plugin):
    text = with_plugins(plugin("spec_test_refused"))
    with pytest.raises(SpecError, match=r"sent:9: plugins: plugins \(spec_test_refused\) are not allowed here"):
        validate(parse_source(text, "sent"), "sent", allow_plugins=False)
    assert "spec_test_refused" not in sys.modules
    assert validate(parse_source(TEXT, "sent"), "sent", allow_plugins=False).content.plugins == []


# -- figures -----------------------------------------------------------------------------------------------------------


FIGURES = """\
figures:
  - {kind: curves, metrics: [in_dist/token_error, sparse/loss], source: Figure 5}
  - {kind: values, x: train.lr, metrics: [train/loss], log_x: true}
  - {kind: maps, show: gates, rows: {model.position: CoPE, train.lr: 1e-3}, mark: data, heads: [[0, 1]], seed: 1}
"""


def test_figures_are_typed():
    curves, values, maps = load(TEXT + FIGURES).content.figures
    assert curves == Curves(metrics=["in_dist/token_error", "sparse/loss"], source="Figure 5")
    assert values == Values(x="train.lr", metrics=["train/loss"], log_x=True)
    assert maps == Maps(
        show="gates", rows={"model.position": "CoPE", "train.lr": 1e-3}, mark="data", heads=[(0, 1)], seed=1
    )
    assert expand(load(TEXT + FIGURES)).rows


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("kind: curves", "kind: curve", "test.yaml:14: figures[0]: unknown kind 'curve'; did you mean 'curves'?"),
        ("sparse/loss", "sparse/los", "test.yaml:14: figures[0].metrics[1]: the task selective_copy has no metric 'sparse/los'"),
        ("x: train.lr", "x: train.lrs", "test.yaml:15: figures[1].x: no axis is called 'train.lrs'; did you mean 'train.lr'?"),
        ("train.lr: 1e-3}", "train.lr: 5e-3}", "test.yaml:16: figures[2].rows: 0 rows match, and this figure needs one row"),
        (", train.lr: 1e-3}", "}", "test.yaml:16: figures[2].rows: 2 rows match, and this figure needs one row"),
        ("train.lr: 1e-3}", "train.rl: 1e-3}", "test.yaml:16: figures[2].rows.train.rl: no axis is called 'train.rl'"),
        ("seed: 1}", "seed: 9}", "test.yaml:16: figures[2].seed: 9 is none of the seeds [0, 1]"),
        ("kind: curves, metrics: [in_dist/token_error, sparse/loss]", "kind: contexts, metric: in_dist/loss", "test.yaml:14: figures[0]: a figure of contexts needs evaluate.contexts"),
    ],
)  # fmt: skip
def test_errors_of_figures_name_their_line(before, after, message):
    assert before in FIGURES
    assert message in error_of(TEXT + FIGURES.replace(before, after))


def test_what_is_fixed_leaves_the_figures():
    fixed = with_overrides(load(TEXT + FIGURES), assignments=["train.lr=1e-3", "seeds=[1]"])
    curves, maps = fixed.content.figures
    assert isinstance(curves, Curves)
    assert maps.rows == {"model.position": "CoPE"}
    assert expand(fixed).rows


# -- distributions of a search space -----------------------------------------------------------------------------------


SHARES = st.floats(0, 1, exclude_max=True)
DISTRIBUTIONS = [
    Distribution(uniform=(0.0, 0.5)),
    Distribution(uniform=(-2.0, 1e-7)),
    Distribution(log_uniform=(1.23456e-4, 1.23456e-2)),
    Distribution(int_uniform=(1, 4)),
    Distribution(log_int_uniform=(1, 512)),
    Distribution(choice=["gpt2", ["cope", "rope"], 3, None, True]),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS[:5], ids=lambda d: d.kind)
@given(share=SHARES)
def test_numbers_are_within_the_bounds_and_short(distribution, share):
    value = distribution.value_at(share)
    low, high = distribution.bounds
    assert low <= value <= high
    assert isinstance(value, int) if distribution.is_int else isinstance(value, float)
    assert value in (low, high) or float(f"{value:.4g}") == value


def shares(count):
    return [(index + 0.5) / count for index in range(count)]


def test_each_decade_of_a_logarithm_is_equally_likely():
    values = [Distribution(log_uniform=(1e-4, 1e-1)).value_at(share) for share in shares(300)]
    decades = [math.floor(math.log10(value) + 1e-9) for value in values]
    assert [decades.count(decade) for decade in (-4, -3, -2)] == pytest.approx([100] * 3, abs=1)
    sizes = [Distribution(log_int_uniform=(1, 1024)).value_at(share) for share in shares(300)]
    assert sorted(sizes)[150] == pytest.approx(math.sqrt(0.5 * 1024), abs=1)
    assert min(sizes) == 1
    assert 1000 < max(sizes) <= 1024


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "no distribution given; give exactly one of uniform, log_uniform"),
        ({"uniform": [0, 1], "choice": [1]}, "uniform and choice given; give exactly one"),
        ({"uniform": [1, 1]}, r"uniform: \[1.0, 1.0\] is empty"),
        ({"int_uniform": [4, 1]}, r"int_uniform: \[4, 1\] is empty; write the lower bound first"),
        ({"log_uniform": [0, 1]}, "log_uniform: the lower bound 0.0 must be greater than 0"),
        ({"log_int_uniform": [0, 8]}, "the lower bound 0 must be greater than 0"),
        ({"choice": []}, "at least 1 item"),
        ({"choice": ["a", "b", "a"]}, "choice has a twice"),
        ({"int_uniform": [1, 2.5]}, "valid integer"),
        ({"uniform": [1]}, "Field required"),
        ({"uniform": ["0", 1]}, "valid number"),
    ],
)
def test_impossible_distributions_are_refused(data, message):
    with pytest.raises(ValidationError, match=message):
        Distribution.model_validate(data)
