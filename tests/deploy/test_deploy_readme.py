"""deploy/README.md: its links and files exist, and its commands have the options that it uses."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from cope_sweep.cli.application import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "README.md").read_text()
COMMANDS = [
    line.split("cope-sweep ", 1)[1].split(" #")[0].split(" > ")[0].split(" && ")[0].split("`")[0].strip()
    for block in (*re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL), *re.findall(r"`(cope-sweep [^`]+)`", TEXT))
    for line in block.splitlines()
    if re.search(r"(?<![\w/-])cope-sweep [a-z]+", line) and not re.search(r"kubectl|docker build", line)
]


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert links
    assert [each for each in links if not (ROOT / "deploy" / each).exists()] == []


def test_named_tests_exist():
    names = set(re.findall(r"\btest_\w+\.py", TEXT))
    assert names
    assert names <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_every_alert_is_named():
    alerts = re.findall(r"- alert: (\w+)", (ROOT / "deploy" / "monitoring" / "alerts.yaml").read_text())
    assert alerts
    assert {name for name in alerts if f"`{name}`" not in TEXT} == set()


@pytest.mark.parametrize("line", sorted(set(COMMANDS)))
def test_commands_and_options_exist(line):
    words = shlex.split(line)
    command = get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not getattr(command, "commands", None), f"no command: {line}"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known
