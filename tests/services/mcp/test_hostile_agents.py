"""Agents that ask for what they may not have: files outside, huge arguments, tools that do not exist, training."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from cope_services.http.access import KeysFile
from cope_services.mcp.answers import MAX_TOKENS, token_bound
from cope_services.mcp.server import AgentServer
from cope_services.mcp.training import Allowance
from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS
from starlette.testclient import TestClient

from tests.helpers.sample_store import TINY, SampleStore
from tests.services.mcp.agents import agent_server, answer, call, code, text, with_client

OUTSIDE = ("../secret", "/etc/passwd", "..%2fsecret", "tiny/../../secret", "tiny\x00", "file:///etc/passwd")


@pytest.fixture(scope="module")
def server(sample: SampleStore) -> AgentServer:
    return agent_server(sample)


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("tool", ["get_table", "get_missing", "plan"])
def test_names_of_files_outside(server: AgentServer, tool: str, name: str) -> None:
    argument = "ablation" if tool == "plan" else "name"
    result = call(server, tool, **{argument: name})
    assert code(result) == "not_found"
    assert token_bound(text(result)) <= MAX_TOKENS


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", ["ablations/", "results/", "encodings/", ""])
def test_resources_outside(server: AgentServer, kind: str, name: str) -> None:
    with pytest.raises(MCPError):
        with_client(server.server, lambda client: client.read_resource(f"cope-sweep://{kind}{name}"))


@pytest.mark.parametrize(("name", "key"), [("ablations/" + "a" * 201, "name"), ("results/a." + "a" * 101, "scale")])
def test_resources_with_long_names(server: AgentServer, name: str, key: str) -> None:
    with pytest.raises(MCPError) as refused:
        with_client(server.server, lambda client: client.read_resource(f"cope-sweep://{name}"))
    assert refused.value.error.code == INVALID_PARAMS
    assert refused.value.error.message.startswith(f"{key}: ")


def test_an_ablation_may_name_no_file_and_no_plugin(server: AgentServer, tmp_path: Any) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    assert "invalid" in answer(server, "check", text=f"{TINY}plugins: [{plugin}]\n", name="other")
    assert not (tmp_path / "imported").exists()
    code_task = TINY.replace(
        "kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4", "kind: text, folder: /etc"
    )
    told = answer(server, "check", text=code_task, name="other")
    assert told.startswith("invalid")
    assert "root:" not in told
    assert "invalid" in answer(server, "check", text="inherit: ../secret\n", name="other")


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("list_runs", {"limit": 10**30}),
        ("list_runs", {"search": "x" * 2_000_000}),
        ("list_runs", {"filter": ["a=1"] * 100_000}),
        ("get_table", {"name": "x" * 100_000}),
        ("get_table", {"name": "tiny", "start": -1}),
        ("get_table", {"name": "tiny", "start": 10**9}),
        ("get_table", {"name": "tiny", "format": "latex"}),
        ("get_table", {"model": 1, "self": 2}),
        ("get_figure", {"name": "tiny", "figure": "curves", "format": "svg", "style": "/etc/passwd"}),
        ("perplexity", {"models": ["0" * 16], "tokens": [[0] * 100_000]}),
        ("check", {"text": "a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(40))}),
        ("check", {"text": "x: " + "[" * 100_000}),
        ("plan", {"spec": TINY, "name": "../x"}),
        ("plan", {"spec": {"a": {"b": {}}}, "name": "other", "ablation": "tiny"}),
        ("wait", {"sweep_id": "../../x"}),
        ("wait", {"sweep_id": "20260101-000000-aa", "seconds": 10**9}),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(server: AgentServer, tool: str, arguments: dict[str, Any]) -> None:
    result = with_client(server.server, lambda client: client.call_tool(tool, arguments))
    if tool != "check":
        assert code(result) != "internal_error"
    assert result.is_error or text(result).startswith("invalid")
    assert token_bound(text(result)) <= MAX_TOKENS


def test_messages_name_no_folder_of_the_machine(server: AgentServer, sample: SampleStore) -> None:
    result = call(server, "get_table", name="broken")
    assert result.is_error
    assert str(sample.root) not in text(result)


def test_unknown_tools(server: AgentServer) -> None:
    with pytest.raises(MCPError):
        call(server, "delete")


@pytest.mark.parametrize("tool", ["run", "stop"])
def test_training_without_permission(server: AgentServer, tool: str) -> None:
    assert code(call(server, tool, ablation="tiny")) == "training_not_allowed"


@pytest.mark.parametrize("allowance", [Allowance(2, 60.0), Allowance(100, 1e-6)])
def test_training_beyond_the_budget(own_sample: SampleStore, allowance: Allowance) -> None:
    server = agent_server(own_sample, allowance)
    assert code(call(server, "run", spec=TINY.replace("dim: 8", "dim: 4"), name="other")) == "beyond_budget"
    assert not own_sample.store.index.sweeps(("pending", "running"))


def test_sweeps_of_others_are_not_stopped(own_sample: SampleStore) -> None:
    server = agent_server(own_sample, Allowance(1, 1.0))
    assert code(call(server, "stop", sweep_id="20260101-000000-aa")) == "not_found"


# -- over HTTP ---------------------------------------------------------------------------------------------------------

PING = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
HEADERS = {"accept": "application/json, text/event-stream", "host": "127.0.0.1"}


def post(server: AgentServer, headers: dict[str, str], content: Any = None) -> httpx.Response:
    with TestClient(server.application(), base_url="http://127.0.0.1") as client:
        return client.post("/mcp", json=content or PING, headers=HEADERS | headers)


def test_other_hosts_and_pages_of_other_origins(sample: SampleStore) -> None:
    assert post(agent_server(sample), {}).status_code == 200
    assert post(agent_server(sample), {"host": "evil.example"}).status_code == 421
    assert post(agent_server(sample), {"origin": "http://evil.example"}).status_code == 403


def test_a_body_that_is_too_large(sample: SampleStore) -> None:
    assert post(agent_server(sample, max_body_bytes=1000), {}, {"x": "y" * 2000}).status_code == 413


def test_keys(own_sample: SampleStore) -> None:
    settings = own_sample.settings()
    keys = KeysFile(settings.keys_file)
    reading, training = keys.create("reads", may_submit=False), keys.create("trains", may_submit=True)
    assert post(agent_server(own_sample), {}).status_code == 401
    run = {"name": "run", "arguments": {"ablation": "nothing"}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": run}
    found = {}
    for name, key in (("reads", reading), ("trains", training)):
        server = agent_server(own_sample, Allowance(1, 1.0))
        response = post(server, {"authorization": f"Bearer {key}"}, body).json()
        found[name] = response["result"]["structuredContent"]["error"]["code"]
    assert found == {"reads": "missing_scope", "trains": "not_found"}


def test_a_model_that_takes_too_long(sample: SampleStore) -> None:
    server = agent_server(sample, max_seconds=1e-4)
    result = call(server, "perplexity", models=[sample.ids[0]], tokens=[[14, 3, 14, 7, 15, 3, 7]])
    assert code(result) == "time_limit"
