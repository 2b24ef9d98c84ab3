"""The commands `figure`, `report --out`: their files, their data and their errors."""

import io
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from cope_sweep.config import expand, load_ablation
from cope_sweep.store import Store
from tests.cli.conftest import Shell
from tests.helpers.figure_files import svg_texts
from tests.helpers.finished_runs import finish


def test_files_have_the_format_of_their_suffix(stored):
    out, _ = stored("figure", "tiny", "-o", "curves.svg")
    assert re.fullmatch(r"curves.svg: \d+\.\d KiB\n", out)
    texts = svg_texts((stored.folder / "curves.svg").read_bytes())
    assert "CoPE, n = 1, 1 unfinished (dotted)" in texts
    stored("figure", "tiny", "-k", "summary", "--output", "any.name", "--format", "pdf")
    assert (stored.folder / "any.name").read_bytes().startswith(b"%PDF")


def test_options_reach_the_figure(stored):
    def data(*words):
        return pd.read_csv(io.StringIO(stored("figure", "tiny", *words, "--format", "csv")[0]))

    assert data("--metric", "train/loss", "--row", "CoPE")["row"].unique().tolist() == ["CoPE"]
    assert data("--metric", "train/loss")["metric"].unique().tolist() == ["train/loss"]
    assert data("--kind", "values", "--x", "facts.parameters")["x"].unique().tolist() == [1192.0]
    assert data("--kind", "curves", "--x", "time")["time_s"].notna().all()
    (stored.folder / "paper.mplstyle").write_text("lines.linewidth: 3.5\n")
    stored("figure", "tiny", "--size", "3.25x2.5", "--style", "paper.mplstyle", "-o", "small.svg")
    drawn = (stored.folder / "small.svg").read_text()
    assert 'width="234pt" height="180pt"' in drawn
    assert "stroke-width: 3.5" in drawn


def test_maps_of_a_run_and_of_an_ablation(trained):
    words = ["--kind", "maps", "--show", "gates", "--head", "0.1", "--format", "csv", "--first", "3"]
    of_ablation = pd.read_csv(io.StringIO(trained("figure", "tiny", *words, "--row", "CoPE", "--seed", "1")[0]))
    assert of_ablation[["layer", "head"]].drop_duplicates().values.tolist() == [[0, 1]]
    assert len(of_ablation) == 6
    runs = {each["seed"]: each["run_id"] for each in trained.json("status", "tiny")["runs"] if each["row"] == "CoPE"}
    assert trained("figure", runs[1], *words)[0] == trained("figure", "tiny", *words, "--row", "CoPE", "--seed", "1")[0]
    trained(
        "figure", runs[1], "--kind", "maps", "--split", "sparse", "--sequence", "1", "--mark", "data", "-o", "maps.svg"
    )
    assert "data token" in svg_texts((trained.folder / "maps.svg").read_bytes())
    trained.refuses("no_effect", "figure", runs[1], "--kind", "curves", option="kind")


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        (["--kind", "curve"], "not_found", {"figure": "curve"}),
        (["-k", "values", "--panels", "dim"], "unknown_axis", {"axis": "dim"}),
        (["--size", "6x"], "invalid_option", {"option": "--size", "value": "6x"}),
        (["--style", "none.mplstyle"], "invalid_option", {"option": "--style", "value": "none.mplstyle"}),
        (["-k", "importance"], "not_found", {"figure": "importance"}),
        (["-o", "figure.jpg"], "unknown_format", {"file": "figure.jpg"}),
        (["-o", "nowhere/figure.png"], "not_writable", {"file": "nowhere/figure.png"}),
        (["-k", "maps", "--row", "none"], "not_finished", {"rows": ["none"]}),
        (["-k", "maps", "--head", "1"], "invalid_option", {"option": "--head", "value": "1"}),
        (["-k", "maps", "--text", "a", "--split", "dense"], "conflicting_options", {}),
        (["--show", "gates", "--mark", "data"], "no_effect", {"option": "show"}),
        (["--head", "1.0"], "no_effect", {"option": "head"}),
        (["-k", "maps", "--metric", "train/loss"], "no_effect", {"option": "metric"}),
        (["-k", "summary", "--sequence", "0"], "no_effect", {"option": "sequence"}),
        (["-k", "maps", "--text", "_ 1", "--sequence", "0"], "no_effect", {"option": "sequence"}),
        (["--format", "csv", "--json"], "conflicting_options", {"options": ["--json", "--format"]}),
    ],
)
def test_errors_of_figures(stored, words, code, data):
    stored.refuses(code, "figure", "tiny", *words, **data)


