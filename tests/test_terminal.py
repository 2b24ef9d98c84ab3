"""Control characters of texts are shown."""

import io

import pytest
from rich.table import Table
from rich.text import Text

from cope_sweep.terminal import SafeConsole, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x9b2J\x7f\r\0", r"\x9b2J\x7f\x0d\x00"),
        ("tab\tline\nü – 日本", "tab\tline\nü – 日本"),
    ],
)
def test_controls_are_visible(text, shown):
    assert visible(text) == shown


def test_a_console_writes_no_controls_but_its_own():
    console = SafeConsole(file=io.StringIO(), force_terminal=True, color_system="standard")
    table = Table()
    table.add_row(Text("a\x1b[2J"))  # the column is as wide as what a terminal would print
    console.print(table, Text("c\x9bd", style="red"), "e\x1bf", sep="\n")
    console.print("g\x1bh", markup=False, soft_wrap=True)
    out = console.file.getvalue()
    assert all(part in out for part in (r"│ a\x1 │", "\x1b[31mc\\x9bd\x1b[0m", r"e\x1bf", r"g\x1bh"))
    assert not any(part in out for part in ("\x1b[2J", "\x9b", "\x1bf", "\x1bh"))
