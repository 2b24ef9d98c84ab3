"""How MLflow describes a checkpoint, so that it can load it.

Beside the files of a checkpoint is `MLmodel`, its description, with two flavours. With `python_function`,
`mlflow.pyfunc.load_model("models:/<model id>")` loads it on any machine where cope_sweep is installed: it scores token
ids, see `Predictor.log_probabilities`. `cope_sweep` names the files. Nothing is pickled: the weights are safetensors.
"""

from __future__ import annotations

import importlib.metadata
import platform
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from mlflow.entities import LoggedModel
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

LOADER = "cope_sweep.inference"
"""The module whose `_load_pyfunc` MLflow calls."""
PREDICT = "log_probabilities"


def write_description(folder: Path, model: LoggedModel, checkpoint: Path) -> None:
    """Write the files that MLflow expects beside those of a checkpoint. Equal models have equal files."""
    version = importlib.metadata.version("cope-sweep")
    files = {str(path.relative_to(checkpoint)): path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
    created = datetime.fromtimestamp(model.creation_timestamp / 1000, UTC).replace(tzinfo=None)
    described = Model(
        artifact_path=model.artifact_location,
        run_id=model.source_run_id,
        model_id=model.model_id,
        model_uuid=model.model_id,
        utc_time_created=str(created),
        model_size_bytes=sum(files.values()),
        # Token ids in, log-probabilities out.
        signature=ModelSignature(
            inputs=Schema([TensorSpec(np.dtype("int64"), (-1, -1))]),
            outputs=Schema([TensorSpec(np.dtype("float64"), (-1, -1))]),
        ),
    )
    described.add_flavor(
        "python_function", loader_module=LOADER, predict_fn=PREDICT, python_version=platform.python_version()
    )
    described.add_flavor("cope_sweep", version=version, files=sorted(files))
    (folder / "MLmodel").write_text(str(described.to_yaml()))
    (folder / "requirements.txt").write_text(f"cope-sweep=={version}\n")
