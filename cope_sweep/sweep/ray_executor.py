"""The executor on Ray: connects to a cluster, or starts one, and executes a sweep there (`ray_sweep`)."""

from __future__ import annotations

import importlib
import tempfile
import threading

from cope_sweep.store.tokens import token
from cope_sweep.sweep.cluster import connected, plugin_runtime_env
from cope_sweep.sweep.driver import Driver
from cope_sweep.sweep.executor import Workload


def run_on_ray(work: Workload, *, address: str | None = None) -> None:
    """An `Executor` on a Ray cluster. The store has to be in a folder that all nodes share, or an object store.

    Files of plugins are copied to the nodes.

    Args:
        work: What is to be trained.
        address: "auto", "host:port", or None for RAY_ADDRESS; without that, a new cluster on this machine.
    """
    driver = Driver(work)
    # Where the index does not answer now, a search may suggest a row later.
    if not driver.runs and not driver.suggest() and (driver.is_draining or not driver.may_suggest):
        driver.flush_events()
        return
    # Importing Tune takes as long as starting Ray, so both happen at once.
    prefetch = threading.Thread(target=importlib.import_module, args=["cope_sweep.sweep.ray_sweep"], daemon=True)
    prefetch.start()
    logs = work.store.root / "logs" / work.sweep_id
    cluster = connected(address, logs / "ray.log", runtime_env=plugin_runtime_env(work.plugins))
    own_files = tempfile.TemporaryDirectory(prefix="cope-sweep-", ignore_cleanup_errors=True)  # Tune's
    with own_files as scratch, token(work.store, work.sweep_id) as name, cluster as is_own:
        prefetch.join()
        from cope_sweep.sweep.ray_sweep import RaySweep

        RaySweep(driver, scratch, may_grow=not is_own).execute(name, logs)
    for path in logs.glob("*.log"):  # each process that trains opens one, and most write nothing
        if not path.stat().st_size:
            path.unlink()
