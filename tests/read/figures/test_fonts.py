"""Characters that the style's font does not have: other fonts of the machine, or a warning. With a font made here."""

import logging

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.font_manager import fontManager

from cope_sweep.read.figures import canvas, fonts

LABEL = "位 0"
"""Its first character is in no font of matplotlib."""


@pytest.fixture
def only_matplotlib_fonts(monkeypatch):
    own = [font for font in fontManager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(fontManager, "ttflist", own)
    monkeypatch.setattr(fonts, "findSystemFonts", list)


@pytest.fixture
def with_chinese(only_matplotlib_fonts, tmp_path, monkeypatch):
    """A font with one character, a square."""
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 900), (900, 900), (900, 0)):
        pen.lineTo(point)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "place"])
    builder.setupCharacterMap({ord("位"): "place"})
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "place": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (500, 0), "place": (1000, 0)})
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Places", "styleName": "Regular", "psName": "Places"})
    builder.setupOS2(usWeightClass=400)
    builder.setupPost()
    builder.save(tmp_path / "places.ttf")
    fontManager.addfont(tmp_path / "places.ttf")


def drawn():
    drawing, (panel,) = canvas.panels(1, title="a figure")
    panel.set_xlabel(LABEL)
    return drawing


@pytest.mark.parametrize("file_format", ["png", "pdf"])
def test_an_installed_font_has_what_the_style_s_font_lacks(with_chinese, caplog, file_format):
    with caplog.at_level(logging.WARNING):
        content = canvas.render(drawn, file_format)
    assert not caplog.records
    if file_format == "pdf":
        assert b"Places" in content


@pytest.mark.parametrize("file_format", ["png", "pdf"])
def test_a_warning_names_the_label_where_no_font_has_its_characters(only_matplotlib_fonts, caplog, file_format):
    with caplog.at_level(logging.WARNING):
        canvas.render(drawn, file_format)
    (record,) = caplog.records
    assert record.name == fonts.__name__
    assert record.args == ("位", repr(LABEL))


def test_an_svg_keeps_its_text_and_its_font(with_chinese, caplog):
    with caplog.at_level(logging.WARNING):
        content = canvas.render(drawn, "svg").decode()
    assert LABEL in content
    assert "Places" not in content
    assert not caplog.records


def test_a_style_chooses_the_fonts(with_chinese, tmp_path, caplog):
    (tmp_path / "own.mplstyle").write_text("font.family: Places, sans-serif\n")
    with caplog.at_level(logging.WARNING):
        assert b"Places" in canvas.render(drawn, "pdf", style=str(tmp_path / "own.mplstyle"))
    assert not caplog.records
