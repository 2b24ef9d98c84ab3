import json
import subprocess
import sys

import pytest

from cope_sweep.cli import app

COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)
HEAVY = ["torch", "ray", "mlflow", "pandas", "numpy", "pydantic", "fastapi"]


def test_the_commands_are_these():
    assert COMMANDS == ["list", "perplexity", "plan", "probe", "report", "run", "schema", "serve", "status", "submit"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_teaches_by_example(shell, command):
    out, _ = shell(command, "--help")
    assert "Example: cope-sweep " + command in out


def test_help_imports_nothing_heavy():
    script = f"import json, sys, cope_sweep.cli; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_looking_needs_no_torch():
    """A plan, a table, a status come without the seconds that importing torch takes."""
    script = "import sys, cope_sweep.plan, cope_sweep.results, cope_sweep.record; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_schema(shell):
    assert json.loads(shell("schema")[0])["title"] == "A cope-sweep ablation"
