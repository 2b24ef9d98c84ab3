"""compute-sanitizer by a stand-in: its command line, and what its exit codes mean."""

import sys

import pytest
from cope_benchmarks import sanitizer
from cope_benchmarks.sanitizer import FOUND, PROBE, Outcome, sanitize

PROGRAM = ("-c", "pass")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A stand-in that writes its arguments to a file; `tool(memcheck=…)` determines the commands by check."""
    path, calls = tmp_path / "compute-sanitizer", tmp_path / "calls"

    def make(*, probe="exit 0", memcheck="exit 0", racecheck="exit 0"):
        path.write_text(
            f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {calls}\n'
            f'case "$*" in *import*) {probe} ;; *memcheck*) {memcheck} ;; *racecheck*) {racecheck} ;; esac\n'
        )
        path.chmod(0o755)
        monkeypatch.setattr(sanitizer, "TOOLS", ("compute-sanitizer", str(path)))
        return calls

    return make


def test_without_the_tool_its_absence_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitizer, "TOOLS", ("no-such-sanitizer", str(tmp_path / "none")))
    assert sanitize(tmp_path, PROGRAM) == Outcome("no no-such-sanitizer on this machine")


def test_memory_and_races_are_checked_after_the_tool_has_proved_that_it_works(tool, tmp_path):
    calls = tool()
    assert sanitize(tmp_path, PROGRAM) == Outcome("compute-sanitizer found nothing")
    options = f"--error-exitcode {FOUND} {sys.executable} -c"
    assert calls.read_text().splitlines() == [
        f"1 --tool memcheck {options} {PROBE}",
        f"1 --tool memcheck {options} pass",
        f"1 --tool racecheck {options} pass",
    ]


def test_where_the_tool_does_not_work_nothing_is_wrong(tool, tmp_path):
    calls = tool(probe=f"exit {FOUND}")
    outcome = sanitize(tmp_path, PROGRAM)
    assert not outcome.wrong
    assert "does not work here: exit code 86" in outcome.note
    assert len(calls.read_text().splitlines()) == 1


@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
def test_what_it_finds_is_an_error(check, tool, tmp_path):
    tool(**{check: f"exit {FOUND}"})
    assert sanitize(tmp_path, PROGRAM) == Outcome(f"compute-sanitizer --tool {check} found errors", wrong=True)


def test_a_check_without_a_result_is_reported_and_the_other_one_runs(tool, tmp_path, monkeypatch):
    calls = tool(memcheck="exit 1")
    outcome = sanitize(tmp_path, PROGRAM)
    assert outcome == Outcome("no result of compute-sanitizer --tool memcheck: exit code 1")
    assert "racecheck" in calls.read_text()


def test_a_check_that_takes_too_long_has_no_result(tool, tmp_path, monkeypatch):
    tool(racecheck="exec sleep 600")
    monkeypatch.setattr(sanitizer, "LIMIT_S", 10.0)
    assert sanitize(tmp_path, PROGRAM) == Outcome("no result of compute-sanitizer --tool racecheck: more than 10 s")
