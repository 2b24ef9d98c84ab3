"""The cores that this process may use."""

import os
from pathlib import Path

import pytest

from cope_sweep.store.provenance import usable_cpus


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)]
)
def test_the_quota_of_a_container_counts(monkeypatch, quota, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(Path, "read_text", lambda _: quota)
    assert usable_cpus() == cpus
