"""The register of the kinds of figures, and what is known of a figure without drawing it.

Each kind is a file of `cope_sweep.read.figures.kinds`: its options, its data and its drawing. Ablation files are read
below that room, so that a kind registers here, and the entry points of the group `cope_sweep.figures` import all kinds
when the first one is looked up. This module and the kinds import neither pandas, matplotlib nor torch before they draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import core_schema

from cope_sweep.frozen import Frozen, MetricName
from cope_sweep.registry import Kind, PluginError, Registry

Metrics = Annotated[list[MetricName], Field(min_length=1)]


class _Common(Frozen):
    """A base of its own, so that the keys of all figures stand before `kind` in the JSON Schema."""

    title: str = Field(default="", description="Above the figure.")
    source: str = Field(default="", description="The figure of the paper that it reproduces, for example `Figure 5`.")
    rows: dict[str, Any] = Field(
        default={}, description="The rows to draw: axis keys, and labels or values; of a list, any. Empty: all rows."
    )


class FigureSpec(Kind, _Common):
    """What an ablation file says about a figure. Kinds are derived from `cope_sweep.read.figures.base.FigureKind`."""

    ORDER: ClassVar[int] = 100
    """The place of the kind in lists. Kinds with the same one are in the order of their files."""
    IN_FILES: ClassVar[bool] = True
    """Whether a file can declare it. A figure without options is only asked for by its name."""
    ONE_ROW: ClassVar[bool] = False
    """Whether it shows exactly one row."""

    def axes(self) -> Mapping[str, str]:
        """Key of the figure → the axis of the ablation that it names."""
        return {}

    @property
    def has_claim(self) -> bool:
        """Whether it claims something that reports measure."""
        return False

    @property
    def claim_identity(self) -> str:
        """16 hex digits of what it claims, not of its wording; empty without a claim."""
        return ""

    def check(self, planned: Any) -> None:
        """Check the figure against its plan (`cope_sweep.config.checks.Planned`).

        Raises SpecError for an axis that no row has, and for a number of rows that it cannot draw. A kind that names
        metrics checks them first.
        """
        planned.check_axes(self.axes())
        planned.check_rows(self.rows, one=self.ONE_ROW)


class FigureRegistry(Registry[FigureSpec]):
    """The kinds of figures by name, in their `ORDER`."""

    def register(self, cls: type[FigureSpec]) -> type[FigureSpec]:
        super().register(cls)
        self._classes = dict(sorted(self._classes.items(), key=lambda kind_and_class: kind_and_class[1].ORDER))
        return cls

    def choices(self) -> Mapping[str, type[FigureSpec]]:
        choices = {kind: cls for kind, cls in self.items() if cls.IN_FILES}
        if not choices:  # after `git pull`, when the installed entry points are those of an older version
            raise PluginError(
                f"no kind of figure is installed (entry points {self.group}); install cope-sweep again: pip install "
                "--editable .",
                code="plugin_not_loaded",
                plugin=self.group,
            )
        return choices

    def validate(self, value: Any) -> FigureSpec:
        """The figure that a mapping declares. Other than in other registries, a `kind` alone is not enough.

        Raises pydantic.ValidationError, PluginError.
        """
        return super().validate(value) if isinstance(value, FigureSpec) else self._validated(value, self.choices())

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        members = {kind: cls.__pydantic_core_schema__ for kind, cls in self.choices().items()}
        return handler(core_schema.tagged_union_schema(members, "kind"))


FIGURES = FigureRegistry("figure", FigureSpec, (), entry_points="cope_sweep.figures")

AnyFigure = Annotated[FigureSpec, FIGURES]
"""Any registered kind of figure that a file can declare: a mapping with its `kind`."""
