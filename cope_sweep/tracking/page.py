"""The pages of runs and ablations in MLflow, for links. Nothing here imports mlflow.

Small requests find the experiment by its name, and the run by its tag.
"""

from __future__ import annotations

import os
import threading
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cachetools import TTLCache, cached

from cope_sweep.proxies import bypass_proxies_here
from cope_sweep.store import Store
from cope_sweep.tracking.uri import RUN_ID_TAG, resolve_uri

TIMEOUT_S = 1.0
"""Time limit of each request. A view of the page waits for two of them, so a silent server must not hold it up."""
OF_TRAINING = "?workflowType=machine_learning"
"""MLflow's pages otherwise begin with traces of agents, and list no runs, until the user chooses "Model training"."""
KEPT_S = 60.0
"""The time for which an answer is used again, also that the server does not answer: then no page waits for it."""


def mlflow_run_page(store: Store, run_id: str) -> str | None:
    """The URL of a run's page in MLflow; None if runs are sent to no server, or it does not have the run or answer."""
    record = store.index.records([run_id], values=False).get(run_id)
    sweep = store.index.sweep(record.sweep_id) if record and record.sweep_id else None
    uri = resolve_uri(store)
    experiment = _experiment_id(uri, sweep.ablation) if sweep else None
    found = _run_id(uri, experiment, run_id) if experiment else None
    return f"{_shown(uri)}/#/experiments/{experiment}/runs/{found}{OF_TRAINING}" if found else None


def mlflow_experiment_page(store: Store, ablation: str) -> str | None:
    """The URL of the runs of an ablation's experiment in MLflow; None as for `mlflow_run_page`."""
    uri = resolve_uri(store)
    found = _experiment_id(uri, ablation)
    return f"{_shown(uri)}/#/experiments/{found}/runs{OF_TRAINING}" if found else None


@cached(TTLCache(4096, KEPT_S), lock=threading.Lock())
def _experiment_id(uri: str, name: str) -> str | None:
    if not uri.startswith(("http://", "https://")):
        return None
    answer = _answer(uri, "GET", "experiments/get-by-name", params={"experiment_name": name})
    return str(answer["experiment"]["experiment_id"]) if "experiment" in answer else None


@cached(TTLCache(4096, KEPT_S), lock=threading.Lock())
def _run_id(uri: str, experiment_id: str, run_id: str) -> str | None:
    query = {"experiment_ids": [experiment_id], "filter": f"tags.`{RUN_ID_TAG}` = '{run_id}'", "max_results": 1}
    answer = _answer(uri, "POST", "runs/search", json=query)
    return next((str(run["info"]["run_id"]) for run in answer.get("runs", [])), None)


def _answer(uri: str, method: str, path: str, **content: Any) -> dict[str, Any]:
    """The answer of an MLflow server; {} if it has nothing, does not answer, is another service, or has no valid URL.

    Credentials come from the URL, or from MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and _PASSWORD.
    """
    import httpx  # commands that show no page need not wait for its import

    if "MLFLOW_TRACKING_USERNAME" in os.environ:
        content["auth"] = os.environ["MLFLOW_TRACKING_USERNAME"], os.environ.get("MLFLOW_TRACKING_PASSWORD", "")
    elif "MLFLOW_TRACKING_TOKEN" in os.environ:
        content["headers"] = {"Authorization": f"Bearer {os.environ['MLFLOW_TRACKING_TOKEN']}"}
    try:
        bypass_proxies_here(uri)
        response = httpx.request(method, f"{uri}/api/2.0/mlflow/{path}", timeout=TIMEOUT_S, **content)
        return dict(response.raise_for_status().json())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError):
        return {}


def _shown(uri: str) -> str:
    """The URL under which people reach a server, without credentials: $COPE_SWEEP_MLFLOW_PAGE, else its own."""
    parts = urlsplit(os.environ.get("COPE_SWEEP_MLFLOW_PAGE", "").rstrip("/") or uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
