"""The base class of the kinds of figures. A kind is a file in `kinds`, with its options, its data and its drawing.

Each command imports all kinds, and so does each plan with figures. At its top, a kind therefore imports only what is
light: this module, `cope_sweep.figures`, `read.numbers`, pydantic. It imports pandas, matplotlib, torch and the rest of
`read` where it uses them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cope_sweep.figures import FigureSpec

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Drawing

    from cope_sweep.api.figures import GetFigure
    from cope_sweep.config import Plan
    from cope_sweep.read.figures.canvas import Size
    from cope_sweep.read.tables.results import Results


@dataclass(frozen=True, kw_only=True)
class FigureData:
    """The data of a figure, with all that their drawing needs."""

    EMPTY: ClassVar[str] = "no finished run"
    """What the drawing says if the frame is empty."""

    frame: pd.DataFrame
    title: str = ""
    """Of a figure whose file has none; empty: the ablation's."""

    @abstractmethod
    def draw(self, title: str, size: Size | None) -> Drawing:
        """Draw the frame, which is not empty, on the canvas (`figures.canvas`), whose style is set.

        `size`: None: the size that it needs.
        """


class FigureKind(FigureSpec):
    """A kind of figure. Its fields are what a file may say about it, its docstring describes it in the schema.

    `kind: Literal["values"] = "values"` names it, and `FIGURES.register` makes it known.
    """

    SHOWS: ClassVar[str]
    """The content of the figure in one line: its title in lists, and its line in `cope-sweep figure --help`."""
    OFFERED: ClassVar[Literal["always", "axes", "search", "declared"]] = "declared"
    """The ablations that have it without declaring it: all; those whose rows differ on an axis; searches; none."""
    TAKES: ClassVar[tuple[str, ...]] = ("metric", "row", "log")
    """The options of `GetFigure` about its content that it takes. The others are errors."""
    NEEDS_CHECKPOINT: ClassVar[bool] = False
    """Whether it shows a trained model, so that only a file or a command with a run can ask for it."""

    @classmethod
    def undeclared(cls) -> FigureKind:
        """The kind with its defaults, for a figure that no file declares. Keys that a file must have are missing."""
        return cls.model_construct()  # type: ignore[call-arg] # a kind has a default for `kind`

    @classmethod
    def drawn_lines(cls, plan: Plan, rows: int) -> int:
        """The number of lines, bars or cells of a figure of so many rows of a plan."""
        return rows

    def question_fields(self) -> dict[str, Any]:
        """The options of `GetFigure`, other than `row`, that say what this figure of a file says."""
        return {}

    @abstractmethod
    def data(self, results: Results, question: GetFigure) -> FigureData:
        """Compute the data.

        Args:
            results: The runs.
            question: What to draw: metrics, axes and rows, by a user's options or by those of the file's figure.

        Raises FigureError, QueryError, StoreError; a kind that needs a checkpoint also what
        `cope_sweep.inference.probe` raises.
        """