DECLARED = """\
figures:
  - {kind: curves, metrics: [in_dist/token_error], title: Errors}
  - {kind: maps, rows: {model.position: CoPE}, show: gates, mark: data, title: Gates}
"""


def declare(trained, shell):
    """Copy the trained tiny ablation to the folder of a shell, and declare two figures there."""
    shutil.copytree(trained.folder / "store", shell.folder / "store")
    text = (trained.folder / "ablations" / "tiny.yaml").read_text()
    shell.write("tiny", text + DECLARED)
    shell.write("other", text.replace("steps: 6", "steps: 7"))
    return shell


@pytest.fixture
def declaring(trained, shell):
    """A folder with the trained tiny ablation, which declares two figures there."""
    return declare(trained, shell)


@pytest.fixture(scope="module")
def reported(trained, tmp_path_factory):
    """Such a folder, with a folder of results, `out`; no test changes it."""
    shell = declare(trained, Shell(tmp_path_factory.mktemp("reported")))
    shell("report", "tiny", "--out", "out")
    return shell


def test_options_do_not_change_a_figure_that_is_declared(declaring):
    declaring.write(
        "tiny",
        (declaring.folder / "ablations" / "tiny.yaml")
        .read_text()
        .replace("title: Gates}", "title: Gates}\n  - {kind: curves, metrics: [dense/token_error]}"),
    )
    declaring.refuses("no_effect", "figure", "tiny", "--kind", "curves-2", "--log", option="log", figure="curves-2")
    assert declaring("figure", "tiny", "--kind", "curves-2", "--format", "csv")[0].startswith("row,metric,step")


def test_the_evidence_of_one_ablation(declaring):
    names = ["out/tiny.parquet", "out/tiny.curves.parquet", "out/tiny.curves.svg", "out/tiny.maps.svg", "out/tiny.md"]
    assert declaring("report", "tiny", "--out", "out")[0].splitlines() == names
    folder = Path(declaring.folder)
    before = [(folder / name).read_bytes() for name in names]
    assert declaring.json("report", "tiny", "--out", "out") == {"files": names}
    assert [(folder / name).read_bytes() for name in names] == before
    assert "data token" in svg_texts(before[3])
    runs, logged = (pd.read_parquet(folder / name) for name in names[:2])
    assert runs["versions"].str.contains("torch ").all()
    assert runs["commit"].notna().all()
    last = logged[(logged["metric"] == "in_dist/token_error")].groupby("run_id")["value"].last()
    assert last.to_dict() == dict(zip(runs["run_id"], runs["in_dist/token_error"], strict=True))
    text = before[4].decode()
    assert "\ncope-sweep run tiny --local --no-mlflow --json\n" in text
    assert "row minus the row with position = CoPE" in text
    compared = declaring("report", "tiny", "--compare", "none", "--out", "out")[0]
    assert compared
    assert "row minus none" in (folder / names[4]).read_text()


