"""The contract suites as their users run them: on the examples of the documents, and on faulty encodings and tasks."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import cope_sweep
from cope_sweep.positions import ENCODINGS
from cope_sweep.tasks import TASKS
from tests.test_docs import code_blocks, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PACKAGE = Path(cope_sweep.__file__).parent
PROJECT = tomllib.loads(read("pyproject.toml"))["project"]

FAULTY = """
from typing import ClassVar, Literal

import numpy as np

from cope_sweep.positions import ENCODINGS, Parameter
from cope_sweep.positions.base import AttentionEncoding
from cope_sweep.positions.relative import distances
from cope_sweep.terms import DistanceSlope
from cope_sweep.tasks import IGNORED, TASKS, Batch, Task


@ENCODINGS.register
class Acausal(AttentionEncoding):
    kind: Literal["acausal"] = "acausal"

    def score(self, parameters, attention):
        return attention.q_BHQK @ attention.k_BHSK.cumsum(-2).flip(-2).transpose(-1, -2)


@ENCODINGS.register
class Unused(AttentionEncoding):
    kind: Literal["unused"] = "unused"

    def parameters(self, dims):
        return {"used": Parameter((1,)), "not_used": Parameter((1,))}

    def score(self, parameters, attention):
        return (0 * parameters["not_used"] - parameters["used"]) * distances(attention)


@ENCODINGS.register
class WrongTerm(AttentionEncoding):
    kind: Literal["wrong_term"] = "wrong_term"

    def score(self, parameters, attention):
        return -0.5 * distances(attention)

    def term(self, parameters, q_BHQK):
        return DistanceSlope(-0.4 * q_BHQK.new_ones(q_BHQK.shape[1]))


class Faulty(Task):
    TESTS: ClassVar[tuple[str, ...]] = ("in_dist",)

    @property
    def vocabulary_size(self):
        return 5

    def length(self, split):
        return 4

    def batch(self, inputs, target):
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1] = target
        return Batch(inputs, targets, targets != IGNORED)


@TASKS.register
class GlobalRandom(Faulty):
    kind: Literal["global_random"] = "global_random"

    def generate(self, split, rng, count):
        return self.batch(np.random.randint(0, 5, (count, 4)), 0)


@TASKS.register
class LargeTarget(Faulty):
    kind: Literal["large_target"] = "large_target"

    def generate(self, split, rng, count):
        return self.batch(rng.integers(0, 5, (count, 4)), 5)


@TASKS.register
class OneSplit(Faulty):
    kind: Literal["one_split"] = "one_split"

    def sequences(self, split, seed, start, count):
        self.check_split(split)
        rows = [np.random.default_rng([seed, row]).integers(0, 5, 4) for row in range(start, start + count)]
        return self.batch(np.array(rows), 0)

    def token_label(self, token):
        return "x"
"""

TRAINING = """

def test_it_trains_through_the_public_api(tmp_path):
    from cope_sweep.store import Store
    from cope_sweep.config import RunSpec
    from cope_sweep.train import Runtime, train_run

    run = RunSpec.model_validate(
        {
            "task": {"kind": "first_token", "delay": 3},
            "model": {"layers": 1, "dim": 16, "heads": 2, "position": ["learned_decay"]},
            "train": {"steps": 5, "batch": 8},
            "evaluate": {"every": 5, "sequences": 8, "final_sequences": 8},
        }
    )
    assert run.versions == {"first_token.first_token": 1, "learned_decay.learned_decay": 1}
    store = Store(tmp_path / "store", create=True)
    assert train_run(run, store.run(run.run_id), Runtime(threads=1)) == "finished"
    assert store.run(run.run_id).status == "finished"
