"""Clients of the SDK, for tests: each call is made by a new client of the server."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cope_services.mcp.server import AgentServer
from cope_services.mcp.training import Allowance
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, TextContent

from tests.helpers.processes import free_port, until
from tests.helpers.sample_store import SampleStore

T = TypeVar("T")


def agent_server(sample: SampleStore, allowance: Allowance | None = None, **changes: object) -> AgentServer:
    return AgentServer(sample.settings(**changes), allowance, no_mlflow=True)


def with_client(server: Any, use: Callable[[Client], Awaitable[T]], mode: str = "auto") -> T:
    """What `use` returns: a function of a client that is connected to a server, an address, or a command.

    `mode`: `legacy` for the protocol until 2025, which begins with a handshake.
    """

    async def connected() -> T | MCPError:
        async with Client(server, mode=mode) as client:
            try:
                return await use(client)
            except MCPError as error:  # the client's task group would wrap it
                return error

    result = asyncio.run(connected())
    if isinstance(result, MCPError):
        raise result
    return result


def call(server: AgentServer, tool: str, /, **arguments: Any) -> CallToolResult:
    result: CallToolResult = with_client(server.server, lambda client: client.call_tool(tool, arguments))
    return result


def text(result: CallToolResult) -> str:
    return "\n".join(content.text for content in result.content if isinstance(content, TextContent))


def answer(server: AgentServer, tool: str, /, **arguments: Any) -> str:
    """The text of an answer that is no error."""
    result = call(server, tool, **arguments)
    assert not result.is_error, text(result)
    return text(result)


def code(result: CallToolResult) -> str:
    """The code of an error."""
    assert result.is_error, text(result)
    found: str = (result.structured_content or {})["error"]["code"]
    return found


def command_line(sample: SampleStore, *options: str) -> list[str]:
    folders = ["--store", str(sample.store_folder), "--ablations", str(sample.ablations)]
    return ["-m", "cope_sweep.cli", "mcp", *folders, *options]


def over_stdio(sample: SampleStore, *options: str) -> StdioServerParameters:
    return StdioServerParameters(command=sys.executable, args=command_line(sample, *options), env=dict(os.environ))


@contextmanager
def over_http(sample: SampleStore, *options: str) -> Iterator[str]:
    """The address of a server in a process of its own."""
    port = free_port()

    def listens() -> bool:
        assert process.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    process = subprocess.Popen([sys.executable, *command_line(sample, "--http", "--port", str(port), *options)])
    try:
        until(listens)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(60)
