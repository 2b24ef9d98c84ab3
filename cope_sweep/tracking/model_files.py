"""The description of a trained model for MLflow: the file `MLmodel`, which MLflow's page and functions read.

It has two flavours. With `python_function`, `mlflow.pyfunc.load_model("models:/<model id>")` loads the checkpoint on
any machine where cope_sweep is installed: it scores token ids, see `Predictor.log_probabilities`. `cope_sweep` names
the files of the checkpoint. Nothing is pickled: the weights are safetensors.

    model = mlflow.pyfunc.load_model("models:/m-…")
    model.predict(np.array([[3, 14, 7, 7]]))    # [array([nan, -2.1, -0.4, -0.2])], natural logarithms
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.models import ModelSignature

LOADER = "cope_sweep.inference"
"""The module whose `_load_pyfunc` MLflow calls."""
PREDICT = "log_probabilities"
DESCRIPTION, REQUIREMENTS = "MLmodel", "requirements.txt"


def describe(logged: LoggedModel, checkpoint: Path) -> dict[str, str]:
    """File → content, of the files that MLflow expects beside those of a checkpoint. Equal models give equal files."""
    from mlflow.models import Model

    version, signature = _version(), _signature()
    files = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    created = datetime.fromtimestamp(logged.creation_timestamp / 1000, UTC).replace(tzinfo=None)
    model = Model(
        artifact_path=logged.artifact_location,
        run_id=logged.source_run_id,
        model_id=logged.model_id,
        model_uuid=logged.model_id,
        utc_time_created=str(created),
        model_size_bytes=sum((checkpoint / name).stat().st_size for name in files),
        signature=signature,
    )
    model.add_flavor(
        "python_function", loader_module=LOADER, predict_fn=PREDICT, python_version=platform.python_version()
    )
    model.add_flavor("cope_sweep", version=version, files=files)
    return {DESCRIPTION: model.to_yaml(), REQUIREMENTS: f"cope-sweep=={version}\n"}


@functools.cache
def _version() -> str:
    return importlib.metadata.version("cope-sweep")


@functools.cache
def _signature() -> ModelSignature:
    """Token ids in, log-probabilities out."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    return ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("int64"), (-1, -1))]),
        outputs=Schema([TensorSpec(np.dtype("float64"), (-1, -1))]),
    )
