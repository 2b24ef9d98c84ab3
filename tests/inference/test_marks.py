"""Marks and labels of tokens."""

import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_sweep.inference.probe import text_marks, token_labels, token_marks
from cope_sweep.tasks import Counting, FlipFlop, SelectiveCopy, WikiText
from cope_sweep.text import TextTokenizer

WIKITEXT = " \n = Alpha Beta = \n \n He came . She ( 3 @.@ 5 m ) left ! \n = = Early life = = \n \n Mr. X said : no ? yes = no \n"


def marked(text, name, pieces=None):
    pieces = [piece.encode() for piece in (pieces or re.findall(r"\s?\S+|\s", text))]
    return [piece.decode().strip() for piece, on in zip(pieces, text_marks(pieces)[name], strict=True) if on]


def test_wikitext():
    assert marked(WIKITEXT, "section") == ["=", "="]
    assert marked(WIKITEXT, "sentence") == [".", "!", "Mr.", "?"]
    assert sum(text_marks([bytes([b]) for b in WIKITEXT.encode()])["newline"]) == WIKITEXT.count("\n")


def test_markdown_and_prose():
    text = '# Title\n\nHe said "Stop!" and went… No. 5 e.g. this.\n#hash\n### Deep one\nThe end.'
    assert marked(text, "section") == ["#", "###"]
    assert marked(text, "sentence") == ['"Stop!"', "No.", "e.g.", "this.", "end."]


def test_tokens_with_two_units_or_a_part_of_one():
    assert text_marks([b"a", b".\n\n", b"b", b""])["newline"].tolist() == [False, True, False, False]
    assert text_marks([b"a", b".\n\n", b"b"])["sentence"].tolist() == [False, True, False]
    assert text_marks([b"a", b".", b".", b".", b" b"])["sentence"].tolist() == [False, True, True, True, False]
    assert text_marks([b"= ", b"T\xc3", b"\xa9 ", b"=", b"\n", b"x"])["section"].tolist() == [True] + [False] * 5
    assert text_marks([])["newline"].tolist() == []


@given(text=st.text("ab. !?\n=#é", max_size=40), cuts=st.sets(st.integers(0, 60)))
@settings(max_examples=200, deadline=None)
def test_marks_do_not_depend_on_token_boundaries(text, cuts):
    data = text.encode()
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(data)), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    by_byte = text_marks([bytes([byte]) for byte in data])
    for name, whole_T in text_marks(pieces).items():
        expected = [by_byte[name][a:b].any() for a, b in pairwise(edges)]
        assert whole_T.tolist() == expected


def test_marks_of_tasks():
    copy = SelectiveCopy(tokens=2, blanks=2, dense_blanks=1, sparse_blanks=4, vocabulary=6)
    tokens_T = copy.sequences("in_dist", 0, 0, 1).inputs_NT[0]
    marks = copy.marks(tokens_T)
    assert {name: int(on.sum()) for name, on in marks.items()} == {"data": 2, "blank": 2, "marker": 2}
    np.testing.assert_array_equal(sum(on.astype(int) for on in marks.values()), 1)
    tokens_NT = FlipFlop(pairs=5).sequences("in_dist", 0, 0, 3).inputs_NT
    marks = FlipFlop(pairs=5).marks(tokens_NT)
    assert marks["w"][:, 0].all()
    assert marks["r"][:, -1].all()
    np.testing.assert_array_equal(marks["bit"], np.arange(9) % 2 == np.ones((3, 1)))
    np.testing.assert_array_equal(sum(on.astype(int) for on in marks.values()), 1)


def test_marks_and_labels_of_a_text():
    tokenizer = TextTokenizer.train([WIKITEXT * 3], 300)
    task = WikiText(corpus="small", tokens=16, vocabulary=300)
    ids_T = np.concatenate(([tokenizer.end_of_text], tokenizer.encode([WIKITEXT + "é"])[0])).astype(int)
    pieces = tokenizer.pieces(ids_T.tolist())
    predictor = SimpleNamespace(run=SimpleNamespace(task=task), reads_text=True, tokenizer=tokenizer)
    labels, marks = token_labels(predictor, ids_T), token_marks(predictor, ids_T)
    assert labels[0] == "¶"
    assert "".join(labels[1:]).startswith(WIKITEXT)
    assert {name: on.tolist() for name, on in marks.items()} == {
        name: on.tolist() for name, on in text_marks(pieces).items()
    }
    assert [piece for piece, on in zip(pieces, marks["newline"], strict=True) if on] == [
        piece for piece in pieces if b"\n" in piece
    ]


def test_labels_of_tasks():
    copy = SelectiveCopy(tokens=2, blanks=2, dense_blanks=1, sparse_blanks=4, vocabulary=6)
    for task, ids, labels in (
        (copy, range(6), ["0", "1", "2", "3", "_", ">"]),
        (FlipFlop(pairs=5), range(5), ["0", "1", "w", "i", "r"]),
        (Counting(), [0, 11, 12, 13, 14], ["0", "pass;", "=", ";", "++;"]),
    ):
        predictor = SimpleNamespace(run=SimpleNamespace(task=task), reads_text=False)
        assert token_labels(predictor, np.array(ids)) == labels
