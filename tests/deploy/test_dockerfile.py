"""The Dockerfile: hadolint, what it copies, what it pins. No test builds the image."""

import re
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

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
IGNORE = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
COPIED = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.MULTILINE) for word in line.split()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = [Requirement(line) for line in (ROOT / "deploy" / "constraints.txt").read_text().splitlines()]


def test_hadolint_has_nothing_to_say():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "deploy" / "Dockerfile"], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


def test_what_is_copied_exists_and_nothing_else_is_in_the_context():
    assert {"pyproject.toml", "README.md", "cope_sweep", "services", "ablations"} <= set(COPIED)
    assert [each for each in COPIED if not (ROOT / each).exists()] == []
    # .dockerignore excludes everything, with secrets and stores, and then allows what is copied.
    assert IGNORE[0] == "*"
    allowed = [each.removeprefix("!") for each in IGNORE if each.startswith("!")]
    assert [each for each in IGNORE[1:] if not each.startswith("!")] == ["**/__pycache__"]
    assert all(any(ROOT.glob(each)) for each in allowed), allowed
    assert {each for each in allowed if not any(f"{each}/".startswith(f"{copied}/") for copied in COPIED)} == set()
    assert {each for each in COPIED if not any(f"{path}/".startswith(f"{each}/") for path in allowed)} == set()
    assert not [each for each in allowed if "secrets" in each or ".env" in each or each in ("*", "deploy")]


def test_the_image_does_not_run_as_root():
    last = TEXT.rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["1000:1000"]
    assert not re.search(r"^RUN ", last.partition("\nUSER ")[2], re.MULTILINE)


def test_the_image_has_what_rays_cluster_launcher_uses():
    """The head starts and updates workers: it reaches them by SSH, copies files into their containers, and asks the cloud's API."""
    (packages,) = re.findall(r"packages=\(([^)]*)\)", TEXT)
    assert {"openssh-client", "rsync"} <= set(packages.split())
    assert "--extra cluster" in TEXT
    extra = {canonicalize_name(Requirement(each).name) for each in PROJECT["optional-dependencies"]["cluster"]}
    # What `ray.autoscaler._private` imports for AWS and for GCP.
    assert {"boto3", "google-api-python-client", "google-auth-httplib2"} <= extra


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
