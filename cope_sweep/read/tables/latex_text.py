r"""Texts as LaTeX code that every engine compiles, with no packages.

pdfLaTeX reads accented Latin letters, but stops at Greek letters, arrows and most symbols, which have commands
here. Other scripts it does not have: `unknown_characters` finds what is left for XeLaTeX and LuaLaTeX.

The table is our own: pylatexenc's writes Cyrillic as commands (`\cyra`) of a font encoding that a document has to load.
"""

from __future__ import annotations

import re
import unicodedata

_TEXT = {character: "\\" + character for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}",
    "–": "--", "—": "---", "‐": "-", "‑": "-", "…": r"\ldots{}", "•": r"\textbullet{}", "§": r"\S{}", "¶": r"\P{}",
    "‘": "`", "’": "'", "“": "``", "”": "''", "„": ",,", "‚": ",",
    "©": r"\textcopyright{}", "®": r"\textregistered{}", "™": r"\texttrademark{}", "£": r"\pounds{}",
    "ª": r"\textordfeminine{}", "º": r"\textordmasculine{}",
}  # fmt: skip
"""Characters that mean something to TeX, and punctuation."""

_MATHEMATICS = {
    "±": r"\pm", "∓": r"\mp", "×": r"\times", "÷": r"\div", "−": "-", "·": r"\cdot", "⋅": r"\cdot", "∗": r"\ast",
    "⋆": r"\star", "★": r"\star", "∘": r"\circ", "°": r"^\circ", "√": r"\surd", "¬": r"\neg", "µ": r"\mu",
    "∂": r"\partial", "≤": r"\leq", "≥": r"\geq", "≠": r"\neq", "≈": r"\approx", "≡": r"\equiv", "∼": r"\sim",
    "≃": r"\simeq", "≅": r"\cong", "∝": r"\propto", "≪": r"\ll", "≫": r"\gg", "«": r"\ll", "»": r"\gg",
    "‹": "<", "›": ">", "≺": r"\prec", "≻": r"\succ", "∥": r"\parallel",
    "⊥": r"\perp", "⊤": r"\top", "∞": r"\infty", "∇": r"\nabla", "∆": r"\Delta", "∑": r"\sum", "∏": r"\prod",
    "∫": r"\int", "∈": r"\in", "∉": r"\notin", "∋": r"\ni", "⊂": r"\subset", "⊃": r"\supset", "⊆": r"\subseteq",
    "⊇": r"\supseteq", "∪": r"\cup", "∩": r"\cap", "∅": r"\emptyset", "∀": r"\forall", "∃": r"\exists",
    "∧": r"\wedge", "∨": r"\vee", "⊕": r"\oplus", "⊖": r"\ominus", "⊗": r"\otimes", "⊙": r"\odot", "∖": r"\setminus",
    "⟨": r"\langle", "⟩": r"\rangle", "⌊": r"\lfloor", "⌋": r"\rfloor", "⌈": r"\lceil", "⌉": r"\rceil", "‖": r"\|",
    "←": r"\leftarrow", "→": r"\rightarrow", "↔": r"\leftrightarrow", "↑": r"\uparrow", "↓": r"\downarrow",
    "↕": r"\updownarrow", "⇐": r"\Leftarrow", "⇒": r"\Rightarrow", "⇔": r"\Leftrightarrow", "⇑": r"\Uparrow",
    "⇓": r"\Downarrow", "↦": r"\mapsto", "⟵": r"\longleftarrow", "⟶": r"\longrightarrow", "⟹": r"\Longrightarrow",
    "⟷": r"\longleftrightarrow", "↗": r"\nearrow", "↘": r"\searrow", "↙": r"\swarrow", "↖": r"\nwarrow",
    "↩": r"\hookleftarrow", "↪": r"\hookrightarrow", "⇌": r"\rightleftharpoons", "⋯": r"\cdots", "⋮": r"\vdots",
    "⋱": r"\ddots", "△": r"\triangle", "▷": r"\triangleright", "◁": r"\triangleleft", "◇": r"\diamond",
    "○": r"\bigcirc", "●": r"\bullet", "■": r"\rule{0.6em}{0.6em}", "♠": r"\spadesuit", "♣": r"\clubsuit",
    "♥": r"\heartsuit", "♦": r"\diamondsuit", "ℓ": r"\ell", "ℏ": r"\hbar", "ℜ": r"\Re", "ℑ": r"\Im", "ℵ": r"\aleph",
    "′": r"'", "″": r"''", "ϵ": r"\epsilon", "ϑ": r"\vartheta", "ϕ": r"\phi", "φ": r"\varphi", "ϱ": r"\varrho",
    "ϖ": r"\varpi", "ε": r"\varepsilon", "ς": r"\varsigma", "λ": r"\lambda", "Λ": r"\Lambda",
}  # fmt: skip

