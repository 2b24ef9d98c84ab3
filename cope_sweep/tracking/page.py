"""The pages of runs and ablations in MLflow, for links. Nothing here imports mlflow.

Two small requests find the experiment by its name, and the run by its tag.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cachetools import TTLCache

from cope_sweep.proxies import bypass_proxies_here
from cope_sweep.store import Store
from cope_sweep.tracking.uri import RUN_ID_TAG, resolve_uri

TIMEOUT_S = 1.0
KEPT_S = 60.0
"""The time for which an answer is used again, also that the server does not answer: then no page waits for it."""

_lock = threading.Lock()
_pages: TTLCache[tuple[str, str, str | None], str | None] = TTLCache(4096, KEPT_S)
_away: TTLCache[str, bool] = TTLCache(16, KEPT_S)
"""Servers that did not answer."""


def mlflow_run_page(store: Store, run_id: str) -> str | None:
    """The URL of a run's page in MLflow; None if runs are sent to no server, or it does not have the run or answer."""
    record = store.index.records([run_id], values=False).get(run_id)
    sweep = store.index.sweep(record.sweep_id) if record and record.sweep_id else None
    return _page(store, sweep.ablation, run_id) if sweep else None


def mlflow_experiment_page(store: Store, ablation: str) -> str | None:
    """The URL of an ablation's experiment in MLflow; None as for `mlflow_run_page`."""
    return _page(store, ablation, None)


def _page(store: Store, ablation: str, run_id: str | None) -> str | None:
    """The URL of the page of an ablation's experiment, or of one run in it.

    Credentials come from the URL, or from MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and _PASSWORD.
    """
    import httpx  # commands that show no page need not wait for its import

    uri = resolve_uri(store)
    if not uri.startswith(("http://", "https://")):
        return None
    key = uri, ablation, run_id
    with _lock:
        if key in _pages or uri in _away:
            return _pages.get(key)
    try:
        place = _place(uri, ablation, run_id)
    except (httpx.HTTPError, ValueError, LookupError, TypeError):  # it is away, or no MLflow server
        with _lock:
            _away[uri] = True
        return None
    parts = urlsplit(uri)
    server = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    with _lock:
        page = _pages[key] = f"{server}/#/{place}" if place else None
    return page


def _place(uri: str, experiment: str, run_id: str | None) -> str | None:
    """The path of an experiment, or of a run in it, in MLflow's pages; None where there is none."""
    import httpx

    headers, auth = {}, None
    if "MLFLOW_TRACKING_USERNAME" in os.environ:
        auth = os.environ["MLFLOW_TRACKING_USERNAME"], os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
    elif "MLFLOW_TRACKING_TOKEN" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['MLFLOW_TRACKING_TOKEN']}"
    bypass_proxies_here(uri)
    with httpx.Client(base_url=f"{uri}/api/2.0/mlflow", timeout=TIMEOUT_S, headers=headers, auth=auth) as client:
        response = client.get("/experiments/get-by-name", params={"experiment_name": experiment})
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        experiment_id = response.raise_for_status().json()["experiment"]["experiment_id"]
        if run_id is None:
            return f"experiments/{experiment_id}"
        query: dict[str, Any] = {
            "experiment_ids": [experiment_id], "filter": f"tags.`{RUN_ID_TAG}` = '{run_id}'", "max_results": 1
        }  # fmt: skip
        runs = client.post("/runs/search", json=query).raise_for_status().json().get("runs", [])
    return next((f"runs/{run['info']['run_id']}" for run in runs), None)
