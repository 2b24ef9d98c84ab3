r"""Control characters in texts of others, such as names in their files: they are shown (`\x1b`), not obeyed.

A terminal obeys them: a text could move the cursor, hide lines, or write to the clipboard.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_SHOWN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def visible(text: str) -> str:
    r"""The text with its control characters (C0, DEL, C1) as `\x1b`, except tabs and ends of lines."""
    return text.translate(_SHOWN)


class SafeConsole(Console):
    """A console for texts of others: styles and cursor movements are rich's own, all other controls are `visible`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
