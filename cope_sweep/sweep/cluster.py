"""Connects to a running Ray cluster or starts one on this machine, and says what its nodes have.

What Ray logs and prints goes to a file, because the terminal shows the sweep's live table. Importing this module
imports neither Tune nor torch.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import logging
import os
import secrets
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import ray

from cope_sweep.config import Resources
from cope_sweep.errors import ClusterError, counted
from cope_sweep.registry import load_plugins
from cope_sweep.signals import kept_from_children
from cope_sweep.store.provenance import usable_cpus
from cope_sweep.sweep.executor import ClusterLost
from cope_sweep.sweep.net import CONNECT_TIMEOUT_S, connection_error, first_line, within

HEAD_TIMEOUT_S = 10.0
"""The cluster's head counts as lost after it has accepted no connections for this time."""
ANSWER_TIMEOUT_S = 30.0
"""It also counts as lost after it has given no answer for this time. Ray would end this process after 60 s."""
TERMINATION_S = 5.0
"""Time that the processes of a lost cluster have to end: runs write their states."""

# What Ray and its processes read from the environment. Variables that the user has set are kept.
SETTINGS = {
    # Relative paths mean the same as in the shell that started the sweep.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Tune's own CSV, JSON and TensorBoard files, and its snapshots. Nothing reads them.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    # A run that fails has no value of the scheduler's metric.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    # Tune's newer output prints even at verbosity 0.
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # If the cluster were gone, Tune would start another one.
    "TUNE_DISABLE_AUTO_INIT": "1",
    # A cluster on this machine trains at the priority of this process, like `--local`, not at niceness 15.
    "RAY_worker_niceness": "0",
    # How long a call of a process that has died waits until Ray knows whether its node has died, too: 5 to 20 s, and
    # more than 30 s where its machine hangs. The default is 1 s.
    "RAY_timeout_ms_task_wait_for_death_info": "90000",
    # The sweep reports failures itself.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray warns that its default for processes without a GPU will change. This is the new default.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

TOKEN = secrets.token_hex(32)
"""The token of clusters that this process starts. One for the process, because Ray caches the first that it reads."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster that is alive."""

    address: str
    resources: dict[str, float]
    """All its resources, in use or not."""


@dataclass(frozen=True)
class Needs:
    """Needs of a run: workers, and what each takes."""

    workers: int
    cpus: int
    """CPUs of each worker."""
    gpus: float
    """GPUs of each worker."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker, as Ray names them."""
        return {"CPU": float(self.cpus)} | ({"GPU": self.gpus} if self.gpus else {})

    def workers_on(self, resources: Mapping[str, float]) -> int:
        """The number of workers that fit. Several may share a GPU, but none gets parts of two."""
        fits = resources.get("CPU", 0) // self.cpus
        if self.gpus:
            gpus = resources.get("GPU", 0)
            fits = min(fits, gpus * int(1 / self.gpus + 1e-9) if self.gpus < 1 else gpus // self.gpus)
        return int(fits)

    def misfit(self, nodes: Collection[Mapping[str, float]]) -> str | None:
        """Why the workers of a run do not fit on the nodes together, all of them free; None if they do."""
        room = sum(map(self.workers_on, nodes))
        if room >= self.workers:
            return None
        for name, amount in sorted(self.bundle.items(), reverse=True):
            largest = max((node.get(name, 0) for node in nodes), default=0)
            if largest < amount:
                return f"needs {counted(amount, name)}, the largest node has {largest:g}"
        wanted = " and ".join(counted(amount, name) for name, amount in self.bundle.items())
        return f"needs {counted(self.workers, 'worker')} with {wanted} each, the nodes have room for {room}"


@contextlib.contextmanager
def connected(address: str | None, log: Path, *, runtime_env: Mapping[str, Any] | None = None) -> Iterator[bool]:
    """Connect this process to Ray while the block runs. What Ray logs goes to the file `log`.

    Yields True for a cluster of this process alone, to which no nodes come.

    A process that is already connected stays connected, and `runtime_env` has no effect.

    Args:
        address: "auto", "host:port", or None for RAY_ADDRESS; without that, a new cluster on this machine, which ends
            with the block.
        log: The log file.
        runtime_env: The runtime environment of the processes that Ray starts for this one.

    Raises:
        ClusterError: There is no cluster at `address`, or it refuses the connection.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with contextlib.ExitStack() as stack:
        divert_logs = stack.enter_context(_logging_to(log))
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if not ray.is_initialized():
            if address == "local":
                stack.enter_context(_private_token())
            started: list[psutil.Process] = []
            stack.push(partial(_disconnect, started))
            if address == "local":
                before = psutil.Process().children(recursive=True)
                _start(dict(runtime_env or {}))
                started += [each for each in psutil.Process().children(recursive=True) if each not in before]
            else:
                _connect(address, dict(runtime_env or {}))
            divert_logs()
        yield address == "local"


def _disconnect(
    started: Sequence[psutil.Process], kind: type[BaseException] | None, error: BaseException | None, traceback: object
) -> None:
    """Disconnect from the cluster, of which this process has started the processes `started`.

    Without its head that would block until Ray ends this process, after a minute.
    """
    if isinstance(error, ClusterLost):
        atexit.register(_exit_at_once)  # before the functions that Ray has registered
        _end(started)
    else:
        ray.shutdown()


def _end(started: Sequence[psutil.Process]) -> None:
    """End processes and those that they have started: without a head, Ray's agents would stay for minutes."""
    processes = set(started)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.update(process.children(recursive=True))
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        _, alive = psutil.wait_procs(processes, TERMINATION_S)
        processes = set(alive)


def _exit_at_once() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ClusterLost.exit_code)


def nodes() -> dict[str, Node]:
    """The nodes that are alive, by id."""
    found = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return {node["NodeID"]: Node(node["NodeManagerAddress"], node["Resources"]) for node in found}


def living_nodes(this_node: str, *, is_own: bool = False) -> dict[str, Node]:
    """The nodes that are alive, by id.

    Args:
        this_node: The id of the node of this process.
        is_own: This process has started the cluster.

    Raises:
        ClusterLost: The cluster's head has accepted no connections for `HEAD_TIMEOUT_S` or given no answer for
            `ANSWER_TIMEOUT_S`, or this node has died.
    """
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")

    def lost(reason: object) -> ClusterLost:
        head = "Ray's head process on this machine" if is_own else f"the head of the Ray cluster ({address})"
        where = "" if is_own else " when the cluster is back, or on another one"
        return ClusterLost(
            f"{head} no longer answers ({reason}); finished runs are kept; repeat the command{where}", address=address
        )

    until = time.monotonic() + HEAD_TIMEOUT_S
    while (error := connection_error(host.strip("[]"), int(port))) is not None:
        if time.monotonic() > until:
            raise lost(error)
        time.sleep(0.5)
    try:
        live_nodes = within(ANSWER_TIMEOUT_S, nodes)
    except TimeoutError:  # it accepts connections and hangs
        raise lost(f"no answer within {ANSWER_TIMEOUT_S:.0f} s") from None
    if this_node not in live_nodes:
        raise ClusterLost(
            "Ray's process on this machine, the raylet, has died; finished runs are kept; repeat the command",
            code="raylet_died",
        )
    return live_nodes


def needs_of(resources: Resources, there: Mapping[str, Node]) -> Needs:
    """Needs of a run on a cluster with these nodes."""
    gpus = resources.gpus
    if gpus == "auto":
        has_gpu = any(node.resources.get("GPU", 0) >= 1 for node in there.values())
        gpus = 1.0 if resources.device != "cpu" and has_gpu else 0.0
    return Needs(resources.workers, resources.cpus, gpus)


def may_wait(resources: Resources, there: Iterable[Node]) -> bool:
    """Whether a sweep waits for larger nodes than these: with fixed groups, or where only a head that trains nothing
    is alive, as in clusters whose workers an autoscaler starts from zero.
    """
    return resources.groups != "auto" or not any(node.resources.get("CPU") for node in there)


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[Callable[[], None]]:
    """Write what Ray logs and prints in this process to the file `path`.

    Yields a function that has to be called after `ray.init`, which removes the handlers of Ray's loggers.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger("ray"), logging.getLogger("ray._private")]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]

    def divert() -> None:
        for logger in loggers:
            logger.handlers, logger.propagate = [handler], False

    divert()
    try:
        with _RayMessages(loggers[0]) as messages, contextlib.redirect_stdout(messages):
            yield divert
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
        handler.close()


class _RayMessages(io.TextIOBase):
    """Standard output, without what Ray's own threads print: that is logged.

    Ray 2.60 prints messages of the cluster ("8 PYTHON worker processes have been started …") from a thread, whatever
    `log_to_driver` says. They would break the live table.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self._output = logger, sys.stdout

    def write(self, text: str) -> int:
        if not threading.current_thread().name.startswith("ray_"):
            return self._output.write(text)
        if text.strip():
            self._logger.warning("%s", text.rstrip())
        return len(text)

    def flush(self) -> None:
        self._output.flush()

    def isatty(self) -> bool:
        return self._output.isatty()

    def fileno(self) -> int:
        return self._output.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._output.encoding


@contextlib.contextmanager
def _private_token() -> Iterator[None]:
    """Token authentication for a new cluster, with a token that is in no file.

    `ray.init()` alone would turn authentication on and write ~/.ray/auth_token, which changes what a later `ray start`
    and `ray job submit` of this user do. If the user has set RAY_AUTH_MODE, a token, or that file, they are used.
    """
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if any(name in os.environ for name in names) or (Path.home() / ".ray" / "auth_token").exists():
        yield
        return
    os.environ["RAY_AUTH_TOKEN"] = TOKEN
    try:
        yield
    finally:
        for name in names:  # Ray adds RAY_AUTH_MODE
            os.environ.pop(name, None)


def _start(runtime_env: dict[str, Any]) -> None:
    # In this thread, because Linux ends Ray's processes together with the thread that started them.
    before = signal.getsignal(signal.SIGTERM)
    try:
        # Kept from Ray's processes: else runs could not write their states when the terminal closes.
        with kept_from_children():
            ray.init(
                address="local",
                num_cpus=usable_cpus(),
                include_dashboard=False,  # nobody has its token, and it takes a second of CPU time
                log_to_driver=False,
                configure_logging=False,
                runtime_env=runtime_env or None,
            )
    except Exception as error:
        raise ClusterError(
            f"Ray cannot start here: {first_line(error)}; --local works without Ray",
            code="ray_not_started",
            reason=first_line(error),
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # `ray.init` replaces it


def _connect(address: str, runtime_env: dict[str, Any]) -> None:
    if "://" in address:
        raise ClusterError(
            f"{address} is not the address of a Ray cluster; write `auto` or HOST:6379 on one of its nodes. From "
            "outside, use `cope-sweep submit --address http://HOST:8265`",
            code="invalid_address",
            address=address,
        )
    if address != "auto":
        _check_port(address)
    try:
        within(
            CONNECT_TIMEOUT_S,
            lambda: ray.init(
                address=address, log_to_driver=False, configure_logging=False, runtime_env=runtime_env or None
            ),
        )
    except TimeoutError:
        raise ClusterError(
            f"the Ray cluster at {address} did not accept the connection within {CONNECT_TIMEOUT_S:.0f} s: this "
            "machine has to be one of its nodes (`ray start --address=…`); from outside, use `cope-sweep submit`",
            code="not_connected",
            address=address,
        ) from None
    except Exception as error:
        if isinstance(error, ray.exceptions.AuthenticationError):
            hint = "export RAY_AUTH_MODE=token, and put the cluster's token into RAY_AUTH_TOKEN or ~/.ray/auth_token"
        elif address == "auto":
            hint = "start one (`ray start --head`), or omit --address to have one started for the sweep"
        else:
            hint = (
                "see `ray status` on its head node; if it uses token authentication, export RAY_AUTH_MODE=token and "
                "RAY_AUTH_TOKEN; from outside of the cluster, use `cope-sweep submit`"
            )
        raise ClusterError(
            f"cannot connect to the Ray cluster at {address}: {first_line(error)}; {hint}",
            code="not_connected",
            address=address,
            reason=first_line(error),
        ) from error


def _check_port(address: str) -> None:
    """Raise ClusterError if nothing listens at `address`. Ray would retry for long and then end the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"{address!r} is not the address of a Ray cluster; write `auto` or HOST:PORT, as in 10.0.0.1:6379",
            code="invalid_address",
            address=address,
        )
    if (error := connection_error(host.strip("[]"), int(port))) is not None:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error}): start one (`ray start --head`), or omit --address "
            "to have one started for the sweep",
            address=address,
        )


# -- plugins ---------------------------------------------------------------------------------------------------------


def plugin_runtime_env(plugins: Sequence[str]) -> dict[str, Any]:
    """The Ray runtime environment with which every process of a job can import `plugins`; empty if none is needed.

    Ray copies the file or folder of each top-level module to every node. Modules of installed distributions are not
    copied: an installed plugin has to be installed on all nodes.

    Raises:
        PluginError: A plugin cannot be imported here.
    """
    load_plugins(plugins)
    roots = dict.fromkeys(name.partition(".")[0] for name in plugins)
    paths = [path for root in roots for path in _locations(importlib.import_module(root)) if not _is_installed(path)]
    return {"py_modules": [str(path) for path in paths]} if paths else {}


def _locations(module: ModuleType) -> list[Path]:
    """The folders of a package, or the file of a module; none for a built-in module."""
    if folders := list(getattr(module, "__path__", [])):
        return [Path(folder).resolve() for folder in folders]
    file = getattr(module, "__file__", None)
    return [Path(file).resolve()] if file else []


def _is_installed(path: Path) -> bool:
    folders = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    return any(path.is_relative_to(folder) for folder in folders)
