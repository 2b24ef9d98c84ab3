"""Dashboard and alerts: their queries name metrics and labels that the service exposes after a real sweep."""

import json
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import promql_parser
import pytest
from cope_services.http.settings import Settings
from prometheus_client.parser import text_string_to_metric_families
from ruamel.yaml import YAML
from typer.main import get_command
from typer.testing import CliRunner

from cope_sweep.cli.application import app
from cope_sweep.sweep.leases import LEASE_S, RENEWAL_S
from tests.helpers.sample_store import TINY, serving

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
ALERTS = YAML(typ="safe", pure=True).load((FOLDER / "alerts.yaml").read_text())["groups"]
RULES = {rule["alert"]: rule for group in ALERTS for rule in group["rules"]}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    **{f"alert {name}": rule["expr"] for name, rule in RULES.items()},
    **{f"{panel['title']} {each['refId']}": each["expr"] for panel in PANELS for each in panel["targets"]},
}
OF_PROMETHEUS = {"up": {}}
"""Metrics that Prometheus itself makes, and the labels that it adds to every metric."""
TARGET_LABELS = {"job": {"service", "ray", "prometheus"}, "instance": set()}


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """Name → label → values of what the service exposes after a sweep, a score and a completion; and all values."""
    folder = tmp_path_factory.mktemp("monitored")
    (folder / "ablations").mkdir()
    (folder / "ablations" / "tiny.yaml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, ["run", "tiny", "--local", "--no-mlflow"])
        assert done.exit_code == 0, done.output
        with serving(Settings(ablations=folder / "ablations", store=str(folder / "store"), device="cpu")) as client:
            (first, *_) = client.get("/v1/models").json()["data"]
            body = {"model": first["id"], "prompt": [1, 2, 3], "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
            body = {"models": [first["id"]], "tokens": [[1, 15, 3]]}
            assert client.post("/api/v1/perplexity", json=body).status_code == 200
            text = client.get("/metrics").text
    labels, values = defaultdict(lambda: defaultdict(set)), {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels[sample.name]
            values[sample.name, *sample.labels.values()] = sample.value
            for label, value in sample.labels.items():
                labels[sample.name][label].add(value)
    return SimpleNamespace(labels=dict(labels), values=values)


def selectors(node):
    """(metric, its matchers, the labels that the expression around it groups by) of each selector of a query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, node.matchers.matchers, set()
        return
    own = set()
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        own = set(node.modifier.labels)
    for child in children(node):
        for name, matchers, grouped in selectors(child):
            yield name, matchers, grouped | own


def children(node):
    if isinstance(node, promql_parser.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, promql_parser.Call):
        return list(node.args)
    if isinstance(node, promql_parser.MatrixSelector):
        return [node.vector_selector]
    return [node.expr] if hasattr(node, "expr") else []


@pytest.mark.parametrize("name", QUERIES)
def test_queries_name_metrics_and_labels_that_exist(scraped, name):
    found = list(selectors(promql_parser.parse(QUERIES[name])))
    assert found
    for metric, matchers, grouped in found:
        labels = TARGET_LABELS | (OF_PROMETHEUS[metric] if metric in OF_PROMETHEUS else scraped.labels[metric])
        assert grouped <= labels.keys(), metric
        for matcher in matchers:
            assert matcher.name in labels, (metric, matcher.name)
            if matcher.value != "5..":  # no request has failed
                pattern = matcher.value if "Re" in str(matcher.op) else re.escape(matcher.value)
                assert any(re.fullmatch(pattern, value) for value in labels[matcher.name]), (metric, matcher.value)


def test_the_numbers_are_those_of_the_sweep(scraped):
    values = scraped.values
    assert values["cope_runs", "finished"] == 4
    assert values["cope_runs", "running"] == values["cope_runs", "failed"] == 0
    assert values[("cope_runs_steps",)] == 4 * 12
    assert values["cope_sweeps", "finished"] == 1
    assert values[("cope_runs_waiting",)] == values[("cope_nodes_left_out",)] == 0
    assert values[("cope_heartbeat_age_seconds",)] == 0
    assert values[("cope_index_up",)] == 1
    assert 0 < values[("cope_disk_free_bytes",)] < values[("cope_disk_size_bytes",)]
    assert values[("cope_inference_scored_tokens_total",)] > 0
    assert values[("cope_inference_generated_tokens_total",)] == 2


def test_every_metric_of_sweeps_is_shown_or_watched(scraped):
    used = {metric for query in QUERIES.values() for metric, _, _ in selectors(promql_parser.parse(query))}
    prefixes = ("cope_runs", "cope_sweeps", "cope_heartbeat", "cope_nodes", "cope_index", "cope_disk")
    assert {name for name in scraped.labels if name.startswith(prefixes)} <= used


def test_a_late_heartbeat_is_seen_before_its_leases_end():
    """Afterwards the sweep reads as interrupted, and the metric no longer counts it."""
    rule = RULES["HeartbeatLate"]
    threshold_s = float(rule["expr"].rpartition(">")[2])
    assert 3 * RENEWAL_S < threshold_s <= LEASE_S - 3 * RENEWAL_S
    assert "for" not in rule  # no value stays above the threshold for longer than the rest of a lease
    assert f"After {LEASE_S:.0f} s" in rule["annotations"]["description"]
    [panel] = [panel for panel in PANELS if "cope_heartbeat" in panel["targets"][0]["expr"]]
    assert f"expire {LEASE_S:.0f} s after" in panel["description"]


def test_alerts_say_what_to_do():
    assert set(RULES) >= {"NoProgress", "RunsFailed", "NodesLeftOut", "DiskNearlyFull"}
    for rule in RULES.values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_the_commands_of_alerts_exist():
    commands = get_command(app).commands
    typed = [words.split() for words in re.findall(r"`cope-sweep ([^`]+)`", str(RULES))]
    assert {name for name, *_ in typed} == {"status", "logs", "retry", "stop", "prune"}
    for name, *words in typed:
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options
