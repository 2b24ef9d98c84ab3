"""The functions of `cope_sweep.notebook`."""

import base64
import json
import re
import sys
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

from cope_sweep import notebook
from cope_sweep.config import Plan
from cope_sweep.read.figures import heads as heads_figure
from cope_sweep.read.figures import probed
from tests.cli.conftest import TINY
from tests.helpers.errors import raises
from tests.helpers.figure_files import svg_texts
from tests.helpers.processes import output_of
from tests.test_docs import code_blocks, read


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the example of the documents has run: its ablation is as tiny as the one of the command line's tests."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "ablations").mkdir()
    tiny = TINY.replace("{CoPE: [cope], none: []}", "{CoPE: [cope], RoPE: [rope], Absolute: [absolute]}")
    (folder / "ablations" / "quickstart.yaml").write_text(tiny)
    return folder


@pytest.fixture(scope="module")
def names(folder):
    """The names that the example defines."""
    example, *_ = code_blocks(read("docs/how-to/notebooks.md"), "python")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = {}
        exec(example.replace("steps=100", "steps=6"), found)
    return found


def test_the_example_of_the_documents(names):
    assert [row.name for row in notebook.plan(names["ablation"]).rows] == ["CoPE", "RoPE", "Absolute"]
    assert names["runs"]["status"].tolist() == ["finished"] * 3
    assert set(names["errors"]["metric"]) >= {"train/loss", "in_dist/token_error"}
    assert names["model"].run.run_id == names["runs"]["run_id"][0]
    assert len(names["log_probabilities"][0]) == 5
    assert names["gates"].layer == 0


def test_tables_and_figures_draw_themselves(names, folder):
    table = notebook.table(names["ablation"], folder / "store", compare="CoPE")
    assert table._repr_markdown_().startswith("| position")
    assert "In-dist.: row minus CoPE" in table._repr_markdown_()
    figure = notebook.figure(names["ablation"], "summary", folder / "store")
    assert figure._repr_mimebundle_()["image/png"]
    assert isinstance(notebook.frame(names["ablation"], folder / "store"), pd.DataFrame)


def test_a_probe_draws_the_heatmaps_of_its_heads(names, folder):
    probe = notebook.probe(names["ablation"], folder / "store", row="CoPE", layers=[0], heads=[1])
    assert [layer.heads for layer in probe.layers] == [(1,)]
    html = probe._repr_html_()
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    texts = svg_texts(base64.b64decode(data))
    assert {"Layer 0 · head 1", "Gates", "Positions", "Attention"} <= set(texts)
    assert any(text.startswith("mean gate ") for text in texts)
    assert len(repr(probe)) < 200


def test_a_probe_with_many_heads_draws_the_first_ones(names, folder, monkeypatch):
    monkeypatch.setattr(probed, "MAX_HEADS", 1)
    probe = notebook.probe(names["ablation"], folder / "store", row="CoPE")
    heads = sum(len(layer.heads) for layer in probe.layers)
    html = probe._repr_html_()
    assert f"The first 1 of {heads} heads" in html
    monkeypatch.setattr(heads_figure, "MAX_CELLS", 1)
    assert "<img" not in probe._repr_html_()


def test_the_recipes_for_other_trackers_send_every_logged_value(names, folder, monkeypatch):
    """To stand-ins of the trackers, which are not installed with the project."""
    recipes = code_blocks(read("docs/how-to/trackers.md"), "python")
    wandb, tensorboard = mock.MagicMock(), mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.chdir(folder)
    found = {}
    for recipe in recipes:
        exec(recipe.replace("steps=100", "steps=6"), found)
    values = len(names["errors"])
    assert [call.kwargs["id"] for call in wandb.init.call_args_list] == names["runs"]["run_id"].tolist()
    logged = wandb.init.return_value.__enter__.return_value.log.call_args_list
    assert sum(len(call.args[0]) for call in logged) == values
    assert tensorboard.SummaryWriter.return_value.__enter__.return_value.add_scalar.call_count == values


def test_a_second_run_trains_nothing(names, folder):
    assert notebook.run(names["ablation"], folder / "store").trained == 0


def test_the_example_of_an_error(names, folder, monkeypatch, capsys):
    _, example, *_ = code_blocks(read("docs/how-to/notebooks.md"), "python")
    monkeypatch.chdir(folder)
    exec(example, dict(names))
    assert capsys.readouterr().out == "unknown_row ['CoPE', 'RoPE', 'Absolute']\n"


