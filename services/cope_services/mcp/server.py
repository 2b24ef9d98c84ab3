"""The protocol: which tools and resources there are, what errors become, and the two transports."""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from anyio import run
from anyio.to_thread import run_sync
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError
from starlette.types import ASGIApp

from cope_services.http.access import check_may_submit, is_loopback
from cope_services.http.app import components_of, guarded
from cope_services.http.middleware import SecurityHeaders
from cope_services.http.server import browser_url, check_api_keys, listen, run_until_signal
from cope_services.http.settings import Settings
from cope_services.mcp import resources
from cope_services.mcp.actions import Check, PlanSweep, RunSweep, StopSweep, WaitForSweep
from cope_services.mcp.questions import MODEL_TOOLS, QUESTIONS, Tool, text_page
from cope_services.mcp.training import Allowance, Training, TrainingNotAllowedError
from cope_sweep import __version__
from cope_sweep.config.explain import invalid_request
from cope_sweep.errors import UserError
from cope_sweep.signals import STOP, handling

LOG = logging.getLogger("cope_services.mcp")
PATH = "/mcp"
TRAINING_TOOLS = (RunSweep.name, StopSweep.name)
INSTRUCTIONS = """\
Ablations of position encodings, with tests over seeds. Begin with list_ablations, and look at what is known before you
train: list_tried, get_table (committed=true: results that come with the files) and list_claims. Write an ablation as
YAML, check its text, then plan, run, wait. Whether a row is better is what get_verdict says, not the order of means.
Never add seeds until p is small, never choose a recipe by the test set, never keep a row for one good seed.
An answer has at most 2,000 tokens; its last line `next: …` says which argument brings more."""


