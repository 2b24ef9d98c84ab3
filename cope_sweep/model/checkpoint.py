"""A finished model in a folder: `model.safetensors` and `config.json`. Nothing that is loaded can run code.

    config.json   {"format": 1, "run_id": …, "versions": {"selective_copy": 1, "cope": 1}, "run": {the resolved run}}

A checkpoint is used only where today's code means by its run what the code that trained it meant: format, versions and
run id are compared before any tensor is read, and every shape before any is allocated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cope_sweep.errors import UserError
from cope_sweep.frozen import Frozen
from cope_sweep.model.transformer import Transformer
from cope_sweep.spec import RunSpec
from cope_sweep.spec.explain import explain
from cope_sweep.spec.source import dotted

FORMAT = 1
MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 1 << 20

Shape = tuple[int, ...]


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message names the file, and why."""


class _Config(Frozen):
    """The content of `config.json`."""

    format: int
    run_id: str
    versions: dict[str, int]
    run: RunSpec


def save_model(folder: Path, model: Transformer, spec: RunSpec) -> None:
    """Write `model.safetensors` and `config.json` into `folder`."""
    save_file(distinct(model.state_dict()), folder / MODEL_FILE, metadata={"run_id": spec.run_id})
    (folder / MODEL_FILE).chmod(0o644)  # safetensors makes it for its writer alone, and services may be someone else
    config = _Config(format=FORMAT, run_id=spec.run_id, versions=spec.versions, run=spec)
    (folder / CONFIG_FILE).write_text(config.model_dump_json(indent=1) + "\n")


def load_model(folder: Path, device: str = "cpu") -> tuple[Transformer, RunSpec]:
    """The model of a checkpoint folder, in evaluation mode, and its run.

    Raises CheckpointError where a file is missing, cut short or does not fit the other, and where this version of the
    code would compute something else from it.
    """
    spec = load_run(folder)
    path = folder / MODEL_FILE
    shapes, run_id = _header(path)
    if run_id is not None and run_id != spec.run_id:
        raise CheckpointError(f"{path}: of run {run_id}, but its {CONFIG_FILE} is of run {spec.run_id}")
    model = _skeleton(spec, path, shapes)
    tensors = read_tensors(path, device)
    for name, parameter in model.named_parameters():
        tensors[name] = tensors[name].to(parameter.dtype)
    if spec.model.tied:
        tensors["head.weight"] = tensors["embedding.weight"]
    model.load_state_dict(tensors, assign=True)
    if spec.model.tied:
        model.head.weight = model.embedding.weight
    return model.eval().requires_grad_(False), spec


def load_run(folder: Path) -> RunSpec:
    """The run that a checkpoint folder says it is of. Raises CheckpointError, as `load_model`."""
    path = folder / CONFIG_FILE
    config = _read_config(path)
    spec = config.run
    now = spec.versions
    for kind, version in config.versions.items():
        if kind in now and now[kind] != version:
            raise CheckpointError(
                f"{path}: trained with version {version} of {kind!r}, and this code has version {now[kind]}, "
                "which means another computation; train the run again, or use the code that trained it"
            )
    if config.versions != now or config.run_id != spec.run_id:
        raise CheckpointError(
            f"{path}: says run {config.run_id}, but its content is run {spec.run_id}; "
            "it was edited, or a default has changed since it was trained"
        )
    return spec


def read_tensors(path: Path, device: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory of their own. Raises CheckpointError."""
    try:
        # pread, not mmap: a file that is cut short while a mapping of it lives kills the process.
        return load_file(path, device=device, backend="pread")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise _not_whole(path, error) from error


def distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` without the second name of a tied weight, which safetensors refuses."""
    first = {value.data_ptr(): name for name, value in reversed(state.items())}
    return {name: value for name, value in state.items() if first[value.data_ptr()] == name}


def _read_config(path: Path) -> _Config:
    try:
        with path.open("rb") as file:
            data: Any = json.loads(file.read(MAX_CONFIG_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: not the config of a checkpoint; expected a mapping")
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {data.get('format')!r}; this version reads format {FORMAT}")
    try:
        return _Config.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = [explain(item, _Config) for item in error.errors(include_url=False)]
        raise CheckpointError("; ".join(f"{path}: {dotted(at)}: {text}" for at, text in problems)) from error


def _header(path: Path) -> tuple[dict[str, Shape], str | None]:
    """Each tensor's shape, and the run id, without reading a tensor. Raises CheckpointError."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            return shapes, (file.metadata() or {}).get("run_id")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise _not_whole(path, error) from error


def _skeleton(spec: RunSpec, path: Path, shapes: dict[str, Shape]) -> Transformer:
    """The run's model without memory, once all shapes are known to fit. Raises CheckpointError where they do not."""
    if spec.model.layers > len(shapes):
        # Building a layer takes time even without memory, so absurd counts stop here.
        raise _misfit(path, [f"{spec.model.layers} layers are expected of {len(shapes)} tensors"])
    try:
        with torch.device("meta"):
            model = Transformer(spec)
    except RuntimeError as error:
        raise _misfit(path, [" ".join(str(error).split())]) from error
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    problems = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}" if name in shapes else f"{name} is missing"
        for name, shape in wanted.items()
        if shapes.get(name) != shape
    ]
    problems += [f"{name} is not expected" for name in shapes.keys() - wanted.keys()]
    if problems:
        raise _misfit(path, problems)
    return model


def _misfit(path: Path, problems: list[str]) -> CheckpointError:
    shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
    return CheckpointError(f"{path}: does not fit its {CONFIG_FILE}: {shown}")


def _not_whole(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: not a whole safetensors file ({error}); was it cut short?")
