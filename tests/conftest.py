import os
import signal
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

THOROUGH = (
    "benchmarks/test_bench_",  # the benchmarks' own tests
    "chaos/",
    "kernels/test_triton.py",  # Triton's interpreter and compiler
    "real/",  # Slurm, Caddy and Prometheus
)
"""Files, by the start of their paths, whose tests only `make test-all` runs. Single tests have the mark `thorough`."""

# The tensors of tests are tiny, and several processes run tests side by side: threads of torch would wait for each other's
# core many times longer than they compute. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED = {
    "the committed results": ("tests/ablations/",),
    "a cluster of Ray": (
        "tests/sweep/test_ray_executor.py",
        "tests/sweep/test_executor.py",
        "tests/sweep/test_plugins.py",
        "tests/sweep/test_faults_store.py",
    ),
    "a server of MLflow": ("tests/tracking/",),
    "a server of PostgreSQL": (
        "tests/store/index/",
        "tests/store/test_store.py",
        "tests/sweep/test_search.py",
        "tests/sweep/test_call_faults.py",
    ),
}
"""What a process starts once → the files, by the start of their paths, that use it: they are tested in one process."""

BROWSER_TESTS = "tests/services/page/"
"""The tests that drive a Chromium."""

SLOW_S, FAST_S = 10.0, 0.1
"""About what a test takes that has the mark `slow`, and one without."""

# The same examples on every run, so that a failure is one of the change and not of chance; new ones by hand:
# HYPOTHESIS_PROFILE=random python -m pytest …
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True, max_examples=30)
hypothesis.settings.register_profile("thorough", derandomize=True, deadline=None, print_blob=True, max_examples=100)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# A shell starts background jobs with SIGINT ignored, and processes inherit that: tests of Ctrl-C would wait forever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` does the same with SIGHUP.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items):
    """Mark every test that is neither `slow` nor `thorough` as `fast`, and put the files that take longest first.

    Of files that are tested side by side, a long one that began last would keep all others waiting.
    """
    seconds = Counter()
    folder = Path(__file__).parent
    for item in items:  # also of `pytest --pyargs cope_sweep.testing` in a checkout, whose files are in another folder
        if item.path.is_relative_to(folder) and item.path.relative_to(folder).as_posix().startswith(THOROUGH):
            item.add_marker(pytest.mark.thorough)
        if not (item.get_closest_marker("slow") or item.get_closest_marker("thorough")):
            item.add_marker(pytest.mark.fast)
        seconds[unit(item.nodeid)] += SLOW_S if item.get_closest_marker("slow") else FAST_S
    # The tests of a file stay together, and in their order.
    items.sort(key=lambda item: (-seconds[unit(item.nodeid)], unit(item.nodeid)))


def unit(nodeid):
    """The tests that one process runs: the file of a test, or what its file shares with others."""
    file = nodeid.partition("::")[0]
    return next((shared for shared, files in SHARED.items() if file.startswith(files)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `--dist loadfile`: the tests of a file in one process, and those of files that share something, too."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return unit(nodeid)

    return Scheduling(config, log)


def pytest_unconfigure(config):
    """Say in the last line how many tests of the page were skipped, and why: a green run may have opened no page."""
    terminal = config.pluginmanager.getplugin("terminalreporter")
    skipped = terminal.stats.get("skipped", []) if terminal is not None else []
    reasons = Counter(each.longrepr[2] for each in skipped if each.nodeid.startswith(BROWSER_TESTS))
    for reason, number in reasons.items():
        count = f"{number} browser test{'s were' if number > 1 else ' was'}"
        terminal.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}", yellow=True)


@pytest.fixture(scope="module", autouse=True)
def unchanged_environment():
    """No module leaves variables behind that other modules' commands would read."""
    before = _settings()
    yield
    after = _settings()
    os.environ.update(before)
    for name in after.keys() - before.keys():
        del os.environ[name]
    assert after == before


@pytest.fixture(scope="session")
def thorough(request):
    """Whether some of the tests are thorough ones: then what tests share has also what only those need."""
    return any(item.get_closest_marker("thorough") for item in request.session.items)


@pytest.fixture(scope="session", autouse=True)
def idle_machine():
    """Estimates of time do not depend on what else the machine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        yield


def _settings():
    names = ("COPE_SWEEP_", "MLFLOW_TRACKING_", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


@pytest.fixture(autouse=True)
def forgotten_secrets(monkeypatch):
    """This process knows no secrets of earlier tests, which would be removed from texts of this one."""
    from cope_sweep import redaction

    monkeypatch.setattr(redaction, "_known", redaction._Known())


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    from cope_sweep.store import Store

    return Store(tmp_path / "store", create=True)


@pytest.fixture(scope="session")
def postgres():
    """A server of PostgreSQL for all tests of this process: each makes a database of its own."""
    from tests.helpers.databases import Postgres

    server = Postgres()
    yield server
    server.remove()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of tokenised text of the module's own, no corpora but those that its tests write, and no network."""
    folder = tmp_path_factory.mktemp("cache")
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COPE_SWEEP_CACHE", str(folder))
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.delenv("COPE_SWEEP_DATA", raising=False)
        yield folder