_LATIN_LETTERS = dict(zip("ΑΒΕΖΗΙΚΜΝΟΡΤΧο", "ABEZHIKMNOPTXo", strict=True))
"""Greek letters without a command, which look like these."""
_SCRIPTS = {"<super>": "^", "<sub>": "_"}
_LIGATURES = re.compile(r"-(?=-)|,(?=,)|'(?=')|`(?=`)|[?!](?=`)")
"""The first of two characters that TeX would join."""
_NOT_IN_LATIN_FONTS = "ÐÞðþĄąĐđĘęĦħĮįĸĿŀŉŊŋŦŧŲųſ"
"""Tried with pdfLaTeX of TeX Live 2022, without packages."""


def latex_text(text: str) -> str:
    """`text` on one line, as LaTeX code. A minus sign precedes negative numbers. Invisible characters are left out."""
    visible = "".join(character for character in text if character.isspace() or not _is_invisible(character))
    # NFC: pdfLaTeX has é, and no accent that follows its letter.
    words = " ".join(unicodedata.normalize("NFC", visible).split())
    signed = re.sub(r"(?<![\w.])-(?=[\d.])", "−", words)
    kept_apart = _LIGATURES.sub(r"\g<0>\0", signed)
    return "".join("{}" if character == "\0" else _code(character) or character for character in kept_apart)


def after_command(code: str) -> str:
    r"""Code that follows `\\`, `\midrule` or `\item`, where `[8 positions]` and `*` would belong to the command."""
    return "{}" + code if code.startswith(("[", "*")) else code


def unknown_characters(code: str) -> str:
    """The characters of LaTeX code that pdfLaTeX does not have, each once, in their order."""
    return "".join(dict.fromkeys(character for character in code if not _is_in_latin_fonts(character)))


def _code(character: str) -> str | None:
    if character.isascii() or character in _TEXT:
        return _TEXT.get(character)
    if command := _MATHEMATICS.get(character) or _greek(character):
        return f"${command}$"
    if character in _LATIN_LETTERS:
        return _LATIN_LETTERS[character]
    kind, *parts = unicodedata.decomposition(character).split() or [""]
    plain = "".join(chr(int(part, 16)) for part in parts)
    if kind in _SCRIPTS and plain.isascii():
        return f"${_SCRIPTS[kind]}{{{plain}}}$"
    if kind == "<fraction>" and len(fraction := plain.split("\N{FRACTION SLASH}")) == 2:
        return rf"$\frac{{{fraction[0]}}}{{{fraction[1]}}}$"
    return None


def _greek(character: str) -> str | None:
    """The command of a Greek letter, from its name in Unicode."""
    match = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", unicodedata.name(character, ""))
    if match is None or character in _LATIN_LETTERS or not "Α" <= character <= "ω":
        return None
    name = match[2].lower()
    return "\\" + (name if match[1] == "SMALL" else name.capitalize())


def _is_invisible(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf")


def _is_in_latin_fonts(character: str) -> bool:
    """Whether pdfLaTeX has the character: ASCII, and the letters of Latin-1 and Latin Extended-A, but for a few."""
    return character.isascii() or ("¡" <= character <= "ſ" and character not in _NOT_IN_LATIN_FONTS)
