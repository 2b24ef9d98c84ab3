import math
import sys
import textwrap
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cope_sweep import figures
from cope_sweep.config import (
    default_label,
    expand,
    with_overrides,
)
from cope_sweep.config.ablation import Claim, Distribution
from cope_sweep.config.loading import validate
from cope_sweep.config.points import agreeing_rows
from cope_sweep.config.source import parse_source
from cope_sweep.read.figures.kinds.curves import Curves
from cope_sweep.read.figures.kinds.maps import Maps
from cope_sweep.read.figures.kinds.values import Values
from tests.helpers.ablation_texts import TEXT, error_of, load, located
from tests.helpers.errors import raises


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("[1e-3, 2e-3]", "[]", ("invalid_value", "test.yaml:8", "grid.train.lr")),
        ("[5e-3]", "{}", ("invalid_value", "test.yaml:12", "scales.wide.grid.train.lr")),
        ("seeds: [0, 1]", "when: [{if: {}, grid: {model.layers: []}}]", ("invalid_value", "test.yaml:9", "when[0].grid.model.layers")),
        ("[1e-3, 2e-3]", "1e-3", ("wrong_type", "test.yaml:8", "grid.train.lr")),
        ("seeds: [0, 1]", "seeds: [0, 0]", ("invalid_value", "test.yaml:9", "seeds")),
        ("seeds: [0, 1]", "seeds: []", ("invalid_value", "test.yaml:9", "seeds")),
        ("seeds: [0, 1]", "seeds: [0, -1]", ("invalid_value", "test.yaml:9", "seeds[1]")),
        ("seeds: [0, 1]", "seeds: [2147483648]", ("invalid_value", "test.yaml:9", "seeds[0]")),
        ("seeds: [5]", "seeds: [-5]", ("invalid_value", "test.yaml:12", "scales.wide.seeds[0]")),
        ("title: A test\n", "", ("missing_key", "test.yaml", "")),
        ("title:", "tilte:", ("missing_key", "test.yaml", "")),
        ("token_error}", "token_error, goal: mni}", ("unknown_choice", "test.yaml:10", "metrics[0].goal")),
        ("seeds: [0, 1]", "plugins: [my-package]", ("plugin_name", "test.yaml:9", "plugins[0]")),
        ("seeds: [0, 1]", "plugins: [a, b..c]", ("plugin_name", "test.yaml:9", "plugins[1]")),
        ("seeds: [0, 1]", "plugins: [my.class]", ("plugin_name", "test.yaml:9", "plugins[0]")),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_key(before, after, expected):
    assert before in TEXT
    assert located(error_of(TEXT.replace(before, after))) == expected


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
    error = error_of(with_plugins(plugin("spec_test_empty", ""), "spec_test_missing"))
    assert located(error) == ("plugin_not_loaded", "test.yaml:9", "plugins[1]")
    assert error.data["plugin"] == "spec_test_missing"


def test_plugins_can_be_refused_and_are_not_imported_then(plugin):
    text = with_plugins(plugin("spec_test_refused"))
    with raises("plugins_refused", place="sent:9", plugins=["spec_test_refused"]):
        validate(parse_source(text, "sent"), "sent", allow_plugins=False)
    assert "spec_test_refused" not in sys.modules
    assert validate(parse_source(TEXT, "sent"), "sent", allow_plugins=False).content.plugins == []


PLUGGED_FIGURE = textwrap.dedent("""\
    from typing import Literal

    from cope_sweep.figures import FIGURES
    from cope_sweep.read.figures.kinds.curves import Curves


    @FIGURES.register
    class TestFigure(Curves):
        kind: Literal["KIND"] = "KIND"
    """)


def test_a_plugin_brings_the_kind_of_a_figure(plugin, monkeypatch):
    """Figures are validated with the rest of the file, so its plugins are imported before."""
    monkeypatch.setattr(figures.FIGURES, "_classes", {**figures.FIGURES})
    monkeypatch.setattr(figures.FIGURES, "_validator", None)
    plugin("spec_test_figure", PLUGGED_FIGURE)
    text = f"{TEXT}figures: [{{kind: spec_test_figure, metrics: [train/loss]}}]\n"
    assert "COPE_SWEEP_PLUGINS" in str(error_of(text))
    (figure,) = load(f"{text}plugins: [spec_test_figure]\n").content.figures
    assert figure.kind == "spec_test_figure"


# -- figures -----------------------------------------------------------------------------------------------------------


