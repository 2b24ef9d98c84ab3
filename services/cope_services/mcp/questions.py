"""The tools that read: one for each question in `QUESTIONS`, and perplexity and probes of models.

To offer another question to agents, add a line to `QUESTIONS`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import getdoc
from typing import Annotated, Any, ClassVar, Literal

from anyio.to_thread import run_sync
from mcp_types import ContentBlock, ImageContent, TextContent
from pydantic import BaseModel, Field

from cope_services.http.components import Components
from cope_services.http.errors import TimeLimitError
from cope_services.mcp.answers import markdown, page, table, table_lines
from cope_services.models.perplexity import compare
from cope_sweep.api.ablations import GetMissing, ListAblations, ListClaims, Missing
from cope_sweep.api.figures import GetFigure
from cope_sweep.api.question import Question, arguments_of, committed_of, fields_of
from cope_sweep.api.requests import PerplexityComparison, PerplexityRequest, ProbeRequest, ProbeResponse
from cope_sweep.api.runs import GetDiff, ListRuns, ListTried, Tried
from cope_sweep.api.sweeps import GetSweep, ListSweeps
from cope_sweep.api.tables import GetTable, GetVerdict
from cope_sweep.read.queries import Queries
from cope_sweep.read.tables.comparisons import reference
from cope_sweep.read.tables.render import LATEX_OPTIONS
from cope_sweep.store import RunPage

Start = Annotated[
    int, Field(ge=0, le=1 << 31, description="The first line of the answer to return: `next` of the page before.")
]


def text_page(lines: Sequence[str], start: int = 0, after: str = "") -> list[ContentBlock]:
    """A page of an answer, as the content of a result."""
    return [TextContent(text=page(lines, start, after))]


class Tool:
    """A tool: its name, its description for the model that chooses it, its arguments, and what it answers."""

    name: str
    description: str
    arguments: type[BaseModel]
    trains: ClassVar[bool] = False
    """Whether it starts or stops training: it needs `--allow-training`."""

    async def answer(self, components: Components, arguments: Any) -> list[ContentBlock]:
        """The answer to arguments that have been validated. Raises UserError."""
        raise NotImplementedError


@asynccontextmanager
async def time_limit(components: Components) -> AsyncIterator[None]:
    """What models may take for one call, as for one request to the service. Raises TimeLimitError."""
    limit_s = components.predictors.settings.max_seconds
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise TimeLimitError(limit_s) from None


# -- questions ---------------------------------------------------------------------------------------------------------


class Asked(Tool):
    """A question as a tool: its description, its limits, and its answer in Markdown."""

    def __init__(
        self,
        question: type[Question[Any]],
        shown: Sequence[str] = (),
        hidden: Sequence[str] = (),
        further: Mapping[str, Any] = {},
    ) -> None:
        """Create the tool.

        Args:
            question: The question.
            shown: The fields of the answer to show; none: all.
            hidden: Fields of the question that agents do not need, such as options of LaTeX.
            further: Name → type and default of fields that agents get instead of hidden ones.
        """
        self.question, self.shown = question, shown
        self.name = question.operation()
        self.description = getdoc(question) or ""
        further = {**further, **committed_of(question), "start": (Start, 0)}
        self.arguments = arguments_of(question, hidden, further)

    async def answer(self, components: Components, arguments: Any) -> list[ContentBlock]:
        queries = components.committed if getattr(arguments, "committed", False) else components.queries
        question = self.question(**fields_of(self.question, arguments))
        async with components.work[self.question.WORK].slot():
            return await run_sync(self.content, queries, question, arguments.start)

    def content(self, queries: Queries, question: Any, start: int) -> list[ContentBlock]:
        """The answer of a store to the question, from a line on. It blocks."""
        answer = queries.ask(question)
        return text_page(self.lines(answer), start, next_page(answer))

    def lines(self, answer: Any) -> list[str]:
        """The answer in Markdown."""
        return markdown(answer, self.shown)


def next_page(answer: Any) -> str:
    """How to get the next page of an answer that has pages of its own; empty on the last one."""
    offset = getattr(answer, "next", None)
    return f"next: offset={offset}" if offset is not None else ""


class AskedTable(Asked):
    """The table in Markdown; below it the verdicts, compared with the ablation's reference if no other row is named."""

    def content(self, queries: Queries, question: GetTable, start: int) -> list[ContentBlock]:
        if question.compare is None:
            compared = reference(queries.load(question.name, question.scale, question.set))
            question = question.model_copy(update={"compare": compared})
        text = queries.ask(question.model_copy(update={"format": "markdown"})).decode()
        return text_page(_without_padding(text).splitlines(), start)


