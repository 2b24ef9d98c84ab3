"""What is in the files that figures are written to."""

import struct
from html.parser import HTMLParser
from xml.etree import ElementTree

from cope_sweep.api.figures import GetFigure
from cope_sweep.read.figures.available import draw_figure
from cope_sweep.read.tables import read_results

SVG = "{http://www.w3.org/2000/svg}"


def png_size(content):
    """Width and height in pixels, from the header of a PNG file."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[12:16] == b"IHDR"
    assert content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def svg_texts(content):
    """The texts of an SVG file, in order."""
    return ["".join(each.itertext()) for each in ElementTree.fromstring(content).iter(f"{SVG}text")]


def svg_elements(content):
    """The names of all elements."""
    return {each.tag.removeprefix(SVG) for each in ElementTree.fromstring(content).iter()}


class Page(HTMLParser):
    """The start tags of an HTML text with their attributes, and the content of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.is_script = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.is_script = tag == "script"

    def handle_data(self, data):
        if self.is_script:
            self.scripts.append(data)

    def handle_endtag(self, tag):
        self.is_script = False

    def count(self, name):
        return sum(tag == name for tag, _ in self.tags)

    def values(self, *attributes):
        """The values of these attributes, of all tags."""
        return [attrs[name] for _, attrs in self.tags for name in attributes if name in attrs]


def made(kind, plan, store, **options):
    """A figure of the runs of a plan in a store, with these options."""
    return draw_figure(read_results(plan, store), GetFigure(name="", figure=kind, **options))