"""


def python_blocks(page):
    """The Python examples of a page: the module, and the test."""
    return code_blocks(read(f"docs/how-to/{page}.md"), "python")


def outcomes(report):
    """Test name → whether it passed, from a JUnit report, without skipped tests."""
    cases = [case for case in ET.parse(report).iter("testcase") if case.find("skipped") is None]
    return {f"{case.get('classname')}::{case.get('name')}": len(case) == 0 for case in cases}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One run of the suites over the examples and the faulty classes: test name → whether it passed."""
    folder = tmp_path_factory.mktemp("author")
    tests = []
    for page, name in (("own-encoding", "learned_decay"), ("own-task", "first_token")):
        module, test = python_blocks(page)
        (folder / f"{name}.py").write_text(module)
        tests.append(folder / f"test_{name}.py")
        tests[-1].write_text(test)
    (folder / "faulty.py").write_text(FAULTY)
    (folder / "test_training.py").write_text("import first_token, learned_decay\n" + TRAINING)
    kinds = "learned_decay,first_token,acausal,unused,wrong_term,global_random,large_target,one_split"
    command = [sys.executable, "-m", "cope_sweep.testing", "--plugins", "learned_decay, first_token,faulty"]
    command += ["--only", kinds, *map(str, tests), str(folder / "test_training.py")]
    command += ["-q", "--junitxml=report.xml", f"--rootdir={folder}"]
    path = os.pathsep.join([str(PACKAGE.parent), str(folder)])
    process = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert process.returncode == 1, process.stdout + process.stderr  # some tests failed: those of the faulty classes
    return outcomes(folder / "report.xml")


def of_kind(results, kind):
    """The outcomes of the tests of one registered kind: test → whether it passed."""
    pattern = re.compile(rf"test_(?:encodings|tasks)\.\w+::(\w+)\[(?:[\w.]+-)?{kind}(?:-[\w.]+)?\]")
    found = [(match[1], passed) for name, passed in results.items() if (match := pattern.search(name))]
    return {test: all(passed for other, passed in found if other == test) for test, _ in found}


@pytest.mark.parametrize(("kind", "tests"), [("learned_decay", 14), ("first_token", 11)])
def test_the_examples_of_the_documents_pass(results, kind, tests):
    found = of_kind(results, kind)
    assert len(found) >= tests
    assert all(found.values()), found


@pytest.mark.parametrize(("module", "specs"), [("learned_decay", 2), ("first_token", 2)])
def test_the_subclasses_of_the_documents_pass(results, module, specs):
    found = {name: passed for name, passed in results.items() if f"test_{module}.Test" in name}
    assert len(found) >= 11 * specs
    assert all(found.values()), found


def test_the_examples_train(results):
    [passed] = [passed for name, passed in results.items() if name.endswith("::test_it_trains_through_the_public_api")]
    assert passed


@pytest.mark.parametrize(
    ("kind", "failures"),
    [
        ("acausal", {"test_outputs_do_not_depend_on_later_tokens", "test_gradients_do_not_reach_later_tokens"}),
        ("unused", {"test_every_position_parameter_has_a_gradient"}),
        ("wrong_term", {"test_fused_kernels_equal_the_reference"}),
        ("global_random", {"test_sequences_are_a_pure_function", "test_any_range_is_a_slice_of_the_whole"}),
        ("large_target", {"test_targets_and_answers_agree"}),
        ("one_split", {"test_seeds_and_splits_differ", "test_every_token_has_a_label"}),
    ],
)
def test_faults_are_found(results, kind, failures):
    found = of_kind(results, kind)
    failed = {test for test, passed in found.items() if not passed}
    assert failures <= failed
    # The other tests pass or fail for the same reason; those that concern the spec alone pass.
    assert found["test_spec_round_trips_through_json"]


