"""The files of Ray's cluster launcher: against Ray's own schema, and against each other."""

import copy
import re
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import cope_sweep

ROOT = Path(__file__).parents[2]
FILES = {path.stem: YAML(typ="safe").load(path) for path in sorted((ROOT / "deploy" / "ray").glob("*.yaml"))}
EVERY_FILE = pytest.mark.parametrize("name", FILES)
CLOUDS = pytest.mark.parametrize("name", ["aws", "gcp"])


def test_there_is_a_file_for_each_kind_of_machine():
    assert {name: config["provider"]["type"] for name, config in FILES.items()} == {
        "aws": "aws", "gcp": "gcp", "on-premise": "local",
    }  # fmt: skip


@pytest.mark.slow  # imports Ray
@EVERY_FILE
def test_ray_accepts_the_file(name):
    """As `ray up` completes and checks it before it talks to a cloud."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    full = prepare_config(copy.deepcopy(FILES[name]))
    validate_config(full)
    assert full["max_workers"] == FILES[name]["max_workers"]


@CLOUDS
def test_workers_start_from_zero_on_spot_machines(name):
    types = FILES[name]["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}  # trains nothing, and is no spot machine
    assert (types["gpu-spot"]["min_workers"], types["gpu-spot"]["max_workers"]) == (0, FILES[name]["max_workers"])
    spot = {"aws": "'MarketType': 'spot'", "gcp": "'provisioningModel': 'SPOT'"}[name]
    assert spot in str(types["gpu-spot"]["node_config"])
    assert spot not in str(types["head"]["node_config"])


@CLOUDS
def test_every_machine_starts_from_an_image_that_the_user_chose(name):
    """Ray's own default for AWS is Ubuntu 18.04, whose driver is too old for CUDA 13."""
    for node_type in FILES[name]["available_node_types"].values():
        assert "_WITH_DOCKER_AND_NVIDIA_DRIVER'" in str(node_type["node_config"])


@EVERY_FILE
def test_every_node_starts_with_the_token_and_the_same_image(name):
    config = FILES[name]
    assert config["docker"]["image"] == f"REGISTRY/cope-sweep:{cope_sweep.__version__}-cuda"
    assert config["file_mounts"]["/home/cope/.ray/auth_token"] == "~/.ray/auth_token"
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        (start,) = [each for each in commands if "ray start" in each]
        assert start.startswith(". ~/cluster.env; export RAY_AUTH_MODE=token; ray start")
        assert "--metrics-export-port=8080" in start  # as the guide to monitoring says
    (head,) = [each for each in config["head_start_ray_commands"] if "ray start" in each]
    assert "--dashboard-host=127.0.0.1" in head  # reached by `ray dashboard`, through SSH


@EVERY_FILE
@pytest.mark.parametrize("unreadable", [None, "cluster.env", ".ray/auth_token"])
def test_files_that_the_user_of_the_image_cannot_read_are_an_error(name, unreadable, tmp_path):
    """Tested with files that are not there, because root reads all others."""
    (command,) = FILES[name]["setup_commands"]
    (tmp_path / ".ray").mkdir()
    for each in {"cluster.env", ".ray/auth_token"} - {unreadable}:
        (tmp_path / each).touch()
    done = subprocess.run(["bash", "-c", command], env={"HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == (unreadable is not None)
    assert ("use an ssh_user with this uid" in done.stderr) == (unreadable is not None)


@EVERY_FILE
def test_no_file_holds_a_secret(name):
    text = (ROOT / "deploy" / "ray" / f"{name}.yaml").read_text()
    assert not re.search(r"password|secret|AKIA|postgresql://", text, re.IGNORECASE)


@EVERY_FILE
def test_the_guide_names_what_is_to_be_replaced(name):
    words = set(re.findall(r"\b[A-Z]+(?:_[A-Z0-9]+)+\b|\bREGISTRY\b", str(FILES[name])))
    words -= {"RAY_AUTH_MODE", "RAY_HEAD_IP"}
    guide = (ROOT / "docs" / "how-to" / "cluster.md").read_text()
    assert words
    assert {word for word in words if f"`{word}`" not in guide} == set()
