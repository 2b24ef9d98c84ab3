"""Plugin modules on a cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cope_sweep.store import Store
from cope_sweep.sweep.cluster import plugin_runtime_env
from tests.helpers.processes import output_of
from tests.helpers.tiny import TINY

ROOT = Path(__file__).parents[2]
ENCODING = """
from typing import Literal

from cope_sweep.positions import ENCODINGS


@ENCODINGS.register
class Renamed(ENCODINGS["absolute"]):
    kind: Literal["renamed"] = "renamed"
"""
DRIVER = """
import sys
from functools import partial
from cope_sweep.store import Store
from cope_sweep.registry import load_plugins
from cope_sweep.config import Resources
from cope_sweep.sweep.ray_executor import run_on_ray
from tests.helpers.sweep_runs import train_by
from tests.helpers.tiny import tiny_run

plugins = ["renamed_position.encoding", "renamed_single_file"]
load_plugins(plugins)
runs = [tiny_run(**{"model.position": [{"kind": kind}]}) for kind in ("renamed", "single_file")]
executor = partial(run_on_ray, address=sys.argv[2])
train_by(executor, runs, Store(sys.argv[1], create=True), Resources(groups=1, device="cpu"), plugins=plugins)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside of the checkout, which modules can be imported from."""
    folder = tmp_path.resolve() / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_modules_outside_of_distributions_are_shipped(folder: Path) -> None:
    (folder / "plugin_file.py").write_text("")
    (folder / "plugin_package").mkdir()
    (folder / "plugin_package" / "__init__.py").write_text("")
    (folder / "plugin_package" / "first.py").write_text("")
    (folder / "plugin_package" / "second.py").write_text("")
    environment = plugin_runtime_env(["plugin_file", "plugin_package.first", "plugin_package.second"])
    assert environment == {"py_modules": [str(folder / "plugin_file.py"), str(folder / "plugin_package")]}


def test_installed_modules_are_not_shipped() -> None:
    assert plugin_runtime_env(["cachetools", "json", "sys"]) == {}
    assert plugin_runtime_env([]) == {}


@pytest.mark.slow
def test_workers_train_with_plugins_from_another_folder(
    cluster: str, ray_environment: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    """The nodes of the cluster do not have the folder in their path."""
    (folder / "renamed_position").mkdir()
    (folder / "renamed_position" / "__init__.py").write_text("")
    (folder / "renamed_position" / "encoding.py").write_text(ENCODING)
    (folder / "renamed_single_file.py").write_text(ENCODING.replace("renamed", "single_file"))
    path = os.pathsep.join([str(ROOT), ray_environment.get("PYTHONPATH", "")])
    words = ("-c", DRIVER, str(tmp_path / "store"), cluster)
    output_of(*words, cwd=folder, **ray_environment | {"PYTHONPATH": path})
    folders = Store(tmp_path / "store").run_folders()
    assert [run.status for run in folders] == ["finished", "finished"]


CHANGING = ENCODING.replace("Renamed", "Changing").replace("renamed", "changing")
CHANGING_ABLATION = f"""
title: A plugin that changes
plugins: [changing_position]
base: {TINY | {"model": TINY["model"] | {"position": ["changing"]}}}
metrics: [{{name: in_dist/token_error}}]
"""


def test_runs_of_another_source_of_a_plugin_are_not_mixed_with_new_ones(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "changing.yaml").write_text(CHANGING_ABLATION)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}

    def train(code: str, seeds: str) -> subprocess.CompletedProcess[str]:
        (folder / "changing_position.py").write_text(code)
        command = [sys.executable, "-m", "cope_sweep.cli", "run", "changing.yaml", "--local", "--no-mlflow"]
        return subprocess.run(
            [*command, "--set", f"seeds={seeds}"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    assert train(CHANGING, "[0]").returncode == 0
    index = Store(tmp_path / "store").index
    (run,) = index.records(index.statuses()).values()
    kind, digest = str(run.facts["plugins"]).split(" ")
    assert kind == "changing_position.changing"
    changed = train(f"{CHANGING}    scale: float = 1.0\n", "[0, 1]")
    assert changed.returncode == 2
    assert all(named in changed.stderr for named in (run.run_id, "changing_position.changing", digest))
    assert len(index.statuses()) == 1
    same = train(f'{CHANGING}    scale: float = 1.0\n    SAME_SOURCES = ("{digest}",)\n', "[0, 1]")
    assert same.returncode == 0, same.stderr
    assert len(index.statuses()) == 2
