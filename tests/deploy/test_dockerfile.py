"""The Dockerfile: hadolint, what it copies, what it pins. `build_in_chroot.py` executes it (root, minutes, gigabytes)."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cope_sweep
from cope_sweep.kernels.native import build
from tests.deploy.dockerfile import ignore_lines, in_context, parse

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
IGNORE = ignore_lines((ROOT / ".dockerignore").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = [Requirement(line) for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()]


def test_hadolint_has_nothing_to_say():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "deploy" / "Dockerfile"], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


def test_hadolint_finds_a_mistake(tmp_path):
    (tmp_path / "Dockerfile").write_text(TEXT.replace("FROM debian:${DEBIAN}\n", "FROM debian:latest\n"))
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), tmp_path / "Dockerfile"], capture_output=True, text=True
    )
    assert "DL3007" in done.stdout


def test_the_context_holds_what_is_copied_and_nothing_else():
    _, stages = parse(TEXT)
    copies = [each.words() for stage in stages for each in stage.instructions if each.name == "COPY"]
    sources = [source for options, words in copies if "from" not in options for source in words[:-1]]
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    sent = [path for path in files if in_context(path, IGNORE)]
    for source in sources:
        assert any(path == source or path.startswith(f"{source}/") for path in sent), source
    for path in sent:
        assert any(path == source or path.startswith(f"{source}/") for source in sources), path
    # hatch's wheel needs exactly these
    assert {"pyproject.toml", "README.md", "cope_sweep/__init__.py", "services/cope_services/app.py"} <= set(sent)
    assert "ablations/quickstart.yaml" in sent


@pytest.mark.parametrize(
    "path",
    ["deploy/.env", "deploy/secrets/ray_token", "store/index.db", ".git/config", ".venv/bin/python", "a/.env",
     "cope_sweep/__pycache__/errors.pyc", "ablations/results/quickstart.md", "tests/conftest.py"],
)  # fmt: skip
def test_secrets_stores_and_caches_stay_out_of_the_context(path):
    assert not in_context(path, IGNORE)


def test_the_image_does_not_run_as_root():
    _, stages = parse(TEXT)
    users = [each.text for each in stages[-1].instructions if each.name == "USER"]
    assert users == ["1000:1000"]
    after = stages[-1].instructions[[each.name for each in stages[-1].instructions].index("USER") :]
    assert "RUN" not in {each.name for each in after}


def test_both_variants_are_built_and_no_index_is_named():
    assert "cpu) export UV_TORCH_BACKEND=cpu" in TEXT
    assert 'if [ "${VARIANT}" = cuda ]' in TEXT
    # Packages come from where the builder's pip and uv are configured to take them.
    assert {urlsplit(each).hostname for each in re.findall(r"\w+://[^\s\"'\\]+", TEXT)} == {"127.0.0.1"}
    options = {word.partition("=")[0] for word in TEXT.split() if word.startswith("-")}
    assert not options & {"--index", "--index-url", "--default-index", "--extra-index-url", "--find-links"}
    assert not re.search(r"\b(PIP|UV)_\w*(INDEX|FIND_LINKS)", TEXT)
    lines = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+!-]+( ;.*)?", line)] == []


def test_the_tags_in_the_comment_are_the_version():
    tags = re.findall(r"-t cope-sweep:(\S+)", TEXT)
    assert tags == [cope_sweep.__version__, f"{cope_sweep.__version__}-cuda"]


def test_every_dependency_is_pinned_by_a_version_that_pyproject_allows():
    pinned = {}
    for each in CONSTRAINTS:
        (specifier,) = each.specifier
        assert specifier.operator == "=="
        pinned.setdefault(canonicalize_name(each.name), []).append(specifier.version)
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cluster"]]:
        wanted = Requirement(text)
        versions = pinned[canonicalize_name(wanted.name)]
        assert all(wanted.specifier.contains(version) for version in versions), text


def test_libraries_of_an_image_are_used_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: _written(command))
    built = build.build("portable")
    monkeypatch.setattr(build, "_compiler", lambda: None)
    assert build.build("portable") == built
    built.unlink()
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler"):
        build.build("portable")


def _written(command):
    Path(command[command.index("-o") + 1]).write_bytes(b"")
    return subprocess.CompletedProcess(command, 0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(
    os.environ.get("COPE_SWEEP_TEST_IMAGE") is None or os.geteuid() != 0 or shutil.which("debootstrap") is None,
    reason="COPE_SWEEP_TEST_IMAGE=FOLDER executes the Dockerfile there: needs root, debootstrap, 20 GB, minutes",
)
def test_the_dockerfile_is_executed_in_a_chroot():
    command = [sys.executable, "-m", "tests.deploy.build_in_chroot", os.environ["COPE_SWEEP_TEST_IMAGE"]]
    done = subprocess.run([*command, "--arg", "VARIANT=cuda"], cwd=ROOT, timeout=2900)
    assert done.returncode == 0
