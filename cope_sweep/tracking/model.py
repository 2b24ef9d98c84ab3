"""How MLflow describes a checkpoint, so that it can load it.

Beside the files of a checkpoint is `MLmodel`, its description, with two flavours. With `python_function`,
`mlflow.pyfunc.load_model("models:/<model id>")` loads it on any machine where cope_sweep is installed: it scores token
ids, see `Predictor.log_probabilities`. `cope_sweep` names the files. Nothing is pickled: the weights are safetensors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from mlflow.entities import LoggedModel
from mlflow.models import Model, ModelSignature
from mlflow.types import Schema, TensorSpec

LOADER = "cope_sweep.inference"
"""The module whose `_load_pyfunc` MLflow calls."""
PREDICT = "log_probabilities"


@contextlib.contextmanager
def described(logged: LoggedModel, checkpoint: Path) -> Iterator[Path]:
    """A folder, while the block runs, with a checkpoint's files and those that MLflow expects beside them.

    Its files are links, which MLflow follows when it copies or sends them.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in checkpoint.rglob("*"):
            if path.is_file():
                link = folder / path.relative_to(checkpoint)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.absolute())
        (folder / "MLmodel").write_text(_description(logged, checkpoint))
        (folder / "requirements.txt").write_text(f"cope-sweep=={_version()}\n")
        yield folder


def _description(logged: LoggedModel, checkpoint: Path) -> str:
    """The content of `MLmodel`. Equal models give equal files."""
    version = _version()
    files = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    created = datetime.fromtimestamp(logged.creation_timestamp / 1000, UTC).replace(tzinfo=None)
    model = Model(
        artifact_path=logged.artifact_location,
        run_id=logged.source_run_id,
        model_id=logged.model_id,
        model_uuid=logged.model_id,
        utc_time_created=str(created),
        model_size_bytes=sum((checkpoint / name).stat().st_size for name in files),
        signature=_signature(),
    )
    model.add_flavor(
        "python_function", loader_module=LOADER, predict_fn=PREDICT, python_version=platform.python_version()
    )
    model.add_flavor("cope_sweep", version=version, files=files)
    return str(model.to_yaml())


@functools.cache
def _version() -> str:
    return importlib.metadata.version("cope-sweep")


@functools.cache
def _signature() -> ModelSignature:
    """Token ids in, log-probabilities out."""
    return ModelSignature(
        inputs=Schema([TensorSpec(np.dtype("int64"), (-1, -1))]),
        outputs=Schema([TensorSpec(np.dtype("float64"), (-1, -1))]),
    )
