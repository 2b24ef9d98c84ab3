"""What the README says there is, is there; and what is there, it says."""

import re
from pathlib import Path

import pytest
from cope_services.app import create_app
from cope_services.settings import Settings

from cope_sweep.cli import app as cli
from cope_sweep.cli import bench_app
from cope_sweep.positions import ENCODINGS
from cope_sweep.record import Ledger
from cope_sweep.spec import load_ablation
from cope_sweep.tasks import TASKS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


COMMANDS = [c.name or c.callback.__name__ for c in cli.registered_commands]
BENCHES = [f"bench {c.name}" for c in bench_app.registered_commands]


@pytest.mark.parametrize("command", COMMANDS + BENCHES)
def test_every_command(command):
    assert f"| `cope-sweep {command}" in README


@pytest.mark.parametrize("path", sorted((ROOT / "tests/benchmarks/results").glob("*.md")), ids=lambda path: path.stem)
def test_every_measurement_as_it_was_kept(path):
    assert path.read_text(encoding="utf-8") in README


@pytest.mark.parametrize("kind", ENCODINGS)
def test_every_encoding(kind):
    assert f"| `{kind}` |" in README


@pytest.mark.parametrize("kind", TASKS)
def test_every_task(kind):
    assert f"| `{kind}` |" in README


@pytest.mark.parametrize("path", sorted((ROOT / "ablations").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ablation(path):
    content = load_ablation(path).content
    assert f"| `{path.stem}` | {content.title} | {content.reproduces} |" in README


def test_every_endpoint(tmp_path):
    Ledger(tmp_path / "store", create=True)
    paths = create_app(Settings(store=tmp_path / "store", ablations=ROOT / "ablations")).openapi()["paths"]
    for path, methods in paths.items():
        for method in methods:
            assert f"`{method.upper()} {path}`" in README, f"the README does not name {method.upper()} {path}"
    named = re.findall(r"`(?:GET|POST) (/[^`]*)`", README)
    assert set(named) <= set(paths)


def test_every_setting():
    for name in Settings.model_fields:
        assert f"`COPE_SWEEP_{name.upper()}`" in README


def test_every_make_target():
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"quickstart", "test", "lint"} <= set(targets)
    for target in ("quickstart", "test", "lint", "bench"):
        assert f"make {target}" in README


def test_the_readme_s_ablation_is_one(tmp_path):
    text = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)[1]
    (tmp_path / "example.yaml").write_text(text)
    from cope_sweep.plan import expand

    assert len(expand(load_ablation(tmp_path / "example.yaml")).rows) == 6


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#h][^)]*)\)", README):
        assert (ROOT / target).exists(), target