def test_without_pytest_the_command_that_installs_it_is_named():
    without = "import sys; sys.modules['pytest'] = None; import cope_sweep.testing"
    process = subprocess.run([sys.executable, "-c", without], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.startswith("error: ")
    assert len(process.stderr.splitlines()) == 1
    assert process.stderr.endswith("pip install pytest\n")


HIDDEN = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in NAMES else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def packages_of(requirements):
    return {Requirement(text).name for text in requirements}


@pytest.fixture(scope="module")
def only_pytest(tmp_path_factory):
    """The variables of an environment with the project's dependencies and pytest, without the rest of the extra `test`."""
    hidden_names = packages_of(PROJECT["optional-dependencies"]["test"])
    hidden_names -= packages_of(PROJECT["dependencies"]) | {"pytest"}
    hidden = {module for module, names in metadata.packages_distributions().items() if set(names) <= hidden_names}
    assert {"hypothesis", "pytest_timeout"} <= hidden
    folder = tmp_path_factory.mktemp("only-pytest")
    (folder / "sitecustomize.py").write_text(f"NAMES = {sorted(hidden)}\n{HIDDEN}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COPE_"))}
    path = os.pathsep.join([str(folder), str(PACKAGE.parent)])
    return environment | {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.parametrize(
    ("page", "is_checkout"), [("own-task", True), ("own-encoding", False)], ids=["checkout", "elsewhere"]
)
def test_the_command_of_the_documents_needs_only_pytest(page, is_checkout, only_pytest, tmp_path):
    """As the pages say it, in a folder with and in one without a configuration and a conftest.py of other tests."""
    text = read(f"docs/how-to/{page}.md")
    [(name, install)] = re.findall(r"Save it as `(\w+)\.py`, and test it \(`(.*)` first\)", text)
    assert install == "pip install pytest"
    [command] = re.findall(r"^python (-m cope_sweep\.testing .*)$", text, re.MULTILINE)
    (tmp_path / f"{name}.py").write_text(python_blocks(page)[0])
    environment, folder = only_pytest, tmp_path
    if is_checkout:
        # The page's module lies in that folder; here it must not stay there.
        environment = only_pytest | {"PYTHONPATH": os.pathsep.join([only_pytest["PYTHONPATH"], str(tmp_path)])}
        folder = PACKAGE.parent
    before = set(folder.iterdir())
    words = [sys.executable, *shlex.split(command)]
    process = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    counts = {outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", process.stdout.splitlines()[-1])}
    assert counts["passed"] >= 10
    assert counts.get("skipped", 0) <= 3, "tests of other kinds are not skips"
    assert {path.name for path in set(folder.iterdir()) - before} <= {"__pycache__"}


@pytest.mark.parametrize(
    ("words", "named"), [(["--only", "rope,learned_decay"], "learned_decay"), (["--plugins", "no_module"], "no_module")]
)
def test_a_kind_or_a_plugin_that_does_not_exist_is_an_error(words, named, only_pytest, tmp_path):
    command = [sys.executable, "-m", "cope_sweep.testing", *words]
    process = subprocess.run(command, cwd=tmp_path, env=only_pytest, capture_output=True, text=True)
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert "Traceback" not in process.stdout + process.stderr
    assert named in process.stderr
    assert "rope" not in process.stderr


def test_the_notebook_and_its_page_name_the_same_extra_which_has_pytest():
    [of_page], [of_notebook] = (
        re.findall(r"pip install -e '\.\[(.*)\]'", read(path))
        for path in ("docs/how-to/notebooks.md", "ablations/tutorial.ipynb")
    )
    assert of_page == of_notebook
    assert {"pytest", "jupyterlab"} <= packages_of(PROJECT["optional-dependencies"][of_page])


@pytest.mark.thorough
def test_every_registered_kind_is_collected(tmp_path):
    """`pytest --pyargs cope_sweep.testing` in a checkout, whose tests have a conftest.py, with a plugin."""
    (tmp_path / "learned_decay.py").write_text(python_blocks("own-encoding")[0])
    environment = os.environ | {
        "COPE_SWEEP_PLUGINS": "learned_decay",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(tmp_path)]),
    }
    command = [sys.executable, "-m", "pytest", "--pyargs", "cope_sweep.testing", "--collect-only", "-q"]
    command += ["-p", "no:cacheprovider"]
    process = subprocess.run(command, cwd=PACKAGE.parent, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    # Other tests of this process may have imported plugins of their own.
    ours = [kind for kind, encoding in ENCODINGS.items() if encoding.__module__.startswith("cope_sweep.")]
    for kind in (*ours, "learned_decay"):
        assert f"test_state_dict_round_trip[{kind}]" in process.stdout
    for kind in TASKS:
        assert f"test_shapes_types_and_ids[{kind}]" in process.stdout
