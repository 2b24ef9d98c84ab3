"""What all questions have in common: their base class, how an option is declared, and names that many have."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from string import Formatter
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import typer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

A_co = TypeVar("A_co", covariant=True)
M = TypeVar("M", bound=BaseModel)

API = "/api/v1"
"""Prefix of the paths of all routes."""


class Answer(BaseModel):
    """Base class of answers. Pydantic compiles a model on first use: a command needs one or two of the forty."""

    model_config = ConfigDict(defer_build=True)


class Question(BaseModel, Generic[A_co]):
    """A question to a store, with an answer of the type `A_co`: a model, a list of models, or the bytes of a file.

    `Queries.ask` answers it from a store, `Client.ask` from a service. An unknown field is an error.
    """

    # Commands share the options of all questions, and ask one. Pydantic compiles a model when it is used first.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    PATH: ClassVar[str]
    """Path of its route below `API`. Fields in braces are parts of it; all others are parameters of the query."""
    MEDIA_TYPES: ClassVar[Mapping[str, str]] = {}
    """If the answer is a file: each value of the field `format` → its media type, the default first."""
    WORK: ClassVar[Literal["answers", "tables", "drawings", "reports"]] = "tables"
    """How much work an answer is. A service bounds for each kind how many are made at a time."""
    FROM_INDEX: ClassVar[bool] = True
    """Whether the answer stays the same until the index or an ablation file changes. Then it has an `ETag`."""
    COMMITTED: ClassVar[bool] = False
    """Whether it may also be asked of the results that come with the ablation files: `Committed`."""

    @classmethod
    def operation(cls) -> str:
        """Its name in OpenAPI and as a tool: `get_table`."""
        return re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def path_fields(cls) -> set[str]:
        """The names of the fields that are parts of the path."""
        return {name for _, name, *_ in Formatter().parse(cls.PATH) if name}

    @classmethod
    def answer_type(cls) -> Any:
        """The type in the brackets of its base class: `bytes` for a subclass of `Question[bytes]`."""
        metadata = [getattr(base, "__pydantic_generic_metadata__", {}) for base in cls.__mro__]
        (answer,) = [generic["args"][0] for generic in metadata if generic.get("args")]
        return answer


def checked(model: type[M], **fields: Any) -> M:
    """A question or the body of a request, from options that somebody typed.

    Raises UserError for an invalid value, and for an unknown field, with the field that was probably meant.
    """
    try:
        return model(**fields)
    except ValidationError as error:
        # Here, since this room takes longer to import than all others that a client needs together.
        from cope_sweep.config.explain import invalid_request

        raise invalid_request(error, model) from error


def arguments_of(
    model: type[BaseModel], hidden: Collection[str] = (), further: Mapping[str, Any] = {}
) -> type[BaseModel]:
    """A model of the fields of a question or request that are not hidden, and further ones: name → type and default."""
    fields = {name: field for name, field in model.model_fields.items() if name not in hidden}
    definitions: dict[str, Any] = {name: (field.annotation, field) for name, field in fields.items()}
    return create_model(model.__name__, __config__=ConfigDict(extra="forbid"), **definitions, **further)


def fields_of(model: type[BaseModel], arguments: BaseModel) -> dict[str, Any]:
    """The values of such arguments that are fields of the question or the request."""
    return {name: value for name, value in arguments if name in model.model_fields}


def option(
    text: str,
    *flags: str,
    metavar: str | None = None,
    latex: bool = False,
    ge: int | None = None,
    le: int | None = None,
    max_length: int | None = None,
    pattern: str | None = None,
) -> tuple[FieldInfo, OptionInfo]:
    """An option of a question and of the command that asks it: what pydantic and what Typer have to know.

        Sort = Annotated[str | None, *option("Order the rows by …", metavar="COLUMN", max_length=200)]

    The limits of numbers hold for both. A command takes texts and lists of any length: only a service has to bound
    them. The default stands where the option is used, in the class and in the command.

    Args:
        text: The description.
        flags: Names on the command line; none: the parameter's name.
        metavar: The value in the help of the command.
        latex: The option is for the format latex only.
        ge: The smallest value.
        le: The largest value.
        max_length: The number of characters of a text, or of values in a list.
        pattern: A regular expression for a text.
    """
    field = Field(description=f"latex: {text}" if latex else text, ge=ge, le=le, max_length=max_length, pattern=pattern)
    panel = "Options of the format latex" if latex else None
    flag = typer.Option(*flags, help=text, metavar=metavar, min=ge, max=le, rich_help_panel=panel)
    return field, flag


AblationName = Annotated[str, Field(max_length=200, description="The name of an ablation.")]
RunIdOrPrefix = Annotated[
    str, Field(max_length=100, description="The id of a run, or its first digits: at least four, unique in the store.")
]
Scale = Annotated[
    str | None,
    *option(
        "A scale of the ablation: a named size, such as `small`. Default: the ablation without a scale.",
        "--scale",
        metavar="NAME",
        max_length=100,
    ),
]
MAX_SETS, MAX_SET_CHARACTERS = 100, 10_000
"""The most values of `--set` in a request, and the length of each."""


def _check_lengths(values: list[str]) -> list[str]:
    if any(len(value) > MAX_SET_CHARACTERS for value in values):
        raise ValueError(f"a value has more than {MAX_SET_CHARACTERS:,} characters")
    return values


Sets = Annotated[
    list[str],
    *option(
        "Replace a value of the file: `model.dim=128`, `seeds=[0,1,2]`, or `seeds=3` for three seeds. With `+`, "
        "add a value to an axis of its grid, as another row: `+model.position=[cope,fire]`. May be repeated.",
        "--set",
        metavar="KEY=VALUE",
        max_length=MAX_SETS,
    ),
    AfterValidator(_check_lengths),  # Typer knows no type of the values of a list but `str`
]
Committed = Annotated[
    bool,
    *option(
        "Use the results that come with the ablation files (their folder `results`) instead of the store's.",
        "--committed",
    ),
]


def committed_of(question: type[Question[Any]]) -> dict[str, Any]:
    """The argument `committed` beside the fields of a question that has it: name → type and default."""
    return {"committed": (Committed, False)} if question.COMMITTED else {}


class OfAblation(Question[A_co], Generic[A_co]):
    """A question about one ablation: at a scale, with values of `--set`."""

    COMMITTED = True

    name: AblationName
    scale: Scale = None
    set: Sets = []
