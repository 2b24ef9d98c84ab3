"""A Ray cluster to work on: a running one, or one of our own on this machine; and how much of a sweep it holds.

Ray says a lot on a terminal. Here it says it to a file; the terminal is the sweep's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray

from cope_sweep.spec import Resources
from cope_sweep.sweep.executor import ClusterError

CONNECT_S = 15.0
ANSWER_S = 3.0
"""For a port to accept a connection."""

# What Ray reads from the environment, here and in its processes; what the user set stays.
SETTINGS = {
    # How often a group's controller looks at its workers: the time to notice a death, and to end a sweep.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A process for each group that watches for nodes being taken away. We resume from our own checkpoints anyway.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Relative paths mean what they mean in the shell that started the sweep.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # Tune's own CSV, JSON and TensorBoard files, and its snapshots, which nothing reads: our ledger is the truth.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",
    # Its newer output prints even at verbosity 0.
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Were the cluster gone, Tune would start another one.
    "TUNE_DISABLE_AUTO_INIT": "1",
    # A cluster of our own trains at the priority of this process, as `--local` does, not at niceness 15.
    "RAY_worker_niceness": "0",
    # Failures reach the user as ours, not as Ray's.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray announces a change of its default for processes without a GPU; choose the new one, and hear no more of it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

TOKEN = secrets.token_hex(32)
"""Of a cluster that this process starts for itself. One for the process: Ray remembers the first that it sees."""

T = TypeVar("T")


@dataclass(frozen=True)
class Capacity:
    """What of a sweep a cluster holds at once."""

    groups: int
    gpus: float
    """For each worker."""


@contextlib.contextmanager
def connected(address: str | None, log: Path, cpus: int | None = None) -> Iterator[None]:
    """Connected to Ray for as long as the block runs; what Ray logs goes to the file `log`.

    `address`: "auto", "host:port", or None for RAY_ADDRESS, and without that a cluster of our own on this machine, of
    `cpus` CPUs (None: the ones that this process may use), which ends with the block. A process that is connected
    already stays so. Raises ClusterError where there is no such cluster, or it does not let us in.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with contextlib.ExitStack() as stack:
        divert_log = stack.enter_context(_logging_to(log))
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        own = not ray.is_initialized() and address == "local"
        if own:
            stack.enter_context(_own_token())
        if not ray.is_initialized():
            stack.callback(ray.shutdown)
            _start(cpus or usable_cpus()) if own else _connect(address)
            divert_log()
        yield


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, and its container's share."""
    usable = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota_us != "max":
            usable = min(usable, max(1, int(quota_us) // int(period_us)))
    return usable


def capacity(resources: Resources) -> Capacity:
    """How many groups the cluster holds, or the number that `resources` ask for, whatever it holds now.

    Raises ClusterError where `groups` is "auto" and no node holds a worker.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    gpus = resources.gpus
    if gpus == "auto":
        gpus = 1.0 if resources.device != "cpu" and any(node.get("GPU", 0) >= 1 for node in nodes) else 0.0
    if resources.groups != "auto":
        return Capacity(resources.groups, gpus)
    workers = sum(_workers_on(node, resources.cpus, gpus) for node in nodes)
    if workers < resources.workers:
        wanted = f"{resources.cpus} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        total = sum(node.get("CPU", 0) for node in nodes), sum(node.get("GPU", 0) for node in nodes)
        raise ClusterError(
            f"the cluster ({len(nodes)} nodes, {total[0]:g} CPUs, {total[1]:g} GPUs) has no room for a group of "
            f"{resources.workers} workers with {wanted} each: lower resources.cpus, .gpus or .workers, or set "
            "resources.groups to wait for nodes that an autoscaler adds"
        )
    return Capacity(workers // resources.workers, gpus)


def _workers_on(node: dict[str, float], cpus: int, gpus: float) -> int:
    fits = node.get("CPU", 0) / cpus
    if gpus:
        fits = min(fits, node.get("GPU", 0) / gpus)
    return int(fits + 1e-9)


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[Callable[[], None]]:
    """What Ray logs in this process goes to `path`. Yields what has to be called after `ray.init`, which removes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # `ray.init` removes the handlers of "ray", and then logs under "ray._private".
    loggers = [logging.getLogger("ray"), logging.getLogger("ray._private")]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]

    def divert() -> None:
        for logger in loggers:
            logger.handlers, logger.propagate = [handler], False

    divert()
    printed = _divert_prints(lambda text: loggers[0].warning("%s", text))
    try:
        yield divert
    finally:
        printed()
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
        handler.close()


def _divert_prints(log: Callable[[str], None]) -> Callable[[], None]:
    """Send the cluster's messages ("8 PYTHON worker processes have been started …") to `log`. Returns what undoes it.

    A thread of Ray's prints them, whatever `log_to_driver` says, and would tear the live table.
    """
    module = ray._private.worker
    before = module.print_to_stdstream
    module.print_to_stdstream = lambda data, *args, **kwargs: log("\n".join(map(str, data.get("lines", ()))))

    def undo() -> None:
        module.print_to_stdstream = before

    return undo


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Token authentication for a cluster of our own, with a token that no file holds.

    `ray.init()` alone would turn authentication on and write ~/.ray/auth_token, which changes what a later `ray start`
    and `ray job submit` of this user do. Whatever the user chose, by RAY_AUTH_MODE or by having that file, stays.
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


def _start(cpus: int) -> None:
    # In this thread, for as long as it lives: Linux ends Ray's processes with the thread that started them.
    try:
        with _signals_kept():
            # The dashboard stays: Ray Train cleans its placement groups up through it.
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=True,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
            )
    except Exception as error:
        raise ClusterError(f"Ray cannot start here: {first_line(error)}; --local works without Ray") from error


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """`ray.init` takes SIGTERM for itself; it is our caller's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _connect(address: str) -> None:
    if "://" in address:
        raise ClusterError(
            f"{address} is not the address of a Ray cluster, as `auto` or HOST:6379 is; to run on a cluster from "
            "outside of it, `cope-sweep submit --address http://HOST:8265`"
        )
    if address != "auto":
        _answers(address)
    try:
        _within(CONNECT_S, lambda: ray.init(address=address, log_to_driver=False, configure_logging=False))
    except TimeoutError:
        raise ClusterError(
            f"the Ray cluster at {address} did not let us in within {CONNECT_S:.0f} s: this machine has to be one of "
            "its nodes (`ray start --address=…`); from outside, use `cope-sweep submit`"
        ) from None
    except Exception as error:
        text = first_line(error)
        if "auth" in str(error).lower() or "token" in str(error).lower():
            way_out = "export RAY_AUTH_MODE=token, and the cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
        elif address == "auto":
            way_out = "start one (`ray start --head`), or leave --address out to have one started for the sweep"
        else:
            way_out = "see `ray status` on its head node; from outside of the cluster, use `cope-sweep submit`"
        raise ClusterError(f"cannot connect to the Ray cluster at {address}: {text}; {way_out}") from error


def _answers(address: str) -> None:
    """Raises ClusterError where nothing listens at `address`. Ray would try for long, and then end the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(f"{address!r} is not the address of a Ray cluster: `auto`, or HOST:PORT as in 10.0.0.1:6379")
    if (error := listens(host.strip("[]"), int(port))) is not None:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error}): start one (`ray start --head`), or leave --address out "
            "to have one started for the sweep"
        )


def listens(host: str, port: int) -> OSError | None:
    """Why nothing can be reached there, or None."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        return error
    return None


def _within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, made in a thread: so it can be waited for no longer than that, and leaves signals alone.

    Raises TimeoutError, and what `call` raises.
    """
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ray-init", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
