"""Runs that were trained with `--set`: what the commands say about them without it, and show with it."""

from __future__ import annotations

import pytest

SET = ("--set", "train.steps=5")


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    from tests.cli.conftest import Shell

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("varied")
        patch.chdir(folder)
        shell = Shell(folder)
        shell("run", "tiny", "--local", "--no-mlflow", *SET, "--set", "resources.cpus=1")
        yield shell


def test_lists_name_the_values(varied):
    (entry,) = varied.json("list")
    (variant,) = entry["variants"]
    assert (entry["finished"], entry["runs"]) == (0, 4)
    assert (variant["sets"], variant["finished"], variant["runs"]) == (["train.steps=5"], 4, 4)
    assert entry["newest_ms"] == variant["newest_ms"]
    assert "--set train.steps=5 4/4" in varied("list")[0]
    (sweep,) = varied.json("status")
    assert (sweep["scale"], sweep["sets"]) == (None, ["train.steps=5"])
    assert "--set train.steps=5" in varied("status")[0]


@pytest.mark.parametrize(
    "words", [("table", "tiny"), ("status", "tiny"), ("runs", "--ablation", "tiny"), ("best", "tiny")]
)
def test_commands_without_the_values_name_them_and_with_them_do_not(varied, words):
    hint = "4 finished runs have other values: add --set train.steps=5"
    assert hint in " ".join(varied(*words)[0].split())
    assert hint not in " ".join(varied(*words, *SET)[0].split())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("perplexity", "tiny/CoPE", "--tokens", "1 2 3"), "not_finished"),
        (("figure", "tiny", "--kind", "maps"), "not_finished"),
        (("figure", "tiny", "--kind", "summary"), "nothing_to_draw"),
        (("report", "tiny", "--out", "out"), "nothing_to_report"),
    ],
)
def test_errors_name_the_values(varied, words, code):
    varied.refuses(code, *words)
    assert "add --set train.steps=5" in varied(*words, code=2)[1].replace("\n", " ")


def test_the_values_choose_the_runs(varied):
    runs = varied.json("runs", "--ablation", "tiny", *SET)["runs"]
    assert {run["status"] for run in runs} == {"finished"}
    (best,) = varied.json("best", "tiny", *SET)["rows"]
    assert {*best["best"]["run_ids"]} <= {run["run_id"] for run in runs}
    answer = varied.json("perplexity", "tiny/CoPE", "--text", "_ 1 _ 2 > 1 2", *SET)
    assert answer["tokens"]
    varied.refuses("unknown_key", "runs", "--ablation", "tiny", "--set", "trian.steps=5")
    varied.refuses("set_of_no_ablation", "runs", *SET)


def test_the_values_choose_the_runs_of_rows(varied):
    comparison = varied.json("diff", "tiny/CoPE", "tiny/none", *SET)
    trained = {run["run_id"] for run in varied.json("runs")["runs"]}
    assert {comparison["left"], comparison["right"]} <= trained
    assert comparison["finished"] == [1, 1]
    one_id = varied.json("diff", comparison["left"], "tiny/none", *SET)
    assert (one_id["left"], one_id["right"]) == (comparison["left"], comparison["right"])
    for command in ("logs", "status"):
        assert varied.json(command, "tiny/CoPE", *SET)["run_id"] == comparison["left"]
    assert varied("figure", "tiny/CoPE", "--format", "csv", *SET)[0]
    for words in (("diff", "tiny/CoPE", "tiny/none"), ("logs", "tiny/CoPE")):
        varied.refuses("not_finished", *words)
        assert "add --set train.steps=5" in varied(*words, code=2)[1].replace("\n", " ")
    varied.refuses("unknown_key", "diff", "tiny/CoPE", "tiny/none", "--set", "trian.steps=5")


def test_values_beside_an_id_are_refused(varied):
    """The id has them already, and they would have no effect."""
    run_id, other, *_ = (run["run_id"] for run in varied.json("runs")["runs"])
    (sweep,) = varied.json("status")
    for words in (
        ("diff", run_id, other), ("logs", run_id), ("logs", sweep["sweep_id"]), ("perplexity", run_id, "--tokens", "1 2"),
        ("status",), ("status", run_id), ("status", sweep["sweep_id"]), ("figure", run_id), ("figure", "store"),
        ("perplexity", "store", "--tokens", "1 2"),
    ):  # fmt: skip
        varied.refuses("set_of_no_ablation", *words, *SET)
        varied.refuses("scale_of_no_ablation", *words, "--scale", "small", scale="small")
