import json
import re
import subprocess
import sys

import pytest

from tests.read.tables.ablations import finish


def test_list(stored):
    (entry,) = stored.json("list")
    assert (entry["name"], entry["rows"], entry["seeds"], entry["runs"], entry["finished"]) == ("tiny", 2, 2, 4, 1)
    assert entry["counts"] == {"finished": 1, "failed": 1, "stopped": 1, "damaged": 1}
    assert "error" not in entry
    out, _ = stored("list")
    for text in ("A tiny copy", "2 × 2", "1 of 4", "1 failed, 1 damaged, 1 stopped"):
        assert all(word in out for word in text.split(", "))


def test_list_shows_the_runs_at_each_scale(shell):
    shell.write("heir", "title: Heir\ninherit: tiny\nscales: {brief: {seeds: [7]}}\n")
    (entry,) = [entry for entry in shell.json("list") if entry["name"] == "heir"]
    assert entry["at_scales"] == {"brief": {"runs": 2, "finished": 0, "counts": {"pending": 2}}}
    out, _ = shell("list")
    assert "brief 0 of 2" in " ".join(out.split())


def test_list_shows_the_error_of_a_faulty_file(shell):
    shell.write("broken", "title: [\n")
    out, _ = shell("list")
    assert "broken" in out
    assert "not valid YAML" in " ".join(out.split())
    assert "A tiny copy" in out


def test_plan(stored):
    plan = stored.json("plan", "tiny", "--set", "seeds=[0,7]")
    assert (plan["finished"], plan["to_do"]) == (1, 2)
    assert plan["counts"] == {"finished": 1, "stopped": 1, "pending": 2}
    assert {run["parameters"] for run in plan["runs"]} == {936, 936 + 64 * 4}
    assert plan["estimated_s"] == plan["least_s"] > 0, "scaled from the finished run"
    out, _ = stored("plan", "tiny", "--set", "seeds=[0,7]")
    assert "1 finished, 1 stopped early, 2 to do: about " in out
    assert "1.2 k" in out
    assert "MiB" in out


def test_the_kernels_of_a_plan(shell):
    options = ["plan", "tiny", "--attention", "--set", "resources.attention=blocked"]
    entries = shell.json(*options)
    assert [(entry["row"], entry["device"]) for entry in entries] == [
        (row, device) for row in ("CoPE", "none") for device in ("cpu", "cuda")
    ]
    assert {(entry["attention"], entry["reason"]) for entry in entries} == {("blocked", None)}
    hard = shell.json(*options, "--set", "model.hard_attention=true", "--set", "resources.device=cpu")
    assert {(entry["attention"], entry["device"]) for entry in hard} == {("reference", "cpu")}
    assert all("attention is hard" in entry["reason"] for entry in hard)
    out, _ = shell(*options, "--set", "model.hard_attention=true")
    assert "attention is hard" in " ".join(out.split())


@pytest.mark.slow
def test_each_shape_is_measured(shell):
    costs = shell.json("plan", "tiny", "--measure")
    assert {run["basis"] for run in costs["runs"]} == {"measured on this machine"}
    assert 0 < costs["estimated_s"] < 600
    out, err = shell("plan", "tiny", "--measure")
    assert "measured on this machine" in " ".join(out.split())
    assert [line.split(":")[0] for line in err.splitlines()] == ["measuring 1 of 2", "measuring 2 of 2"]


def test_runs_that_are_too_large_are_marked(shell):
    out, _ = shell("plan", "tiny", "--set", "model.dim=200000", "--set", "resources.device=cpu")
    out = " ".join(out.split())
    assert "too large" in out
    assert "; 4 do not fit in the memory of this machine" in out
    assert "too large" not in shell("plan", "tiny")[0]