def test_a_folder_of_results_is_a_store_that_is_only_read(declaring):
    declaring("report", "tiny", "--out", "out")
    before = {path.name: path.read_bytes() for path in (declaring.folder / "out").iterdir()}
    known = declaring.json("table", "tiny", "--compare", "CoPE")
    found = declaring.json("table", "tiny", "--store", "out")
    means = [[row["metrics"]["in_dist/token_error"]["mean"] for row in each["rows"]] for each in (known, found)]
    assert means[0] == means[1]
    assert found["compared"]["against"] == "model.position=CoPE"
    assert declaring.json("table", "tiny", "--store", "out", "--compare", "none")["compared"]["against"] == "none"
    again = declaring("report", "tiny", "--store", "out", "--out", "again")[0]
    assert {Path(name).name for name in again.splitlines()} == before.keys()
    for name in again.splitlines():
        assert (declaring.folder / name).read_bytes() == before[Path(name).name], name
    declaring("report", "tiny", "--store", "out", "-o", "tiny.html")
    assert "data:image/svg+xml" in (declaring.folder / "tiny.html").read_text()
    declaring("figure", "tiny", "--store", "out", "--kind", "maps", "-o", "maps.svg")
    assert (declaring.folder / "maps.svg").read_bytes() == before["tiny.maps.svg"]

    (tiny,) = [entry for entry in declaring.json("list", "--store", "out") if entry["name"] == "tiny"]
    assert tiny["counts"] == {"finished": tiny["runs"]}
    kept = declaring.json("runs", "--store", "out")["runs"]
    trained = declaring.json("runs", "--ablation", "tiny")["runs"]
    for run, same in zip(kept, sorted(trained, key=lambda run: run["run_id"]), strict=True):
        names = ("run_id", "status", "seed", "step", "steps", "ablations", "row", "sweep_id", "metrics", "created_ms")
        assert [run[name] for name in names] == [same[name] for name in names]
    left, right = (run["run_id"] for run in kept[:2])
    assert declaring.json("diff", left, right, "--store", "out") == declaring.json("diff", left, right)
    assert declaring.json("status", left, "--store", "out")["metrics"] == kept[0]["metrics"]

    assert {path.name: path.read_bytes() for path in (declaring.folder / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        (["table", "other"], "not_found", {"ablation": "other", "allowed": []}),
        (["table", "tiny", "--set", "seeds=[0]"], "conflicting_options", {"options": ["--store", "--set"]}),
        (["report", "tiny", "--set", "seeds=[0]"], "conflicting_options", {"options": ["--store", "--set"]}),
        (["report", "other"], "not_found", {"ablation": "other"}),
        (["figure", "tiny", "--kind", "maps", "--format", "png"], "no_checkpoint", {}),
        (["run", "tiny", "--local"], "read_only", {}),
        (["sync"], "read_only", {}),
        (["prune", "--yes"], "read_only", {}),
        (["store", "check"], "read_only", {}),
        (["stop", "all"], "read_only", {}),
    ],
)
def test_what_a_folder_of_results_does_not_do(reported, words, code, data):
    before = {path.name: path.read_bytes() for path in (reported.folder / "out").iterdir()}
    reported.refuses(code, *words, "--store", "out", **data)
    assert {path.name: path.read_bytes() for path in (reported.folder / "out").iterdir()} == before


def test_finished_runs_are_copied_to_a_folder_of_results(declaring):
    words = ("store", "copy", "tiny", "--to", "out")
    copied = declaring.json(*words)
    assert copied["copied"] == copied["finished"] == copied["planned"]
    assert copied["files"] == ["out/tiny.parquet", "out/tiny.curves.parquet"]
    declaring("report", "tiny", "--store", "out", "--out", "out")
    declaring("report", "tiny", "--out", "whole")
    for name in ("tiny.parquet", "tiny.curves.parquet", "tiny.curves.svg"):
        assert (declaring.folder / "out" / name).read_bytes() == (declaring.folder / "whole" / name).read_bytes()
    assert declaring.json(*words)["files"] == []
    report = "Write its report again: cope-sweep report tiny --store new --out new"
    assert [report in declaring(*words[:-1], "new")[0] for _ in range(2)] == [True, False], "nothing was copied again"
    path = "cope-sweep report ablations/tiny.yaml --store other --out other"
    assert path in declaring("store", "copy", "ablations/tiny.yaml", "--to", "other")[0], "as it was typed"
    declaring.refuses("no_results", "store", "copy", "tiny", "--to", "store", folder="store")


