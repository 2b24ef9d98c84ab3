"""What `.ci/run` and `make test` do about a browser."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ("bash", "dirname")


def gate(tmp_path, *programs, user="0", apt_get="exit 0"):
    """Run the gate with some programs on the PATH. What it called, and its exit code."""
    checkout, folder, calls = tmp_path / "checkout", tmp_path / "bin", tmp_path / "calls"
    (checkout / ".ci").mkdir(parents=True)
    folder.mkdir()
    shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    for name in NEEDED:
        (folder / name).symlink_to(shutil.which(name))
    scripts = {"id": f"echo {user}", "make": "exit 0", "apt-get": apt_get} | dict.fromkeys(programs, "exit 0")
    for name, script in scripts.items():
        (folder / name).write_text(f"#!{shutil.which('bash')}\necho {name} $* >> {calls}\n{script}\n")
        (folder / name).chmod(0o755)
    command = [shutil.which("bash"), str(checkout / ".ci" / "run")]
    done = subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, check=False)
    lines = calls.read_text().splitlines()
    return [line for line in lines if not line.startswith("id ")], done.returncode


def test_the_gate_installs_chromium_where_it_may_and_there_is_none(tmp_path):
    calls, code = gate(tmp_path)
    assert code == 0
    assert [line.split()[0] for line in calls] == ["apt-get", "apt-get", "make", "make"]
    assert " chromium" in calls[1]


def test_the_gate_goes_on_where_chromium_cannot_be_installed(tmp_path):
    assert gate(tmp_path, apt_get="exit 100")[0][-2:] == ["make lint", "make test"]


@pytest.mark.parametrize(("programs", "user"), [(("chromium",), "0"), (("google-chrome",), "0"), ((), "1000")])
def test_the_gate_installs_nothing_else(tmp_path, programs, user):
    assert gate(tmp_path, *programs, user=user) == (["make lint", "make test"], 0)


@pytest.mark.slow
def test_skipped_browser_tests_are_counted_in_the_last_line():
    """With processes side by side, as `make test` runs them."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("COPE_SWEEP_", "PYTEST_"))}
    environment["PATH"] = str(Path(sys.executable).parent)  # without a Chromium
    tests = ("tests/services/page/test_sweep_views.py", "-k", "the_form_is_offered", "-n", "1")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    number, _, reason = done.stdout.strip().splitlines()[-1].partition(" browser test")
    assert number == "1"
    assert "COPE_SWEEP_CHROMIUM" in reason