FIGURES = """\
figures:
  - {kind: curves, metrics: [in_dist/token_error, sparse/loss], best: true, source: Figure 5}
  - {kind: values, x: train.lr, metrics: [train/loss], log_x: true}
  - {kind: maps, show: gates, rows: {model.position: CoPE, train.lr: 1e-3}, mark: data, heads: [[0, 1]], seed: 1}
"""


def test_figures_are_typed():
    curves, values, maps = load(TEXT + FIGURES).content.figures
    assert curves == Curves(metrics=["in_dist/token_error", "sparse/loss"], source="Figure 5", best=True)
    assert values == Values(x="train.lr", metrics=["train/loss"], log_x=True)
    assert maps == Maps(
        show="gates", rows={"model.position": "CoPE", "train.lr": 1e-3}, mark="data", heads=[(0, 1)], seed=1
    )
    assert expand(load(TEXT + FIGURES)).rows


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("kind: curves", "kind: curve", ("unknown_kind", "test.yaml:14", "figures[0]")),
        ("kind: curves, metrics: [in_dist/token_error, sparse/loss], best: true", "kind: summary", ("unknown_kind", "test.yaml:14", "figures[0]")),
        ("{kind: curves, metrics: [in_dist/token_error, sparse/loss], best: true, source: Figure 5}", "maps", ("wrong_type", "test.yaml:14", "figures[0]")),
        ("sparse/loss", "sparse/los", ("unknown_metric", "test.yaml:14", "figures[0].metrics[1]")),
        ("x: train.lr", "x: train.lrs", ("unknown_axis", "test.yaml:15", "figures[1].x")),
        ("train.lr: 1e-3}", "train.lr: 5e-3}", ("matching_rows", "test.yaml:16", "figures[2].rows")),
        (", train.lr: 1e-3}", "}", ("matching_rows", "test.yaml:16", "figures[2].rows")),
        ("train.lr: 1e-3}", "train.rl: 1e-3}", ("unknown_axis", "test.yaml:16", "figures[2].rows.train.rl")),
        ("seed: 1}", "seed: 9}", ("unknown_seed", "test.yaml:16", "figures[2].seed")),
        ("kind: curves, metrics: [in_dist/token_error, sparse/loss], best: true", "kind: contexts, metric: in_dist/loss", ("no_contexts", "test.yaml:14", "figures[0]")),
        ("kind: curves, metrics: [in_dist/token_error, sparse/loss], best: true", "kind: contexts, metric: test/position_perplexity", ("no_positions", "test.yaml:14", "figures[0]")),
    ],
)  # fmt: skip
def test_errors_of_figures_name_their_line(before, after, expected):
    assert before in FIGURES
    assert located(error_of(TEXT + FIGURES.replace(before, after))) == expected


def test_curves_of_rates_can_be_declared():
    text = f"{TEXT}figures: [{{kind: curves, metrics: [train/lr]}}]\n"
    assert expand(load(text)).ablation.content.figures[0].metrics == ["train/lr"]
    assert located(error_of(text.replace("train/lr", "train/lr_positions")))[0] == "unknown_metric"


def test_what_is_fixed_leaves_the_figures():
    plan = expand(with_overrides(load(TEXT + FIGURES), assignments=["train.lr=1e-3", "seeds=[1]"]))
    curves, maps = plan.ablation.content.figures
    assert (curves.kind, maps.kind) == ("curves", "maps")
    assert [row.figures for row in plan.rows] == [{0, 1}, {0}]
    others = expand(with_overrides(load(TEXT + FIGURES), assignments=["train.lr=5e-3", "seeds=[1]"]))
    assert [figure.kind for figure in others.ablation.content.figures] == ["curves"], "the row of the maps is gone"


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("when: [{if: {model.position: CoPE}}]", ("invalid_value", "test.yaml:11", "when[0]")),
        ("published: [{match: {}, values: {in_dist/token_error: 1}, std: {dense/token_error: 1}}]",
         ("invalid_value", "test.yaml:11", "published[0]")),
        ("published: [{match: {}, values: {in_dist/token_error: 1}, std: {in_dist/token_error: -1}}]",
         ("invalid_value", "test.yaml:11", "published[0].std.in_dist/token_error")),
        ("claims: [{text: x, better: {model.position: CoPE}, than: {model.position: CoPE}}]",
         ("matching_rows", "test.yaml:11", "claims[0].than")),
        ("when: [{if: {model.position: CoPE}, set: {train: {steps: 3, lr: 1}}}]",
         ("no_effect", "test.yaml:11", "when[0].set.train")),
        ("when: [{if: {train.batch: 8}, set: {train.steps: 3}}, {if: {}, grid: {train.batch: [8, 16]}}]",
         ("no_effect", "test.yaml:11", "when[0].if")),
        ("exclude: [{model.position: CoPE, train.lr: 1e-3}, {model.position: none, train.lr: 1e-3}]\n"
         "when: [{if: {model.position: CoPE, train.lr: 2e-3}, set: {train.lr: 1e-3}},"
         " {if: {model.position: CoPE, train.lr: 2e-3}, set: {train.batch: 8}}]",
         ("no_effect", "test.yaml:12", "when[1].if")),
        ("when: [{if: {train.lr: 2e-3}, set: {train.lr: 1e-3}}]\nexclude: [{train.lr: 2e-3}]",
         ("no_effect", "test.yaml:12", "exclude[0]")),
        ("when: [{if: {train.lr: 2e-3}, set: {train.lr: 1e-3}}]\n"
         "published: [{match: {train.lr: 2e-3}, values: {in_dist/loss: 1}}]", ("no_effect", "test.yaml:12", "published[0].match")),
    ],
)  # fmt: skip
def test_what_cannot_act_is_refused(added, expected):
    assert located(error_of(TEXT.replace("scales:", f"{added}\nscales:"))) == expected


