"""A report as one HTML file: its Markdown, rendered, with the figures inside. It loads nothing and has no script."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 1rem; max-width: 70rem; font: 15px/1.5 system-ui, sans-serif; }}
body {{ overflow-wrap: break-word; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.2rem; }} h3 {{ font-size: 1rem; }}
p {{ max-width: 52rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #d9dce0; text-align: left; vertical-align: top; }}
img {{ max-width: 100%; height: auto; }}
@media print {{ .wide {{ overflow: visible; }} tr {{ break-inside: avoid; }} table {{ font-size: 7.5pt; }} }}
</style>
</head>
<body>
{body}</body>
</html>
"""


class _Renderer(RendererHTML):
    """Wide tables scroll by themselves, so that the page does not."""

    def table_open(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return f'<div class="wide">{self.renderToken(tokens, index, options, env)}'

    def table_close(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return f"{self.renderToken(tokens, index, options, env)}</div>\n"


def html_page(title: str, markdown: str, pictures: Mapping[str, bytes]) -> str:
    """A page with the title and the rendered Markdown.

    Args:
        title: The title, as plain text.
        markdown: The text. HTML in it is shown as text.
        pictures: Address of an image in the text → SVG that takes its place.
    """
    # "commonmark" alone would let HTML through; "js-default" has tables, and escapes HTML.
    parser = MarkdownIt("js-default", renderer_cls=_Renderer)
    tokens = parser.parse(markdown)
    for token in (child for block in tokens for child in block.children or ()):
        if token.type == "image" and (svg := pictures.get(str(token.attrs["src"]))) is not None:
            # After parsing: markdown-it refuses `data:image/svg+xml` in a text, since text may be anybody's.
            token.attrs["src"] = "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return PAGE.format(title=escape(title), body=parser.renderer.render(tokens, parser.options, {}))
