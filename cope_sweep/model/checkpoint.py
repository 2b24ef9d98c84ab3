"""The checkpoint of a finished model: a folder with `model.safetensors` and `config.json`. Loading executes no code.

    config.json   {"format": 1, "run_id": …, "versions": {"selective_copy": 1, "cope": 1}, "run": {the resolved run}}

A checkpoint is loaded only if this code computes the same from its run as the code that trained it: format, versions
and run id are compared before any tensor is read, and shapes before any tensor is allocated.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cope_sweep.config import RunSpec
from cope_sweep.config.explain import explain
from cope_sweep.config.source import dotted
from cope_sweep.errors import CheckpointError
from cope_sweep.frozen import Frozen
from cope_sweep.model.transformer import Transformer
from cope_sweep.positions import ENCODINGS

FORMAT = 1
MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"

Shape = tuple[int, ...]


class _Config(Frozen):
    format: int
    run_id: str
    versions: dict[str, int]
    run: RunSpec


def save_model(folder: Path, model: Transformer, spec: RunSpec) -> None:
    """Write `model.safetensors` and `config.json` into `folder`."""
    save_file(distinct(model.state_dict()), folder / MODEL_FILE, metadata={"run_id": spec.run_id})
    (folder / CONFIG_FILE).write_text(_config_of(spec).model_dump_json(indent=1) + "\n")
    shutil.copymode(folder / CONFIG_FILE, folder / MODEL_FILE)  # safetensors lets only the owner read it


def config_of(spec: RunSpec) -> dict[str, Any]:
    """The content of the `config.json` of a run's checkpoint, which `run_of` reads."""
    return _config_of(spec).model_dump(mode="json")


def _config_of(spec: RunSpec) -> _Config:
    return _Config(format=FORMAT, run_id=spec.run_id, versions=spec.versions, run=spec)


def load_model(folder: Path, device: str = "cpu") -> tuple[Transformer, RunSpec]:
    """The model of a checkpoint folder, in evaluation mode, and its run.

    Raises CheckpointError where a file is missing, is truncated or does not fit the other file, and where this version
    of the code computes something else from the run.
    """
    spec = load_run(folder)
    path = folder / MODEL_FILE
    shapes, run_id = _header(path)
    if run_id is not None and run_id != spec.run_id:
        raise CheckpointError(
            f"{path} belongs to run {run_id}, but its {CONFIG_FILE} to run {spec.run_id}",
            code="another_run",
            file=str(path),
            run_id=run_id,
            expected=spec.run_id,
        )
    model = _meta_model(spec, path, shapes)
    tensors = read_tensors(path, device)
    for name, parameter in model.named_parameters():
        # `assign` takes tensors as they are, and a file may have them in another type.
        tensors[name] = tensors[name].to(parameter.dtype)
    if spec.model.tied:
        tensors["head.weight"] = tensors["embedding.weight"]
    model.load_state_dict(tensors, assign=True)
    if spec.model.tied:
        # `assign` has replaced both by parameters of their own.
        model.head.weight = model.embedding.weight
    return model.eval().requires_grad_(False), spec


def load_run(folder: Path) -> RunSpec:
    """The run of a checkpoint folder. Raises CheckpointError, as `load_model`."""
    path = folder / CONFIG_FILE
    return run_of(_read_json(path), path)


def run_of(data: Any, path: Path) -> RunSpec:
    """The run of the content of a `config.json`; `path` is named in errors. Raises CheckpointError, as `load_model`."""
    config = _validated(data, path)
    spec = config.run
    current = spec.versions
    for kind in sorted(config.versions.keys() | current.keys()):
        # Versions of families, optimisers and schedules are listed only where they are not 1.
        trained, version_here = config.versions.get(kind, 1), current.get(kind, 1)
        if trained != version_here:
            raise CheckpointError(
                f"{path}: trained with version {trained} of {kind!r}, but this code has version {version_here}, "
                "which computes something else; train the run again, or use the code that trained it",
                code="another_version",
                file=str(path),
                kind=kind,
                trained=trained,
                here=version_here,
            )
    if config.versions != current or config.run_id != spec.run_id:
        raise CheckpointError(
            f"{path}: names run {config.run_id}, but its content is run {spec.run_id}; "
            "the file was edited, or a default has changed since it was written",
            code="another_run",
            file=str(path),
            run_id=config.run_id,
            expected=spec.run_id,
        )
    return spec