class AgentServer:
    """Answers agents about one store and one folder of ablation files; with an allowance, it also trains."""

    def __init__(self, settings: Settings, allowance: Allowance | None = None, *, no_mlflow: bool = False) -> None:
        self.settings = settings
        self.components = components_of(settings)
        self.training = Training(self.components.sweeps, allowance, no_mlflow=no_mlflow) if allowance else None
        tools: list[Tool] = [*QUESTIONS, *MODEL_TOOLS, Check(), PlanSweep(), WaitForSweep()]
        if self.training is not None:
            tools += [RunSweep(self.training), StopSweep(self.training)]
        self.tools = {tool.name: tool for tool in tools}
        self.server = Server(
            "cope-sweep",
            version=__version__,
            instructions=INSTRUCTIONS,
            lifespan=self._lifespan,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_templates,
            on_read_resource=self._read_resource,
        )
        self.server.middleware.clear()  # the SDK's only one is OpenTelemetry's

    @asynccontextmanager
    async def _lifespan(self, _: Server[Any]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await run_sync(self._close)

    # -- tools ---------------------------------------------------------------------------------------------------

    async def _list_tools(self, _: Any, __: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool) for tool in self.tools.values()])

    async def _call_tool(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        arguments = params.arguments or {}
        try:
            tool = self._tool(params.name)
            if tool.trains and context.request is not None:  # standard input has no request, and no keys
                check_may_submit(context.request.scope)
            _check_size(arguments, self.settings.max_body_bytes)
            try:
                content = await tool.answer(self.components, tool.arguments.model_validate(arguments))
            except ValidationError as error:
                raise invalid_request(error, tool.arguments) from error
            return types.CallToolResult(content=content)
        except UserError as error:
            data = error.shown_data(self.settings.hide_folders)
            text = self.settings.hide_folders(f"error {error.code}: {error}")
            details = {"error": {"code": error.code, "data": data}}
            size_limited = details if len(json.dumps(details)) < 4_000 else {"error": {"code": error.code}}
            return types.CallToolResult(
                content=text_page(text.splitlines()), structured_content=size_limited, is_error=True
            )
        except RecursionError:
            return _failure("too_large", "a value is nested too deeply; use fewer levels")
        except MCPError:
            raise
        except Exception:
            LOG.exception("the tool %s failed", params.name[:80])
            return _failure("internal_error", "an error in cope-sweep; its log has the reason")

    def _tool(self, name: str) -> Tool:
        tool = self.tools.get(name)
        if tool is None and name in TRAINING_TOOLS:
            raise TrainingNotAllowedError(
                "this server only reads; a person can start it with --allow-training --max-runs N --max-cpu-minutes N"
            )
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"no tool {name[:80]!r}; tools/list has {', '.join(self.tools)}")
        return tool

    # -- resources -----------------------------------------------------------------------------------------------

    async def _list_resources(self, _: Any, __: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
        return types.ListResourcesResult(resources=await run_sync(resources.listed, self.components))

    async def _list_templates(
        self, _: Any, __: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=resources.templates())

    async def _read_resource(self, _: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        try:
            text, media = await run_sync(resources.read, self.components, str(params.uri))
        except UserError as error:
            raise MCPError(types.INVALID_PARAMS, self.settings.hide_folders(str(error))) from error
        contents = types.TextResourceContents(uri=params.uri, mime_type=media, text=text)
        return types.ReadResourceResult(contents=[contents])

    # -- transports ----------------------------------------------------------------------------------------------

    def serve_stdio(self) -> None:
        """Serve one client over standard input and output, until it closes them."""

        async def serve() -> None:
            async with stdio_server() as (read_stream, write_stream):
                await self.server.run(read_stream, write_stream, self.server.create_initialization_options())

        def end(signum: int, _: object) -> None:
            # By hand: a thread that reads standard input would keep the interpreter from ending.
            self._close()
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)

        with handling(STOP, end):
            run(serve)

    def _close(self) -> None:
        if self.training is not None:
            self.training.close()

    def application(self) -> ASGIApp:
        """The streamable HTTP transport, with the hosts, keys and limits of the REST service."""
        settings = self.settings
        transport: ASGIApp = self.server.streamable_http_app(
            streamable_http_path=PATH,
            stateless_http=True,  # every request carries what it needs: no sessions that clients could pile up
            json_response=True,
            max_request_body_size=settings.max_body_bytes,
            # `AllowedHosts` checks Host and Origin, as in the service.
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        return SecurityHeaders(guarded(transport, settings, always_asks_keys=not is_loopback(settings.host)))

    def serve_http(self) -> None:
        """Serve over HTTP until SIGINT. Raises UserError beyond this machine without keys, BindError."""
        settings = self.settings
        with listen(settings.host, settings.port) as listener:
            check_api_keys(settings)
            sys.stderr.write(f"{browser_url(settings.host, listener.getsockname()[1])}{PATH}  (stop with Ctrl-C)\n")
            run_until_signal(self.application(), listener)


def _described(tool: Tool) -> types.Tool:
    schema = _short(tool.arguments.model_json_schema())
    hints = types.ToolAnnotations(read_only_hint=not tool.trains, destructive_hint=False, open_world_hint=False)
    return types.Tool(name=tool.name, description=tool.description, input_schema=schema, annotations=hints)


def _short(schema: Any) -> Any:
    """A JSON Schema without what agents do not need, since each of them reads it at each start.

    Titles repeat names, and null is the default of what may be left out.
    """
    if isinstance(schema, list):
        return [_short(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: _short(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and key != "examples" and (key, value) != ("default", None)
    }
    options = [option for option in kept.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1 and "$ref" not in options[0]:
        del kept["anyOf"]
        return {**options[0], **kept}
    return kept


def _check_size(arguments: dict[str, Any], max_bytes: int) -> None:
    """Raise UserError for arguments that the REST service would refuse: standard input has no limit of its own."""
    size = len(json.dumps(arguments, ensure_ascii=False))
    if size > max_bytes:
        raise UserError(
            f"the arguments have {size:,} characters; send at most {max_bytes:,}", code="too_large", limit=max_bytes
        )


def _failure(code: str, message: str) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(text=f"error {code}: {message}")],
        structured_content={"error": {"code": code}},
        is_error=True,
    )
