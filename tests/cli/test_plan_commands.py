import json

import pytest

pytestmark = pytest.mark.slow  # `trained` trains


def test_list(trained):
    (entry,) = trained.json("list")
    assert (entry["name"], entry["runs"], entry["finished"]) == ("tiny", 4, 4)
    out, _ = trained("list")
    assert "A tiny copy" in out
    assert "2 × 2" in out
    assert "4 of 4" in out


def test_list_shows_the_error_of_a_faulty_file(shell):
    shell.write("broken", "title: [\n")
    out, _ = shell("list")
    assert "broken" in out
    assert "not valid YAML" in " ".join(out.split())
    assert "A tiny copy" in out


def test_plan(trained):
    plan = trained.json("plan", "tiny", "--set", "seeds=[0,7]")
    assert (plan["finished"], plan["to_do"]) == (2, 2)
    assert {run["parameters"] for run in plan["runs"]} == {936, 936 + 64 * 4}
    assert plan["estimated_s"] > 0
    out, _ = trained("plan", "tiny", "--set", "seeds=[0,7]")
    assert "2 finished, 2 to do: about " in out
    assert "1.2 k" in out
    assert "MiB" in out


def test_a_plan_that_is_finished_has_no_estimate(trained):
    assert trained("plan", "tiny")[0].rstrip().endswith("4 finished, 0 to do")


def test_an_ablation_is_found_by_name_although_a_folder_has_it_too(shell):
    (shell.folder / "tiny").mkdir()
    assert shell.json("plan", "tiny")["to_do"] == 4


def test_an_ablation_is_found_by_path(shell):
    (shell.folder / "here").write_text((shell.folder / "ablations" / "tiny.yaml").read_text())
    assert shell.json("plan", "here")["ablation"] == "here"
    assert shell.json("plan", "ablations/tiny.yaml")["ablation"] == "tiny"


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
