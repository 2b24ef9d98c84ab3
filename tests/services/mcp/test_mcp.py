"""The SDK's own client against the server: in this process, and over both transports."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from cope_services.http.protocol import MAX_HEAD_BYTES
from cope_services.mcp.answers import MAX_TOKENS, token_bound
from cope_services.mcp.questions import QUESTIONS
from cope_services.mcp.resources import encodings
from cope_services.mcp.server import AgentServer
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp_types import ImageContent

from tests.helpers.sample_store import CLAIM, TINY, SampleStore
from tests.helpers.sweeps import end_sweep, write_sweep
from tests.services.mcp.agents import agent_server, answer, call, code, over_http, over_stdio, with_client

READING = {"perplexity", "probe", "check", "plan", "wait", *(asked.name for asked in QUESTIONS)}

ABLATIONS = Path(__file__).parents[3] / "ablations"
MODES = ("legacy", "auto")
"""The handshake of the protocol until 2025, and what client and server agree upon: 2026's."""


@pytest.fixture(scope="module")
def server(sample: SampleStore) -> AgentServer:
    return agent_server(sample)


async def _first_questions(client: Client) -> tuple[set[str], str, str]:
    """Tools, a table, and the first resource."""
    tools = await client.list_tools()
    table = await client.call_tool("get_table", {"name": "tiny"})
    resource = await client.read_resource("cope-sweep://encodings")
    return {tool.name for tool in tools.tools}, table.content[0].text, resource.contents[0].text


def _check_first(found: tuple[set[str], str, str]) -> None:
    tools, table, encodings = found
    assert tools == READING
    assert "| CoPE |" in table
    assert "| verdict |" in table
    assert "| cope |" in encodings


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_over_standard_input_and_output(sample: SampleStore, mode: str) -> None:
    _check_first(with_client(over_stdio(sample), _first_questions, mode))


@pytest.mark.slow
def test_over_http(sample: SampleStore) -> None:
    """Two clients are connected at the same time, one in each mode."""
    with over_http(sample) as address:

        async def ask_both(new: Client) -> list[tuple[set[str], str, str]]:
            async with Client(address, mode="legacy") as old:
                return [await _first_questions(client) for client in (new, old)]

        for found in with_client(address, ask_both):
            _check_first(found)
        assert httpx.get(address, headers={"x-field": "a" * MAX_HEAD_BYTES}).status_code == 431


def test_every_tool_says_what_it_does_and_what_its_arguments_mean(server: AgentServer) -> None:
    tools = with_client(server.server, lambda client: client.list_tools()).tools
    for tool in tools:
        assert len(tool.description or "") > 40, tool.name
        for name, schema in tool.input_schema["properties"].items():
            is_plain = name in ("scale", "tokens", "n")  # their names say it
            assert schema.get("description") or is_plain, (tool.name, name)
    assert token_bound(json.dumps([tool.model_dump(exclude_none=True) for tool in tools])) < 12_000


def test_a_question_has_its_own_limits(server: AgentServer) -> None:
    tools = {tool.name: tool for tool in with_client(server.server, lambda client: client.list_tools()).tools}
    limit = tools["list_runs"].input_schema["properties"]["limit"]
    assert (limit["minimum"], limit["maximum"]) == (1, 1000)
    assert "format" not in tools["get_table"].input_schema["properties"]


ARGUMENTS: dict[str, dict[str, Any]] = {
    "list_ablations": {},
    "get_table": {"name": "tiny"},
    "list_claims": {},
    "get_verdict": {"name": "tiny", "row": "CoPE", "than": "Absolute"},
    "list_tried": {"values": "model.position"},
    "get_missing": {"name": "tiny"},
    "list_runs": {"ablation": "tiny", "fields": ["status", "metrics"]},
    "list_sweeps": {},
    "check": {"text": TINY, "name": "other"},
    "plan": {"ablation": "tiny"},
}


@pytest.mark.parametrize("tool", ARGUMENTS)
def test_answers_fit_a_context(server: AgentServer, tool: str) -> None:
    assert 0 < token_bound(answer(server, tool, **ARGUMENTS[tool])) <= MAX_TOKENS


