"""The options of `cope-sweep mcp`."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from cope_sweep.cli.application import app

BUDGET = ["--max-runs", "1", "--max-cpu-minutes", "1"]


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (["--allow-training"], "--max-runs"),
        (["--allow-training", *BUDGET[:2]], "--max-cpu-minutes"),
        (BUDGET, "--allow-training"),
    ],
)
def test_training_needs_permission_and_both_limits(options: list[str], missing: str) -> None:
    result = CliRunner().invoke(app, ["mcp", *options])
    assert result.exit_code == 2
    assert missing in result.output


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    result = CliRunner().invoke(app, ["mcp"])
    assert result.exit_code == 2
    assert ".[mcp]" in result.output


def test_beyond_this_machine_keys_are_needed(tmp_path: object) -> None:
    result = CliRunner().invoke(
        app, ["mcp", "--http", "--host", "0.0.0.0", "--port", "0", "--keys-file", f"{tmp_path}/keys.txt"]
    )
    assert result.exit_code == 2
    assert "--new-key" in result.output
