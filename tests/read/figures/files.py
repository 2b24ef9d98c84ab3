"""What is in the files that figures are written to."""

import struct
from xml.etree import ElementTree

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
