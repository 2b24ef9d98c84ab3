"""The command `figure`: its files, its data, and its errors."""

import io
import json
import re
import shutil

import pandas as pd
import pytest

from cope_sweep.read.figures import FIGURES
from tests.read.figures.files import png_size, svg_texts


@pytest.mark.parametrize(
    "kind", [kind.name for kind in FIGURES.values() if kind.name not in ("contexts", "importance", "maps")]
)
def test_the_data_of_each_kind(stored, kind):
    out, _ = stored("figure", "tiny", "--kind", kind, "--format", "csv")
    data = pd.read_csv(io.StringIO(out))
    assert len(data) > 0
    assert {"row", "series", "factor"} & set(data.columns)


def test_files_have_the_format_of_their_suffix(stored):
    out, _ = stored("figure", "tiny", "-o", "curves.svg", "--title", "Tiny <copy>")
    assert re.fullmatch(r"curves.svg: \d+\.\d KiB\n", out)
    texts = svg_texts((stored.folder / "curves.svg").read_bytes())
    assert {"Tiny <copy>", "CoPE, n = 1, 1 unfinished (dotted)"} <= set(texts)
    stored("figure", "tiny", "-k", "summary", "--output", "any.name", "--format", "pdf")
    assert (stored.folder / "any.name").read_bytes().startswith(b"%PDF")


def test_the_default_file_is_named_after_the_ablation_and_the_kind(stored):
    answer = stored.json("figure", "tiny", "--kind", "summary")
    path = stored.folder / answer["file"]
    assert path.name == "tiny-summary.png"
    assert answer == {"file": "tiny-summary.png", "kind": "summary", "format": "png", "bytes": path.stat().st_size}
    assert png_size(path.read_bytes())[0] > 400


def test_options_reach_the_figure(stored):
    def data(*words):
        return pd.read_csv(io.StringIO(stored("figure", "tiny", *words, "--format", "csv")[0]))

    assert data("--metric", "train/loss", "--row", "CoPE")["row"].unique().tolist() == ["CoPE"]
    assert data("--metric", "train/loss")["metric"].unique().tolist() == ["train/loss"]
    assert data("--kind", "values", "--x", "facts.parameters")["x"].unique().tolist() == [1192.0]
    assert data("--kind", "curves", "--x", "time")["time_s"].notna().all()


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--kind", "curve"],
            "tiny has no figure 'curve'; did you mean 'curves'? accepted: curves, convergence",
        ),
        (["--row", "CoPe"], "tiny has no row 'CoPe'; did you mean 'CoPE'? accepted: CoPE, none"),
        (["--metric", "train/los"], "no run of tiny has logged 'train/los'; did you mean 'train/loss'?"),
        (["-k", "values", "--x", "model.dmi"], "--x model.dmi: no run of tiny has this key"),
        (["-k", "values", "--panels", "dim"], "--panels dim: tiny has no such axis"),
        (["-k", "contexts"], "no metric of tiny is of another length"),
        (["-o", "figure.jpg"], "figure.jpg: its suffix names no format; end it with .png, .svg, .pdf, .csv"),
        (["-o", "nowhere/figure.png"], "nowhere/figure.png: No such file or directory"),
        (["-k", "maps", "--row", "none"], "no run of none of tiny is finished in the store"),
        (["-k", "maps", "--head", "1"], "--head 1: a head is LAYER.HEAD, counted from 0, as in --head 1.0"),
        (["-k", "maps", "--text", "a", "--split", "dense"], "more than one source of tokens"),
    ],
)
def test_errors_say_what_exists(stored, words, message):
    _, err = stored("figure", "tiny", *words, code=2)
    assert err.startswith("error: ")
    assert message in " ".join(err.split())


def test_an_ablation_without_runs_says_how_to_train(shell, stored):
    assert "too few, of tiny" in stored("figure", "tiny", "-k", "importance", code=2)[1]  # one row is finished
    (stored.folder / "store" / "index.db").unlink()
    for run in stored.runs:
        shutil.rmtree(stored.folder / "store" / "runs" / run.run_id)
    _, err = shell("figure", "tiny", code=2)
    assert "no run, or too few, of tiny are finished in the store" in err
    assert "cope-sweep run tiny" in err
    assert json.loads(shell("figure", "tiny", "--json", code=2)[0])["error"]["type"] == "UserError"