def test_two_runs(server: AgentServer, sample: SampleStore) -> None:
    left, right = sample.ids[:2]
    told = answer(server, "get_diff", left=left, right=right)
    assert f"left: {left}" in told
    assert "| metric |" in told


def test_is_it_better(server: AgentServer) -> None:
    told = answer(server, "get_verdict", name="tiny", row="CoPE", than="Absolute")
    assert "verdict: too few seeds" in told
    assert "more_seeds: " in told


def test_committed_results_without_a_scale_are_compared_as_at_their_only_scale(sample: SampleStore) -> None:
    server = agent_server(sample, ablations=ABLATIONS)
    asked = {"name": "selective_copy", "committed": True}
    assert answer(server, "get_table", **asked) == answer(server, "get_table", **asked, scale="small")


def test_ablations_are_listed_with_the_runs_at_their_scales(server: AgentServer) -> None:
    assert "longer runs 4, finished 0" in answer(server, "list_ablations")


def test_a_plan_says_what_it_takes_as_the_command_does(server: AgentServer) -> None:
    assert re.search(r"\nestimated time: about .+ \(\d+ worker groups?; ", answer(server, "plan", ablation="tiny"))


def test_what_did_we_try(server: AgentServer) -> None:
    told = answer(server, "list_tried", values="model.position")
    assert "runs: 3" in told
    assert "in no sweep: no other setting differs" in told
    assert told.count("\n- ") == 2


def test_pages_of_runs_are_the_questions_own(server: AgentServer) -> None:
    assert answer(server, "list_runs", limit=1).endswith("next: offset=1")
    assert not answer(server, "list_runs", limit=1, offset=2).count("next:")


def test_pages_of_sweeps_are_the_questions_own(own_sample: SampleStore) -> None:
    for _ in range(2):
        end_sweep(own_sample.store, write_sweep(own_sample.store, own_sample.plan))
    server = agent_server(own_sample)
    assert answer(server, "list_sweeps", limit=1).endswith("next: offset=1")
    assert not answer(server, "list_sweeps", limit=1, offset=1).count("next:")


def test_every_missing_run_has_a_line_with_its_status(own_sample: SampleStore) -> None:
    (own_sample.ablations / "tiny.yaml").write_text(TINY.replace("[0, 1]", str(list(range(12)))))
    told = answer(agent_server(own_sample), "get_missing", name="tiny")
    assert told.startswith("missing: 22\n")
    assert "\ncommand: cope-sweep run tiny" in told
    lines = [line.split(" | ") for line in told.splitlines() if line.startswith(("| CoPE ", "| Absolute "))]
    assert [line[3] for line in lines].count("pending") == 21
    (failed,) = [line for line in lines if line[3] == "failed"]
    assert failed[:3] == ["| CoPE", "1", own_sample.ids[2]]


def test_a_figure_is_an_image(server: AgentServer) -> None:
    (content,) = call(server, "get_figure", name="tiny", figure="curves").content
    assert isinstance(content, ImageContent)
    assert base64.b64decode(content.data).startswith(b"\x89PNG")
    assert "step" in answer(server, "get_figure", name="tiny", figure="curves", format="csv")
    assert code(call(server, "get_figure", name="tiny", figure="curves", format="svg")) == "invalid_request"


def test_models(server: AgentServer, sample: SampleStore) -> None:
    run_id = sample.ids[0]
    told = answer(server, "perplexity", models=[run_id], tokens=[[14, 3, 14, 7, 15, 3, 7]])
    assert told.count(run_id) == 1
    probed = call(server, "probe", run=run_id, tokens=[14, 3, 14, 7, 15, 3, 7], image=True)
    assert not probed.is_error
    assert [content.type for content in probed.content] == ["text", "image"]
    assert "| load |" not in probed.content[0].text
    assert "| load |" in answer(server, "probe", run=run_id, tokens=[14, 3, 14, 7, 15, 3, 7], load=True)