def test_declared_figures_are_drawn_without_a_kind(declaring):
    files = [each["file"] for each in declaring.json("figure", "tiny")]
    assert files == ["tiny-curves.png", "tiny-maps.png"]
    declaring("figure", "tiny", "--kind", "maps", "-o", "gates.svg")
    assert "Gates" in svg_texts((declaring.folder / "gates.svg").read_bytes())
    assert declaring("figure", "tiny", "--kind", "curves", "--format", "csv")[0].startswith("row,metric,step")
    assert declaring.json("figure", "tiny", "--metric", "train/loss")["kind"] == "curves"  # options: not the declared


@pytest.mark.parametrize(
    ("words", "code", "data"),
    [
        (["report", "tiny", "--out", "out", "--format", "html"], "conflicting_options", {}),
        (["report", "tiny", "--compare", "CoPE"], "missing_option", {"option": "--out"}),
        (["report", "other", "--out", "out"], "nothing_to_report", {"ablation": "other"}),
        (["report", "tiny", "--out", "ablations/tiny.yaml/out"], "not_writable", {}),
        (["figure", "tiny", "--kind", "map"], "not_found", {"figure": "map"}),
        (["figure", "other", "--kind", "maps-2"], "not_found", {"figure": "maps-2"}),
        (["table", "tiny", "--json", "--format", "csv"], "conflicting_options", {"options": ["--json", "--format"]}),
        (["table", "tiny", "--compare", "CoPE", "--margin", "1"], "no_effect", {"option": "margin"}),
        (["table", "tiny", "--compare", "CoPE", "--margin", "x", "--json"], "margin", {"value": "x"}),
        (["runs", "--json", "--format", "csv"], "conflicting_options", {"options": ["--json", "--format"]}),
        (["figure", "tiny", "-o", "all.svg"], "several_figures", {"allowed": ["curves", "maps"]}),
        (["table", "tiny", "--compare", "position=CoP"], "unknown_value", {"value": "CoP"}),
        (["table", "tiny", "--compare", "dim=8"], "unknown_axis", {"axis": "dim"}),
    ],
)
def test_errors_of_reports(declaring, words, code, data):
    declaring.refuses(code, *words, **data)


def test_a_declared_map_shows_the_first_sequence_with_a_marked_token(declaring):
    """The first test sequence begins with a blank, `_`: nothing of its first token would be marked."""
    text = (declaring.folder / "ablations" / "tiny.yaml").read_text()
    declaring.write("tiny", text.replace("mark: data", "mark: data, first: 1"))
    line = declaring("figure", "tiny", "--kind", "maps", "--format", "csv")[0].splitlines()[1]
    assert line.split(",")[4].isdecimal()
    declaring.write("tiny", text.replace("mark: data", "mark: data, first: 1, index: 0"))
    line = declaring("figure", "tiny", "--kind", "maps", "--format", "csv")[0].splitlines()[1]
    assert line.split(",")[4] == "_"


def test_a_script_learns_from_the_exit_code_whether_a_row_is_worse(shell):
    seeds = ["--set", "seeds=[0,1,2,3]"]
    (shell.folder / "four.yaml").write_text(
        (shell.folder / "ablations" / "tiny.yaml").read_text().replace("[0, 1]", "[0, 1, 2, 3]")
    )
    plan = expand(load_ablation(shell.folder / "four.yaml"))
    store = Store(shell.folder / "store", create=True)
    words = ["table", "tiny", *seeds, "--compare", "CoPE", "--fail-unless"]
    _, err = shell(*words, "worse", code=1)
    assert "too few seeds" in err  # nothing is trained
    assert "cope-sweep run tiny --set 'seeds=[0,1,2,3]'" in err
    for row, error in zip(plan.rows, (1.0, 60.0), strict=True):
        for run in row.runs:
            finish(store, run, {"in_dist/token_error": error + run.seed})
    out, err = shell(*words, "worse")
    assert "not worse" not in err
    assert "61.50" in out
    _, err = shell(*words, "better", code=1)
    assert "not better: none against CoPE by In-dist. (%): worse" in err
    shell(*words, "equivalent", "--margin", "100")
    assert json.loads(shell(*words, "worse", "--json")[0])["compared"]["verdicts"][0]["verdict"] == "worse"
    shell.refuses("nothing_compared", "table", "tiny", *seeds, "--fail-unless", "worse")