class AskedRuns(Asked):
    """Runs as a table. Their metrics are shown if the question chooses them, so that a page has no wall of numbers."""

    FIELDS = ("run_id", "status", "ablations", "row", "seed", "step", "steps", "message")

    def content(self, queries: Queries, question: ListRuns, start: int) -> list[ContentBlock]:
        chosen = question.fields or list(self.FIELDS[2:])
        answer: RunPage = queries.ask(question.model_copy(update={"fields": chosen}))
        runs = [run.model_dump(mode="json", exclude_unset=True) for run in answer.runs]
        return text_page([f"total: {answer.total}", "", *table(runs)], start, next_page(answer))


class AskedTried(Asked):
    """For each group of runs: its settings, then the values with mean ± standard deviation (n)."""

    def lines(self, answer: Tried) -> list[str]:
        lines = markdown(answer, ("key", "metric", "runs", "same", "total"))
        for group in answer.groups:
            settings = (
                ", ".join(f"{key} {value}" for key, value in group.settings.items()) or "no other setting differs"
            )
            texts = [
                f"{each.value}: {each.text}" + (f", {each.unfinished} unfinished" if each.unfinished else "")
                for each in group.values
            ]
            lines += [
                "",
                f"{', '.join(group.ablations) or 'in no sweep'}: {settings}",
                *(f"- {text}" for text in texts),
            ]
        return lines


class AskedMissing(Asked):
    """A line for each missing run: a cell with all runs of a row would be shortened."""

    COLUMNS = ("row", "seed", "run_id", "status", "step", "message")

    def lines(self, answer: Missing) -> list[str]:
        runs = [
            [row.row, run.seed, run.run_id, run.status, run.step, run.message]
            for row in answer.rows
            for run in row.runs
        ]
        return [*markdown(answer, ("missing", "command")), "", *table_lines(self.COLUMNS, runs)]


class AskedFigure(Asked):
    """The figure as a PNG image, or with `format` csv the data behind it."""

    def content(self, queries: Queries, question: GetFigure, start: int) -> list[ContentBlock]:
        if question.format == "csv":
            return text_page(queries.ask(question).decode().splitlines(), start)
        image = queries.ask(question)
        return [ImageContent(data=base64.b64encode(image).decode(), mime_type="image/png")]


ImageOrData = Annotated[Literal["png", "csv"], Field(description="csv: the data behind the figure.")]


def _without_padding(text: str) -> str:
    """Markdown whose tables are not aligned: agents pay for spaces and dashes."""
    rows = re.sub(r"(?m)^\|.*$", lambda row: re.sub(r" +", " ", row[0]), text)
    return re.sub(r"(?m)^\|[|: -]+$", lambda row: f"|{'---|' * (row[0].count('|') - 1)}", rows)


QUESTIONS: tuple[Asked, ...] = (
    Asked(
        ListAblations,
        (
            "name", "title", "scales", "rows", "seeds", "runs", "finished", "at_scales", "variants", "committed",
            "error",
        ),
    ),
    AskedTried(ListTried),
    AskedTable(GetTable, hidden=("format", "runs", "margin", *LATEX_OPTIONS)),
    Asked(GetVerdict),
    Asked(ListClaims, ("claim", "ablation", "scale", "measure", "verdict", "size", "texts", "declared", "hypothesis")),
    AskedFigure(GetFigure, hidden=("size", "format"), further={"format": (ImageOrData, "png")}),
    AskedMissing(GetMissing),
    AskedRuns(ListRuns),
    Asked(GetDiff),
    Asked(ListSweeps, ("total", "sweeps", "sweep_id", "ablation", "scale", "sets", "status", "runs", "counts")),
    Asked(
        GetSweep,
        (
            "sweep_id", "ablation", "title", "scale", "sets", "status", "runs", "counts", "notes", "error", "members",
            "run_id", "row", "seed", "step", "steps", "message",
        ),
    ),
)  # fmt: skip
"""The questions that agents can ask. Without `shown`, an answer is shown whole."""


