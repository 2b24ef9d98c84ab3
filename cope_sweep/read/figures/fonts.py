"""Fonts for characters that the fonts of a style do not have, such as those of Chinese labels in PNG and PDF.

An SVG names its font, and keeps its texts as texts: whoever shows it has to have the characters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure as Drawing
from matplotlib.font_manager import FontProperties, findSystemFonts, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

log = logging.getLogger(__name__)


def add_fallbacks(drawing: Drawing) -> bool:
    """Append installed fonts to `font.family`, for the characters of a drawing that its fonts do not have.

    Returns whether there are such fonts: then draw again. A warning names the texts with characters that no font has.
    """
    texts = dict.fromkeys(text.get_text() for text in drawing.findobj(Text) if isinstance(text, Text))
    families = list(mpl.rcParams["font.family"])
    missing = _without_glyph("".join(texts), (fontManager.findfont(FontProperties(family=[name])) for name in families))
    added: list[str] = []
    if missing:
        for name, path in _installed():
            rest = _without_glyph(missing, [path])
            if rest != missing:
                added.append(name)
                missing = rest
            if not missing:
                break
    if missing:
        named = ", ".join(repr(text) for text in texts if set(text) & set(missing))
        log.warning(
            "no installed font has %s, which the figure shows as boxes in %s; install a font that has it, or write SVG",
            missing,
            named,
        )
    mpl.rcParams["font.family"] = [*families, *added]
    return bool(added)


def _without_glyph(characters: str, paths: Iterable[str]) -> str:
    """The characters, each once, that none of these fonts has."""
    has = frozenset[int]().union(*map(_code_points, paths))
    return "".join(dict.fromkeys(each for each in characters if each.isprintable() and ord(each) not in has))


def _installed() -> list[tuple[str, str]]:
    """Name and path of the upright fonts of normal weight, each name once, sorted by name.

    Without those of matplotlib's mathematics, whose characters have other places, and its font of boxes.
    """
    known = {font.fname for font in fontManager.ttflist}
    for path in findSystemFonts():
        if path not in known:  # matplotlib keeps its list in a file, and does not see fonts that were installed since
            with contextlib.suppress(OSError, RuntimeError):
                fontManager.addfont(path)
    own = Path(mpl.get_data_path())
    fonts = {
        font.name: font.fname
        for font in fontManager.ttflist
        if font.style == "normal"
        and font.weight in (400, "normal", "regular")
        and (font.name.startswith("DejaVu") or not Path(font.fname).is_relative_to(own))
    }
    return sorted(fonts.items())


@lru_cache(maxsize=1024)
def _code_points(path: str) -> frozenset[int]:
    try:
        font = FT2Font(path)
    except (OSError, RuntimeError):  # damaged, gone, or with pictures in place of outlines, as of emoji
        return frozenset()
    return frozenset(font.get_charmap())
