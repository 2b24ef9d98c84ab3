import importlib.metadata
import shutil
import subprocess

import pytest

from cope_sweep.read.tables import Format, find_format, formats, table
from cope_sweep.store import QueryError
from tests.read.tables.ablations import finish, plan_of

TITLES = Format("titles", "text/x-title", ".title", lambda table, _: table.model.title.encode())
NO_FORMAT = "text"


@pytest.fixture
def installed(monkeypatch):
    """Makes entry points of a group visible, as those of an installed package."""
    original = importlib.metadata.entry_points

    def declare(*names):
        points = [
            importlib.metadata.EntryPoint(name, f"tests.read.tables.test_formats:{name}", "cope_sweep.formats")
            for name in names
        ]
        monkeypatch.setattr(
            importlib.metadata, "entry_points",
            lambda **wanted: points if wanted == {"group": "cope_sweep.formats"} else original(**wanted),
        )  # fmt: skip
        formats.cache_clear()

    yield declare
    formats.cache_clear()


@pytest.mark.parametrize("name", ["json", "csv", "markdown", "latex", "html", "parquet", "terminal"])
def test_every_format_renders_a_table(partial, name):
    content = find_format(name).render(partial, None)
    assert b"CoPE" in content
    if not find_format(name).binary:
        assert "12" in content.decode()


def test_formats_and_media_types_are_unique():
    assert (
        len({each.media_type for each in formats().values()})
        == len({each.suffix for each in formats().values()})
        == len(formats())
    )
    assert next(iter(formats())) == "json", "what REST answers with by default"
    assert [name for name, each in formats().items() if each.render_runs] == ["csv", "parquet"]


def test_an_installed_package_adds_a_format(installed, partial):
    installed("TITLES")
    assert find_format("titles").render(partial, None) == b"Does it copy? 100 % & more"


@pytest.mark.parametrize("name", ["NO_FORMAT", "missing"])
def test_an_installed_format_that_cannot_be_used_is_named(installed, name):
    installed(name)
    with pytest.raises(QueryError, match=f"the entry point '{name}' .* uninstall its package"):
        formats()


def test_an_unknown_format_names_all():
    with pytest.raises(
        QueryError, match="no format 'exe'; the formats are: json, csv, markdown, latex, html, parquet, terminal"
    ):
        find_format("exe")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("against", [None, "CoPE", "paper"])
def test_latex_compiles(store, tmp_path, against):
    """With every character that means something to TeX, warnings, and the rule of a comparison."""
    hostile = 'a "b" <script>&{}\\_%$#~^|*`[x](y) ± × · – … − ≥ ≤ √'
    plan = plan_of(
        title=hostile, seeds=[0, 1, 2], grid={"model.position": {"CoPE": ["cope"], hostile: []}},
        published=[{"match": {"model.position": "CoPE"}, "values": {"in_dist/token_error": 0.004}, "source": hostile}],
    )  # fmt: skip
    for index, row in enumerate(plan.rows):
        for run in row.runs:
            values = {"in_dist/token_error": 10.0 * index + run.seed, "dense/loss": -1.0 * run.seed}
            finish(store, run, values, {"precision": f"fp{index}_x"})
    text = table(plan, store, compare=against).to_latex()
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{text}\end{{document}}"
    (tmp_path / "table.tex").write_text(document)
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "table.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "table.pdf").stat().st_size > 5000