# -- models ------------------------------------------------------------------------------------------------------------


class AskedPerplexity(Tool):
    """The perplexity of sequences under models, in total: per-token numbers would fill a context."""

    name = "perplexity"
    description = (
        "Perplexity of token ids or texts under one or several models, in total. A model is a run, or the best run of "
        "a row."
    )

    def __init__(self) -> None:
        self.arguments = arguments_of(
            PerplexityRequest, ("log_probabilities", "token_labels", "top"), {"start": (Start, 0)}
        )

    async def answer(self, components: Components, arguments: Any) -> list[ContentBlock]:
        request = PerplexityRequest(**fields_of(PerplexityRequest, arguments))
        async with time_limit(components):
            answer = PerplexityComparison.model_validate_json(await compare(components, request))
        rows = []
        for model in answer.results:
            text = model.total.text
            rows.append(
                [model.run_id, model.total.perplexity, model.total.bits_per_token, model.total.tokens,
                 text and text.word_perplexity, text and text.bits_per_byte, model.scored]
            )  # fmt: skip
        columns = ("run", "perplexity", "bits per token", "scored tokens", "per word", "bits per byte", "scored")
        return text_page(table_lines(columns, rows), arguments.start)


class AskedProbe(Tool):
    """Statistics of the gates of each head on one sequence."""

    name = "probe"
    description = (
        "How the gates of each head of a finished run's model tell marked tokens from the others, on one sequence: "
        "mean gate of both, AUC and share. With `load`, also what its position logits do. With `image`, heatmaps of at "
        "most 8 heads as well; choose them by `layers` and `heads`."
    )

    def __init__(self) -> None:
        further = {
            "run": (Annotated[str, Field(max_length=700, description="A run's id or its first digits.")], ...),
            "image": (Annotated[bool, Field(description="Also draw the heads.")], False),
            "start": (Start, 0),
        }
        self.arguments = arguments_of(ProbeRequest, ("matrices",), further)

    async def answer(self, components: Components, arguments: Any) -> list[ContentBlock]:
        fields = fields_of(ProbeRequest, arguments)
        async with time_limit(components):
            predictor = await components.predictor(arguments.run)
            answer = await components.predictors.probe(predictor, ProbeRequest(**fields, matrices=[]), "json")
        probed = ProbeResponse.model_validate_json(answer)
        rows = [
            [head.layer, head.head, encoding.kind, mark, found.on, found.off, found.auc, found.share]
            for head in probed.heads
            for encoding in head.encodings
            for mark, found in encoding.marks.items()
        ]
        lines = [f"run: {probed.run_id}", f"tokens: {json.dumps(probed.labels[:64], ensure_ascii=False)}", ""]
        columns = ("layer", "head", "encoding", "mark", "gate on", "gate off", "AUC", "share")
        lines += table_lines(columns, rows) if rows else ["no encoding of this model has gates"]
        loads = [
            [head.layer, head.head, encoding.kind, load.position, load.content, load.load, load.beyond, load.explained]
            for head in probed.heads
            for encoding in head.encodings
            if (load := encoding.load) is not None
        ]
        columns = ("layer", "head", "encoding", "position logits", "content logits", "load", "beyond", "explained")
        lines += ["", *table_lines(columns, loads)] if loads else []
        content = text_page(lines, arguments.start)
        if arguments.image:
            async with time_limit(components):
                image = await components.predictors.probe(predictor, ProbeRequest(**fields), "png")
            content.append(ImageContent(data=base64.b64encode(image).decode(), mime_type="image/png"))
        return content


MODEL_TOOLS: tuple[Tool, ...] = (AskedPerplexity(), AskedProbe())
