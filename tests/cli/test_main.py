"""The command as a whole: its commands, help, exit codes, and what it imports."""

import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.main import get_command

from cope_sweep import __version__
from cope_sweep.cli.application import COMMANDS_GROUP, add_installed_commands, app
from cope_sweep.cli.output import OutputError

COMMANDS = get_command(app).commands
LEAVES = sorted(
    (name, *sub)
    for name, command in COMMANDS.items()
    for sub in ([(s,) for s in getattr(command, "commands", {})] or [()])
)


def test_the_commands():
    own = {
        "best", "delete", "diff", "export", "figure", "list", "logs", "perplexity", "plan", "probe", "prune", "report", "retry", "run", "runs", "schema",
        "status", "stop", "store", "submit", "sync", "table", "tried",
    }  # fmt: skip
    assert set(COMMANDS) == own | {"serve", "bench", "mcp"}  # the last three are entry points of other packages


@pytest.mark.parametrize("words", [words for words in LEAVES if words[0] != "bench"], ids=" ".join)
def test_every_help_has_an_example(shell, words):
    out, _ = shell(*words, "--help")
    assert f"Example: cope-sweep {' '.join(words)}" in out


def test_the_version(shell):
    assert shell("--version")[0] == f"cope-sweep {__version__}\n"


@pytest.mark.parametrize("words", [["run"], ["store", "check"], []], ids=" ".join)
def test_flags_have_no_type(shell, words):
    out, _ = shell(*words, "--help")
    assert "--help" in out
    assert "<bool>" not in out


def test_help_explains_the_exit_codes(shell):
    text = " ".join(shell("--help")[0].split())
    codes = (
        "0 success",
        "1 some runs failed",
        "2 bad input",
        "74 standard output cannot be written",
        "130 interrupted",
    )
    for part in (*codes, "141 standard output was closed"):
        assert part in text


def test_an_error_is_one_line_or_json(shell):
    _, err = shell("plan", "tiyn", code=2)
    assert err.startswith("error: ")
    assert "tiyn" in err
    assert err.count("\n") == 1
    error = shell.json("plan", "tiyn", code=2)["error"]
    assert set(error) == {"code", "message", "data"}
    assert f"error: {error['message']}\n" == err
    assert (error["code"], error["data"]["name"], error["data"]["allowed"]) == ("not_found", "tiyn", ["tiny"])


def test_a_command_of_a_package_that_is_missing_says_so(shell, monkeypatch):
    ghost = EntryPoint("ghost", "a_package_that_is_not_there:app", COMMANDS_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: [ghost])
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    add_installed_commands()
    shell.command = get_command(app)
    shell.refuses("command_not_installed", "ghost", command="ghost")


def test_an_unknown_option_or_command_is_bad_input(shell):
    assert "No such option" in shell("plan", "tiny", "--sets", "x", code=2)[1]
    assert "No such command" in shell("paln", "tiny", code=2)[1]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["table", "tiny", "--format", "latx"], "'latx' is not one of the choices; did you mean 'latex'? accepted: "),
        (["runs", "--status", "xyz"], "'xyz' is not one of the choices; accepted: pending, running, finished, "),
        (["table", "tiny", "--top", "x"], "Invalid value for '--top': "),
    ],
)
def test_a_value_that_is_no_choice_is_named_with_the_choices(shell, words, shown):
    error = " ".join(shell(*words, code=2)[1].replace("│", " ").split())
    assert shown in error
    assert "Value error" not in error


@pytest.mark.slow
def test_a_closed_pipe_exits_with_141(shell):
    reading, writing = os.pipe()
    os.close(reading)
    process = shell.start("list", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGPIPE
    assert err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "unbuffered"), [(["plan", "tiny"], ""), (["schema"], "1"), (["--help"], "")])
def test_standard_output_that_cannot_be_written_is_one_line_and_exits_with_74(shell, words, unbuffered):
    shell.environment["PYTHONUNBUFFERED"] = unbuffered
    with Path("/dev/full").open("w") as full:
        process = shell.start(*words, stdout=full)
        _, err = process.communicate(timeout=120)
    assert process.returncode == OutputError.exit_code == 74
    assert err == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.slow
def test_closed_standard_output_is_one_line_and_exits_with_74(shell):
    command = f"{shlex.join([sys.executable, '-m', 'cope_sweep.cli', 'list'])} >&-"
    done = subprocess.run(
        ["sh", "-c", command], cwd=shell.folder, env=shell.environment, capture_output=True, text=True
    )
    assert done.returncode == 74
    assert done.stderr.startswith("error: standard output is closed")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_errors_keep_their_code_where_standard_error_cannot_be_written(shell):
    with Path("/dev/full").open("w") as full:
        process = shell.start("plan", "ghost", stderr=full)
        process.communicate(timeout=120)
    assert process.returncode == 2


@pytest.mark.parametrize("columns", ["0", "-1", "", "\N{SUPERSCRIPT TWO}"])
def test_a_terminal_without_a_width_is_as_one_that_does_not_say_it(shell, columns):
    del shell.environment["COLUMNS"]
    calls = [(["list", "--help"], 0), (["plan", "ghost"], 2), (["plan", "tiny", "--sets"], 2)]
    expected = [shell(*words, code=code) for words, code in calls]
    shell.environment |= {"COLUMNS": columns, "LINES": columns}
    assert [shell(*words, code=code) for words, code in calls] == expected


@pytest.mark.slow
def test_the_installed_command_is_this_one():
    """The entry point of the distribution calls `main`."""
    from importlib.metadata import entry_points

    (entry_point,) = entry_points(group="console_scripts", name="cope-sweep")
    assert entry_point.value == "cope_sweep.cli:main"
    done = subprocess.run([sys.executable, "-m", "cope_sweep.cli", "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cope-sweep list" in done.stdout