def read_tensors(path: Path, device: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, not mapped to the file. Raises CheckpointError."""
    _check_regular(path)
    try:
        # Not mmap: truncating a mapped file kills the process.
        return load_file(path, device=device, backend="pread")
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` without the second name of a tied weight, because safetensors refuses shared memory."""
    # Reversed, so that a weight with two names keeps the first.
    first = {value.data_ptr(): name for name, value in reversed(state.items())}
    return {name: value for name, value in state.items() if first[value.data_ptr()] == name}


def _check_regular(path: Path) -> None:
    """Raise CheckpointError for a pipe or a device: opening one may block forever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file", code="not_a_file", file=str(path))


def _read_json(path: Path) -> Any:
    _check_regular(path)
    try:
        with path.open("rb") as file:
            # A larger file is none of ours. Cut here, it is not valid JSON.
            data: Any = json.loads(file.read(1 << 20))
    except OSError as error:
        code = "no_such_file" if isinstance(error, FileNotFoundError) else "unreadable_file"
        message = f"{path}: {(error.strerror or str(error)).lower()}"
        raise CheckpointError(message, code=code, file=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})", code="invalid_json", file=str(path)) from error
    return data


def _validated(data: Any, path: Path) -> _Config:
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{path}: not the config of a checkpoint: expected a mapping", code="invalid_json", file=str(path)
        )
    if data.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {data.get('format')!r}; this version reads format {FORMAT}",
            code="another_format",
            file=str(path),
            format=data.get("format"),
            expected=FORMAT,
        )
    try:
        # From JSON, whose arrays strict validation takes for tuples.
        return _Config.model_validate_json(json.dumps(_with_earlier_fields(data)))
    except ValidationError as error:
        problems = [explain(item, _Config) for item in error.errors(include_url=False)]
        raise CheckpointError(
            "; ".join(f"{path}: {dotted(problem.path)}: {problem.message}" for problem in problems),
            code="invalid_config",
            file=str(path),
            keys=[dotted(problem.path) for problem in problems],
        ) from error


def _with_earlier_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The config, in which encodings without a field that is younger than the checkpoint have what they meant then."""
    match data:
        case {"run": {"model": {"position": list(encodings)}}}:
            run, model = data["run"], data["run"]["model"]
            position = [_with_fields_of_then(encoding) for encoding in encodings]
            return data | {"run": run | {"model": model | {"position": position}}}
    return data


def _with_fields_of_then(encoding: Any) -> Any:
    match encoding:
        case {"kind": str(kind)} if kind in ENCODINGS:
            cls = ENCODINGS[kind]
            missing = {name: field for name, field in cls.model_fields.items() if name not in encoding}
            then = {name: cls.default_before(name, encoding) for name in missing}
            return encoding | {name: value for name, value in then.items() if value != missing[name].default}
    return encoding


def _header(path: Path) -> tuple[dict[str, Shape], str | None]:
    """The shapes of the tensors and the run id, without reading a tensor. Raises CheckpointError."""
    _check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            # safe_open has `keys`, and cannot be iterated itself.
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            return shapes, (file.metadata() or {}).get("run_id")
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _meta_model(spec: RunSpec, path: Path, shapes: dict[str, Shape]) -> Transformer:
    """The run's model on the meta device. Raises CheckpointError where the file's shapes do not fit it."""
    if spec.model.layers > len(shapes):
        # Building a layer takes time even without memory, so check the number of layers first.
        raise _does_not_fit(path, [f"expected {spec.model.layers} layers, found {len(shapes)} tensors"])
    try:
        with torch.device("meta"):
            model = Transformer(spec)
    # No tensor can have such sizes, even without memory.
    except RuntimeError as error:
        raise _does_not_fit(path, [" ".join(str(error).split())]) from error
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    problems = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}" if name in shapes else f"{name} is missing"
        for name, shape in expected.items()
        if shapes.get(name) != shape
    ]
    problems += [f"{name} is not expected" for name in shapes.keys() - expected.keys()]
    if problems:
        raise _does_not_fit(path, problems)
    return model


def _does_not_fit(path: Path, problems: list[str]) -> CheckpointError:
    shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
    return CheckpointError(
        f"{path}: does not fit its {CONFIG_FILE}: {shown}", code="does_not_fit", file=str(path), problems=problems
    )


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: not a complete safetensors file ({error}); was it cut short?", file=str(path))


def _missing(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: no such file", code="no_such_file", file=str(path))
