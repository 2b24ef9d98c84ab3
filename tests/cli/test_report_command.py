"""`report --out` and `report --all`: their files, their answers and their errors."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from tests.read.figures.files import svg_texts

FIGURES = """\
figures:
  - {kind: curves, metrics: [in_dist/token_error], title: Errors}
  - {kind: maps, rows: {model.position: CoPE}, show: gates, mark: data, title: Gates}
"""


@pytest.fixture
def declaring(trained, shell):
    """A folder with the trained tiny ablation, which declares two figures there."""
    shutil.copytree(trained.folder / "store", shell.folder / "store")
    text = (trained.folder / "ablations" / "tiny.yaml").read_text()
    shell.write("tiny", text + FIGURES)
    shell.write("other", text.replace("steps: 6", "steps: 7"))
    return shell


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
    assert "`cope-sweep run tiny --local --no-mlflow --json`" in text
    assert "row minus the row with position = CoPE" in text
    compared = declaring("report", "tiny", "--compare", "none", "--out", "out")[0]
    assert compared
    assert "row minus none" in (folder / names[4]).read_text()


def test_a_report_is_shown_without_a_store(declaring, tmp_path):
    declaring("report", "tiny", "--out", "out")
    known = declaring.json("table", "tiny", "--compare", "CoPE")
    found = declaring.json("table", "tiny", "--from", "out", "--store", str(tmp_path / "nowhere"))
    means = [[row["metrics"]["in_dist/token_error"]["mean"] for row in each["rows"]] for each in (known, found)]
    assert means[0] == means[1]
    assert found["compared"]["against"] == "model.position=CoPE"
    assert declaring.json("table", "tiny", "--from", "out", "--compare", "none")["compared"]["against"] == "none"
    assert not (tmp_path / "nowhere").exists()
    for words, message in (
        (("table", "quickstart", "--from", "out"), "out has no report of quickstart"),
        (
            ("table", "tiny", "--from", "out", "--scale", "small"),
            "no report of tiny --scale small; it has reports at: its own size",
        ),
        (("table", "tiny", "--from", "out", "--set", "seeds=[0]"), "leave out --set"),
    ):
        assert message in declaring(*words, code=2)[1].replace("\n", " ")
    (declaring.folder / "out/tiny.parquet").write_bytes(b"PAR1 not really")
    assert "out/tiny.parquet: not the runs of a report" in declaring("table", "tiny", "--from", "out", code=2)[
        1
    ].replace("\n", " ")


def test_the_document_of_all(declaring):
    assert declaring("report", "--all", "--out", "out/all")[0] == "out/all/report.html\n"
    text = (declaring.folder / "out/all/report.html").read_text()
    assert text.count("data:image/svg+xml;base64,") == 2
    assert "not run: 4 runs" in text


def test_declared_figures_are_drawn_without_a_kind(declaring):
    files = [each["file"] for each in declaring.json("figure", "tiny")]
    assert files == ["tiny-curves.png", "tiny-maps.png"]
    declaring("figure", "tiny", "--declared", "maps", "-o", "gates.svg")
    assert "Gates" in svg_texts((declaring.folder / "gates.svg").read_bytes())
    assert declaring("figure", "tiny", "--declared", "curves", "--format", "csv")[0].startswith("row,metric,step")
    assert declaring.json("figure", "tiny", "--metric", "train/loss")["kind"] == "curves"  # options: not the declared


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report"], "name one ablation, or write --all --out DIR"),
        (["report", "--all"], "--all writes a document; name a folder for it with --out DIR"),
        (["report", "tiny", "--all", "--out", "out"], "name one ablation, or write --all"),
        (["report", "--out", "out"], "name one ablation, or write --all"),
        (["report", "tiny", "--out", "out", "--format", "html"], "--out writes files of fixed formats"),
        (["report", "tiny", "--compare", "CoPE"], "--compare and --json are of the files of --out DIR"),
        (["report", "other", "--out", "out"], "train them with: cope-sweep run other"),
        (["report", "--all", "--scale", "small", "--out", "out"], "at the scale small is finished in the store"),
        (["report", "tiny", "--out", "ablations/tiny.yaml/out"], "name another folder with --out"),
        (["figure", "tiny", "--declared", "map"], "tiny has no figure 'map'; did you mean 'maps'?"),
        (["figure", "other", "--declared", "maps-2"], "other has no figure 'maps-2'"),
        (["figure", "tiny", "-o", "all.svg"], "tiny declares curves, maps; choose one with --kind"),
        (["table", "tiny", "--compare", "position=CoP"], "has no label 'CoP'; did you mean 'CoPE'?"),
        (["table", "tiny", "--compare", "dim=8"], "tiny has no axis 'dim'"),
    ],
)
def test_errors(declaring, words, message):
    assert message in " ".join(declaring(*words, code=2)[1].split())