def test_the_table_of_a_sweep_with_a_scale_and_sets(own_sample: SampleStore) -> None:
    store, sets = own_sample.store, ["train.lr=1e-3", 'task.kind="x, y"']
    record = end_sweep(store, write_sweep(store, own_sample.plan, scale="longer", sets=sets))
    told = answer(agent_server(own_sample), "wait", sweep_id=record.sweep_id)
    assert told.endswith(
        f'next: get_sweep(sweep_id={record.sweep_id}), get_table(name="tiny", scale="longer", set={json.dumps(sets)})'
    )


def test_a_check_names_line_key_and_what_is_meant(server: AgentServer) -> None:
    told = answer(
        server,
        "check",
        text=TINY.replace("model.position:", "model.posiion:").replace("dim: 8", "dmi: 8"),
        name="other",
    )
    assert "invalid" in told
    assert "other:6: base.model.dmi" in told
    assert "did you mean 'dim'" in told


def test_a_check_says_when_no_difference_could_be_significant(server: AgentServer) -> None:
    told = answer(server, "check", text=TINY, name="other")
    assert "valid: 2 rows × 2 seeds = 4 runs" in told
    assert "too few seeds" in told
    assert "no claims" in told
    assert answer(server, "check", text=TINY, name="tiny") == told  # the name of its file
    enough = answer(server, "check", text=(TINY + CLAIM).replace("[0, 1]", "[0, 1, 2, 3, 4]"), name="other")
    assert "too few seeds" not in enough
    assert "no claims" not in enough
    # The claim's pair is corrected for itself alone; without claims, two rows are for one another.
    three = TINY.replace("[absolute]", "[absolute], RoPE: [rope]").replace("[0, 1]", "[0, 1, 2, 3]")
    assert "with 4 of them and 2 comparisons" in answer(server, "check", text=three, name="other")
    assert "too few seeds" not in answer(server, "check", text=three + CLAIM, name="other")
    # Rows are compared with the paper, and the claim is tested all the same.
    published = "published:\n  - {match: {model.position: CoPE}, values: {in_dist/token_error: 1.0}, source: Table 2}\n"
    assert "with 2 of them and 1 comparison," in answer(server, "check", text=TINY + CLAIM + published, name="other")


def test_resources(server: AgentServer) -> None:
    listed = {str(each.uri) for each in with_client(server.server, lambda client: client.list_resources()).resources}
    assert {"cope-sweep://schema", "cope-sweep://encodings", "cope-sweep://tasks"} <= listed

    def read(uri: str) -> str:
        result = with_client(server.server, lambda client: client.read_resource(uri))
        return result.contents[0].text

    assert json.loads(read("cope-sweep://schema"))["properties"]["base"]
    assert "p_max" in read("cope-sweep://encodings/cope")
    assert "p_ignore" in read("cope-sweep://tasks/flip_flop")
    assert read("cope-sweep://ablations/tiny").startswith("title: Selective copy")
    for uri in listed - {"cope-sweep://schema"}:
        assert token_bound(read(uri)) <= MAX_TOKENS


def test_resources_have_pages(server: AgentServer) -> None:
    def read(uri: str) -> str:
        result = with_client(server.server, lambda client: client.read_resource(uri))
        return result.contents[0].text

    shown, pages = read("cope-sweep://encodings"), 1
    kinds = re.findall(r"^\| (\w+) \|", shown, re.MULTILINE)
    while more := re.search(r"^next: (cope-sweep://encodings\?start=\d+) \(\d+ more lines\)\Z", shown, re.MULTILINE):
        shown, pages = read(more[1]), pages + 1
        kinds += re.findall(r"^\| (\w+) \|", shown, re.MULTILINE)[1:]  # without the head
    assert pages > 1
    assert kinds == ["kind", *(each["properties"]["kind"]["const"] for each in encodings())]
    for uri in ("cope-sweep://encodings?start=9999", "cope-sweep://encodings?start=x", "cope-sweep://schema?start=1"):
        with pytest.raises(MCPError):
            read(uri)