def test_years_on_a_cpu_are_not_shown_for_runs_that_may_use_a_gpu(shell, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    large = ("plan", "tiny", "--set", "train.steps=1000000000", "--set", "train.batch=100000")
    assert "4 to do: needs a GPU (rule of thumb" in " ".join(shell(*large)[0].split())
    assert re.search(
        r"4 to do: about [\d.,]+ y to [\d,]+ y on ", " ".join(shell(*large, "--set", "resources.gpus=0")[0].split())
    )


def test_a_plan_that_is_finished_has_no_estimate(stored):
    for run in stored.runs[1:]:
        finish(stored.store, run, {})
    assert stored("plan", "tiny")[0].rstrip().endswith("4 finished, 0 to do")


@pytest.mark.slow
def test_the_commands_import_no_heavy_package(stored):
    """Each command in a process of its own: torch takes seconds to import, pandas and mlflow half of one."""
    heavy = "('torch', 'pandas', 'mlflow', 'ray', 'scipy', 'alembic')"
    code = f"""
import atexit, sys
from cope_sweep.cli import main
atexit.register(lambda: sys.stderr.write(str([name for name in {heavy} if name in sys.modules])))
main()
"""
    for words in (["list"], ["status"], ["status", "tiny"], ["plan", "tiny"], ["runs"], ["table", "tiny"]):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(command, cwd=stored.folder, env=stored.environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "[]")


def test_an_ablation_is_found_by_name_although_a_folder_has_it_too(shell):
    (shell.folder / "tiny").mkdir()
    assert shell.json("plan", "tiny")["to_do"] == 4


def test_an_ablation_is_found_by_path(shell):
    (shell.folder / "here").write_text((shell.folder / "ablations" / "tiny.yaml").read_text())
    assert shell.json("plan", "here")["ablation"] == "here"
    assert shell.json("plan", "ablations/tiny.yaml")["ablation"] == "tiny"


def test_without_measurements_a_time_is_a_range(shell):
    plan = shell.json("plan", "tiny", "--set", "train.steps=100000")
    assert plan["estimated_s"] == pytest.approx(5 * plan["least_s"], rel=0.02)
    out = " ".join(shell("plan", "tiny", "--set", "train.steps=100000")[0].split())
    assert re.search(r"4 to do: about \d+ min \d\d s to \d+ min \d\d s on \d+ worker groups? ", out)


def test_schema(shell):
    assert json.loads(shell("schema")[0])["title"] == "A cope-sweep ablation"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "tiny", "--set", "grid=3"], "no key 'grid'"),
        (["plan", "ablations/none.yaml"], "ablations/none.yaml: No such file or directory"),
        (["plan", "zzz", "--ablations", "nowhere"], "choose the folder with --ablations"),
        (["list", "--ablations", "nowhere"], "no ablation files"),
    ],
)
def test_bad_input(shell, words, message):
    _, err = shell(*words, code=2)
    assert message in " ".join(err.split())
    assert not (shell.folder / "store").exists()


def test_an_empty_store_points_to_results_beside_the_files(shell):
    assert "has results" not in shell("list")[0]
    (shell.folder / "ablations/results").mkdir()
    assert "cope-sweep table flip_flop --from ablations/results" in shell("list")[0]


def test_ids_are_whole_in_a_narrow_terminal(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    (run, *_) = shell.json("plan", "tiny")["runs"]
    assert run["run_id"] in shell("plan", "tiny")[0]


@pytest.fixture
def crowded(shell):
    """An ablation with long names of rows."""
    text = (shell.folder / "ablations" / "tiny.yaml").read_text()
    shell.write(
        "crowded", text.replace("CoPE: [cope]", "CoPE with contextual gates in every one of its layers: [cope]")
    )
    return shell


def test_a_plan_fits_a_terminal_of_80_columns(crowded):
    crowded.environment["COLUMNS"] = "80"
    lines = crowded("plan", "crowded")[0].splitlines()
    (run, *_) = crowded.json("plan", "crowded")["runs"]
    assert max(map(len, lines)) <= 80
    assert len([line for line in lines if "≤ 0 s" in line or "≤ 1 s" in line]) == 4, "times are on one line"
    assert run["run_id"] in lines[1]
    first = next(i for i, line in enumerate(lines) if run["run_id"] in line)
    assert set(run["row"].split()) <= set(" ".join(lines[first : first + 3]).split())
    assert "parameters" not in lines[0]
    crowded.environment["COLUMNS"] = "160"
    assert "parameters" in crowded("plan", "crowded")[0]


@pytest.mark.slow
def test_a_table_in_a_pipe_is_whole(crowded):
    del crowded.environment["COLUMNS"]
    process = crowded.start("plan", "crowded")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "parameters" in out
    assert (
        len([line for line in out.splitlines() if "CoPE with contextual gates in every one of its layers" in line]) == 2
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("model.heads=3", "error: --set model.heads=3: base.model: model.heads = 3 does not divide"),
        ("task.kind=foo", "error: --set task.kind=foo: base.task: unknown kind 'foo'"),
        (
            "model.position=[{kind: cope, p_max: 0}]",
            "0: input should be greater than or equal to 1, or 0 is not one of",
        ),
    ],
)
def test_errors_of_set_name_the_option_once(shell, value, message):
    _, err = shell("plan", "tiny", "--set", value, code=2)
    assert message in " ".join(err.split())
    assert err.count("--set") == 1
