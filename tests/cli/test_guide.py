"""The commands of docs/tutorial.md and docs/concepts, on tiny ablations that have the names of their examples."""

import shutil

import pytest

from cope_sweep.config import expand, load_ablation, with_overrides
from cope_sweep.read.tables import Results, Table
from cope_sweep.records import RunRecord
from cope_sweep.store import Store
from tests.cli.conftest import TINY
from tests.test_docs import code_blocks, read, shown_commands


def commands(concept):
    return list(shown_commands(read(f"docs/concepts/{concept}.md")))


@pytest.mark.slow
def test_the_commands_of_the_store_and_of_runs(trained, shell):
    shutil.copytree(trained.folder / "store", shell.folder / "store")  # one of the commands deletes a run
    shown = [*commands("run"), *commands("store")]
    assert [words[0] for words in shown] == [
        "runs",
        "status",
        "logs",
        "diff",
        "store",
        "prune",
        "prune",
        "delete",
        "sync",
    ]
    ids = [run["run_id"] for run in shell.json("runs")["runs"]]
    shown[-2] = ["delete", ids[-1], "--yes"]
    for words in shown:
        runs = iter(ids)
        words = [word.replace("layers>=2", "layers>=1") for word in words]
        assert shell(*(next(runs) if word == "RUN" else word for word in words))[0]


def test_the_commands_of_the_sweep(shell):
    shell.write("quickstart", TINY)
    shown = commands("sweep")
    assert [words[0] for words in shown] == ["run", "submit", "status", "logs", "retry"]
    run, _, status, logs, retry = shown  # tests/sweep submits jobs
    assert "4 finished" in shell(*run, "--local", "--no-mlflow")[1]
    (sweep,) = shell.json(*status)
    assert shell(*(sweep["sweep_id"] if word == "SWEEP" else word for word in logs))[0]
    assert "the sweep has ended" in shell("stop", sweep["sweep_id"])[0]
    shell(*retry, "--local", "--no-mlflow")


@pytest.mark.parametrize(
    ("seeds", "verdict", "line"),
    [
        (8, "worse", "[63.42, 64.62]   {p}   worse"),
        (3, "descriptive", "--set seeds=3`) the difference is as large, but p is at least {p:g},"),
    ],
)
def test_the_p_of_the_tutorial(tmp_path, seeds, verdict, line):
    """As with values that do not overlap: all seeds of the row with 2 positions err on more tokens than the others."""
    text = read("docs/tutorial.md")
    (tmp_path / "positions.yaml").write_text(code_blocks(text, "yaml")[0])
    plan = expand(with_overrides(load_ablation(tmp_path / "positions.yaml"), assignments=[f"seeds={seeds}"]))
    errors = {"CoPE (2 positions)": 64.0}
    records = {
        run.run_id: RunRecord(
            run_id=run.run_id,
            status="finished",
            metrics={"in_dist/token_error": errors.get(row.name, 0.0) + run.seed / 10},
        )
        for row in plan.rows
        for run in row.runs
    }
    model = Table.of(Results(plan, records, Store(tmp_path / "store")), "CoPE").model
    cell = model.rows[1].metrics["in_dist/token_error"]
    assert cell.comparison.verdict == verdict
    p = cell.comparison_texts["p"]
    assert line.format(p=float(p) if ":g" in line else p) in text


@pytest.mark.slow
def test_the_tutorial(shell):
    text = read("docs/tutorial.md")
    (file, *_) = code_blocks(text, "yaml")
    small = {
        "steps: 450": "steps: 2",
        "[0, 1, 2, 3, 4, 5, 6, 7]": "[0, 1]",
        "{every: 50}": "{every: 1, sequences: 8, final_sequences: 8}",
    }
    for shown, tiny in small.items():
        assert shown in file
        file = file.replace(shown, tiny)
    shell.write("positions", file)
    shown = [words for words in shown_commands(text) if words[0] != "serve"]
    assert {words[0] for words in shown} == {"plan", "run", "table", "figure", "probe", "report"}
    for words in shown:
        shell(*words, *(["--local", "--no-mlflow"] if words[0] == "run" else []))
    assert (shell.folder / "results" / "positions.md").exists()
    assert (shell.folder / "table.tex").exists()