def test_a_claim_needs_a_pair_of_rows_that_agree_otherwise():
    text = TEXT.replace("scales:", "exclude: [{model.position: CoPE, train.lr: 1e-3}, {model.position: none, train.lr: 2e-3}]\n"
                        "claims: [{text: x, better: {model.position: CoPE}, than: {model.position: none}}]\nscales:")  # fmt: skip
    assert located(error_of(text)) == ("no_pair", "test.yaml:12", "claims[0].than")


def test_a_claim_of_a_scale_is_checked_against_its_rows():
    claims = "claims: [{text: x, better: {model.position: CoPE}, than: {model.position: CoPE}}]"
    error = error_of(TEXT.replace("wide: {", f"wide: {{{claims}, "), scale="wide")
    assert located(error) == ("matching_rows", "test.yaml:12", "claims[0].than")


def test_a_margin_has_one_spelling():
    claim = {"text": "x", "better": {}, "than": {}, "says": "equivalent"}
    identities = [Claim(**claim, margin=margin).identity("a") for margin in ("1 %", "1%", "1.0 %", "2 %")]
    assert len(set(identities[:3])) == 1 < len(set(identities))


def test_two_columns_of_one_metric_are_refused():
    text = TEXT.replace(
        "{name: in_dist/token_error}", "{name: in_dist/token_error}, {name: in_dist/token_error, scale: 0.01}"
    )
    assert located(error_of(text)) == ("invalid_value", "test.yaml:10", "metrics")


LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"))


@given(st.lists(LABELS, max_size=6), st.lists(LABELS, max_size=6), st.sets(st.sampled_from("abc")))
def test_rows_agree_on_the_axes_that_both_have(rows, others, except_keys):
    rows, others = ([SimpleNamespace(labels=labels) for labels in each] for each in (rows, others))
    expected = [
        (row, other)
        for row in rows
        for other in others
        if all(other.labels.get(key, label) == label for key, label in row.labels.items() if key not in except_keys)
    ]
    assert list(agreeing_rows(rows, others, except_keys)) == expected


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
    ("distribution", "code", "data"),
    [
        ({}, "no_distribution", {}),
        ({"uniform": [0, 1], "choice": [1]}, "several_distributions", {"given": ["uniform", "choice"]}),
        ({"uniform": [1, 1]}, "invalid_value", {"key": "uniform", "value": [1, 1]}),
        ({"int_uniform": [4, 1]}, "invalid_value", {"key": "int_uniform", "value": [4, 1]}),
        ({"log_uniform": [0, 1]}, "invalid_value", {"key": "log_uniform", "value": 0}),
        ({"log_int_uniform": [0, 8]}, "invalid_value", {"key": "log_int_uniform", "value": 0}),
        ({"choice": []}, "too_short", {"key": "choice"}),
        ({"choice": ["a", "b", "a"]}, "invalid_value", {"key": "choice", "value": "a"}),
        ({"int_uniform": [1, 2.5]}, "int_type", {"key": "int_uniform.1"}),
        ({"uniform": [1]}, "missing", {"key": "uniform.1"}),
        ({"uniform": ["0", 1]}, "float_type", {"key": "uniform.0"}),
    ],
)
def test_impossible_distributions_are_refused(distribution, code, data):
    with raises(code, **data):
        Distribution.model_validate(distribution)
