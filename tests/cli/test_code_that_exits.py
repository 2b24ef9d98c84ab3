"""Code of plugins that raises SystemExit, or another exception that is no Exception: an error like any other."""

import os
import subprocess
from pathlib import Path

import pytest

from cope_sweep.store import Store
from tests.cli.conftest import TINY

pytestmark = pytest.mark.slow  # trains

ROOT = Path(__file__).parents[2]
# As in the plugin tests/plugins/leaves.py, which is not imported here: it would register its kinds for all other tests.
RAISED = {
    "system_exit": "SystemExit", "keyboard_interrupt": "KeyboardInterrupt", "generator_exit": "GeneratorExit",
    "cancelled": "CancelledError", "own": "Own",
}  # fmt: skip
TASK = "{kind: %s, tokens: 2, blanks: 2, dense_blanks: 1, sparse_blanks: 4, vocabulary: 6%s}"
COPY, GENERATOR, TOKENIZER, VALIDATION = (
    TASK % ("selective_copy", ""),
    *(TASK % ("leaves_task", f", place: {place}") for place in ("generator", "tokenizer", "validation")),
)
EXECUTORS = pytest.mark.parametrize(
    "executor", [["--local"], pytest.param(["--groups", "1"], marks=pytest.mark.thorough)]
)


def call(shell, *words, timeout_s=240):
    shell.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = shell.start(*words)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def ablation(tasks, rows):
    rows = ", ".join(f"{name}: [{value}]" for name, value in rows.items())
    tasks = ", ".join(f"{name}: {value}" for name, value in tasks.items())
    text = TINY.replace("seeds: [0, 1]", "plugins: [tests.plugins.leaves]\nseeds: [0]\nresources: {max_failures: 0}")
    text = "".join(line for line in text.splitlines(keepends=True) if "task:" not in line)
    return text.replace("CoPE: [cope], none: []", rows).replace("grid:\n", f"grid:\n  task: {{{tasks}}}\n")


@EXECUTORS
def test_such_runs_fail_with_their_tracebacks_and_the_others_go_on(shell, executor):
    encodings = {name: f"{{kind: leaves, raised: {name}}}" for name in RAISED}
    tasks = {"copy": COPY, "generator": GENERATOR, "tokenizer": TOKENIZER}
    shell.write("tiny", ablation(tasks, encodings | {"good": "cope"}))
    rows = [*(f"copy · {name}" for name in encodings), "copy · good", "generator · good", "tokenizer · good"]
    chosen = [word for row in rows for word in ("--rows", row)]
    code, out, err = call(shell, "run", "tiny", *chosen, *executor, "--no-mlflow", "--json")
    assert code == 1, out + err
    store = Store(shell.folder / "store")
    statuses = [folder.status for folder in store.run_folders()]
    failed = [folder.state for folder in store.run_folders() if folder.status == "failed"]
    assert len(statuses) == len(rows)
    assert len(failed) == len(RAISED) + 2
    assert {state["message"].partition(":")[0] for state in failed} == set(RAISED.values())
    assert all("leaves.py" in state["traceback"] for state in failed)
    assert set(statuses) == {"failed", "finished"}
    assert {sweep.status for sweep in store.index.sweeps()} == {"failed"}


@pytest.mark.thorough
def test_such_a_run_of_several_workers_fails(shell):
    text = ablation({"copy": COPY}, {"bad": "{kind: leaves}"})
    shell.write("tiny", text.replace("max_failures: 0", "max_failures: 0, workers: 2"))
    code, out, err = call(shell, "run", "tiny", "--no-mlflow")
    assert code == 1, out + err
    (folder,) = Store(shell.folder / "store").run_folders()
    assert folder.state["status"] == "failed"
    assert "leaves.py" in folder.state["traceback"]


def test_a_validation_that_exits_is_an_error_with_its_traceback(shell):
    shell.write("tiny", ablation({"bad": VALIDATION, "copy": COPY}, {"good": "cope"}))
    code, _, err = call(shell, "run", "tiny")
    assert code == 1
    assert "SystemExit" in err
    assert "leaves.py" in err
