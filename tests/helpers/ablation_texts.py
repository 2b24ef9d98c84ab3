"""A small ablation file as text, and helpers to load it."""

import textwrap

import pytest

from cope_sweep.config import LoadedAblation, SpecError, expand, with_overrides
from cope_sweep.config.loading import validate
from cope_sweep.config.source import parse_source

BASE = textwrap.dedent("""\
    title: A test
    base:
      task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
      model: {dim: 8, heads: 2, layers: 1}
    metrics: [{name: in_dist/token_error}]
    """)
TEXT = textwrap.dedent("""\
    title: A test
    base:
      task: {kind: selective_copy, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4}
      model: {dim: 8, heads: 2, layers: 1}
      train: {steps: 6}
    grid:
      model.position: {CoPE: [cope], none: []}
      train.lr: [1e-3, 2e-3]
    seeds: [0, 1]
    metrics: [{name: in_dist/token_error}]
    scales:
      wide: {set: {model.dim: 32}, seeds: [5], grid: {train.lr: [5e-3]}}
    """)


def load(text: str = TEXT) -> LoadedAblation:
    """The ablation in `text`."""
    return validate(parse_source(text, "test.yaml"), "test")


def error_of(text: str, **overrides) -> SpecError:
    """The SpecError that loading, overriding and expanding `text` raises."""
    with pytest.raises(SpecError) as caught:
        expand(with_overrides(load(text), **overrides))
    return caught.value


def located(error: SpecError) -> tuple[str, str, str]:
    """Code, place and key path of an error, with which its message begins; "" where it is about no key."""
    place, key_path = error.data["place"], error.data.get("key_path", "")
    assert str(error).startswith(f"{place}: {key_path}: " if key_path else f"{place}: ")
    return error.code, place, key_path