@pytest.mark.parametrize(
    ("call", "code", "data"),
    [
        (lambda a, store: notebook.load_ablation("quickstrat"), "not_found", {"name": "quickstrat"}),
        (lambda a, store: notebook.table(a, store, compare="RoPA"), "unknown_row", {"row": "RoPA"}),
        (lambda a, store: notebook.figure(a, "curve", store), "not_found", {"figure": "curve"}),
        (lambda a, store: notebook.predictor(a, store, row="CoPA"), "unknown_row", {"row": "CoPA"}),
        (lambda a, store: notebook.probe(a, store, seed=9), "not_finished", {"rows": ["CoPE"], "seed": 9}),
    ],
)
def test_errors(names, folder, call, code, data):
    with raises(code, **data):
        call(names["ablation"], folder / "store")


def test_a_plan_is_made_of_a_file_or_taken_as_it_is(folder):
    planned = notebook.plan(folder / "ablations" / "quickstart.yaml")
    assert isinstance(planned, Plan)
    assert notebook.plan(planned) is planned


PLANNING = """
from cope_sweep.config.estimate import memory_bytes, parameter_count
from cope_sweep.config import Resources
from tests.helpers.tiny import tiny_run
for optimizer in ("adamw", "muon"):
    run = tiny_run(**{"model.family": "llama", "train.optimizer": optimizer})
    assert parameter_count(run) and memory_bytes(run, Resources())
"""
"""Families and optimisers are declarations: counting parameters and memory does not import torch."""

CHECKING = f"""
from pathlib import Path
from cope_sweep.config import expand, load_ablation
loaded = load_ablation(Path({str(Path(__file__).parent.parent)!r}, "ablations", "encodings_counting.yaml"))
assert expand(loaded).ablation.content.figures
"""
"""The file declares figures: their kinds are found and checked without what draws them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [
        [
            ("import cope_sweep", {"torch", "pandas", "numpy", "pydantic", "ray"}),
            ("import cope_sweep.read.figures", {"torch", "pandas", "numpy", "matplotlib"}),
        ],
        [("import cope_sweep.read.tables", {"torch", "ray", "mlflow", "scipy", "pandas"})],
        [
            ("import cope_sweep.cli.application", {"torch", "ray", "mlflow", "pandas", "fastapi", "matplotlib"}),
            ("import cope_sweep.client", {"torch", "ray", "mlflow", "matplotlib"}),
            ("import cope_sweep.notebook", {"torch", "ray", "mlflow", "matplotlib"}),
        ],
        [(CHECKING, {"torch", "pandas", "matplotlib", "sqlalchemy"}), (PLANNING, {"torch"})],
    ],
    ids=["figures", "tables", "interfaces", "plans"],
)
def test_imports_are_light(steps):
    """Each step in the process of those before it, which have imported nothing that it must not."""
    script = "".join(f"{code}\nimport sys; print(*sorted({heavy!r} & set(sys.modules)))\n" for code, heavy in steps)
    assert output_of("-W", "error", "-c", script).strip() == ""


def tutorial() -> list[str]:
    """The cells of code of ablations/tutorial.ipynb."""
    text = (Path(__file__).parent.parent / "ablations" / "tutorial.ipynb").read_text(encoding="utf-8")
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_the_encoding_of_the_documents():
    (example,) = [block for block in code_blocks(read("docs/how-to/own-encoding.md"), "python") if "kind:" in block]
    assert example.strip() in tutorial()[0]


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_the_tutorial_runs(tmp_path):
    """Every cell, in a process and a folder of their own, with shorter training and two seeds."""
    text = "\n".join(tutorial()).replace("steps: 300", "steps: 60").replace("seeds: [0, 1, 2, 3, 4]", "seeds: [0, 1]")
    assert "steps: 60" in text
    (tmp_path / "tutorial.py").write_text(f"{text}\nprint(table)", encoding="utf-8")
    printed = output_of("tutorial.py", cwd=tmp_path, timeout_s=1200, PYTHONPATH=str(Path(__file__).parent.parent))
    assert "Learned decay + RoPE" in printed
    assert "layer 1, head 1: gates of data" in printed
