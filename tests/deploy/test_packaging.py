"""The wheel: what is in it, and that it works in a folder that is no checkout."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import cope_sweep
from cope_sweep import notebook
from cope_sweep.config import source as spec_folder
from cope_sweep.config.source import ablations_folder, packaged_ablations
from tests.helpers.errors import raises

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TINY = ("--set", "train.steps=2", "--set", "train.batch=4", "--set", "evaluate.final_sequences=8", "--set", "seeds=[0]")


def test_the_version_is_in_one_place():
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"] == {"path": "cope_sweep/__init__.py"}
    newest = re.search(r"^## (\d\S*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == cope_sweep.__version__


def test_the_license_is_declared_and_cited():
    assert (PROJECT["project"]["license"], PROJECT["project"]["license-files"]) == ("Apache-2.0", ["LICENSE"])
    # The text of apache.org: nothing is added or left out.
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    citation = YAML(typ="safe", pure=True).load(ROOT / "CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors", "abstract", "type"}
    assert (citation["license"], citation["version"]) == ("Apache-2.0", cope_sweep.__version__)


def test_ablations_of_the_working_directory_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ablations_folder() == packaged_ablations() == ROOT / "ablations"
    assert ablations_folder(Path("elsewhere")) == Path("elsewhere")  # what was chosen is not replaced
    (tmp_path / "ablations").mkdir()
    assert ablations_folder() == Path("ablations")


def test_installed_ablations_are_those_of_the_wheel(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "cope_sweep"
    (package / "ablations").mkdir(parents=True)
    monkeypatch.setattr(spec_folder, "PACKAGE", package)
    assert packaged_ablations() == package / "ablations"


def test_notebooks_find_installed_ablations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert notebook.load_ablation("quickstart").content.title == "Selective copy, small"
    with raises("not_found", name="quickstrat") as error:
        notebook.load_ablation("quickstrat")
    assert "quickstart" in error.value.data["allowed"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the contents of the wheel, as site-packages has them."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--installer", "uv", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


@pytest.mark.slow
def test_the_wheel_holds_the_files_of_both_packages(installed):
    def files(folder):
        skip = {"__pycache__", "results"} if folder.name == "ablations" else {"__pycache__"}
        return {
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and not skip & set(path.relative_to(folder).parts)
        }

    ablations = {f"ablations/{name}" for name in files(ROOT / "ablations")}
    assert files(installed / "cope_sweep") == files(ROOT / "cope_sweep") | ablations
    assert files(installed / "cope_services") == files(ROOT / "services" / "cope_services")
    (metadata,) = installed.glob("*.dist-info/METADATA")
    assert f"\nVersion: {cope_sweep.__version__}\n" in metadata.read_text()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata.read_text()
    assert (metadata.parent / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.thorough  # as `make release` does
def test_the_wheel_runs_the_quick_start_in_an_empty_folder(installed, tmp_path):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("COPE_SWEEP", "MLFLOW", "RAY"))}
    environment = kept | {"PYTHONPATH": str(installed), "COLUMNS": "200"}

    def call(*words):
        command = [sys.executable, "-m", "cope_sweep.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    names = {each["name"] for each in call("list", "--json")}
    assert names == {path.stem for path in (ROOT / "ablations").glob("*.yaml")}
    outcome = call("run", "quickstart", "--local", "--no-mlflow", "--json", *TINY)
    assert outcome["sweep"]["exit_code"] == 0
    runs = list((tmp_path / "store" / "runs").iterdir())
    assert len(runs) == 3
