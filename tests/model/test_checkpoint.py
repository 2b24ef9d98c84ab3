"""A checkpoint is loaded completely and with the meaning that it was saved with, or refused with the reason."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from cope_sweep.config import RunSpec
from cope_sweep.errors import JsonValue
from cope_sweep.families import GPT2
from cope_sweep.model import Transformer, load_model, save_model
from cope_sweep.model.checkpoint import read_tensors
from cope_sweep.optim import AdamW, Constant
from cope_sweep.positions import CoPE
from cope_sweep.registry import Kind
from tests.helpers.errors import raises


def run_spec(**model: Any) -> RunSpec:
    task = {"kind": "selective_copy", "tokens": 2, "blanks": 2, "dense_blanks": 1, "sparse_blanks": 3}
    model = {"dim": 8, "heads": 2, "layers": 2, "position": ["cope"]} | model
    return RunSpec.model_validate_json(json.dumps({"task": task, "model": model}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spec = run_spec()
    save_model(tmp_path, Transformer(spec), spec)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def config_of(**model: Any) -> dict[str, Any]:
    """The config of a checkpoint of another run."""
    spec = run_spec(**model)
    return {"run_id": spec.run_id, "run": spec.model_dump(mode="json")}


def test_the_files_can_be_used_by_the_same_users(folder: Path):
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder / "config.json").stat().st_mode}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("position", [[], ["cope"], ["absolute", "rope"]])
def test_round_trip(tmp_path: Path, tied: bool, position: list[str]) -> None:
    spec = run_spec(tied=tied, position=position)
    model = Transformer(spec)
    save_model(tmp_path, model, spec)
    loaded, loaded_spec = load_model(tmp_path)
    assert (loaded_spec, loaded.training) == (spec, False)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert (loaded.head.weight is loaded.embedding.weight) == tied


@pytest.mark.parametrize(
    ("fields", "reading"), [({"reading": "guessed"}, "guessed"), ({"slow": "none"}, "text")], ids=["DaRoPE", "HoPE"]
)
def test_a_checkpoint_that_is_older_than_a_field_has_what_it_meant_then(
    tmp_path: Path, fields: dict[str, Any], reading: str
) -> None:
    """As the code wrote it before DaRoPE had readings."""
    spec = run_spec(position=[{"kind": "darope", "length": 12, **fields}])
    save_model(tmp_path, Transformer(spec), spec)
    run = json.loads((tmp_path / "config.json").read_text())["run"]
    for name in ("reading", "alpha", "std"):
        del run["model"]["position"][0][name]
    edit_config(tmp_path, run=run)
    _, loaded = load_model(tmp_path)
    assert loaded == spec
    assert loaded.model.position[0].model_dump()["reading"] == reading


def test_half_precision_weights_are_widened(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)
    model, _ = load_model(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_loaded_model_does_not_need_its_file(folder: Path) -> None:
    model, _ = load_model(folder)
    (folder / "model.safetensors").open("r+b").truncate(0)
    assert torch.isfinite(model(torch.zeros(1, 4, dtype=torch.long))).all()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with raises("no_such_file", file=str(folder / name)):
        load_model(folder)


def test_tensors_are_read_from_a_regular_file_only(tmp_path: Path) -> None:
    (tmp_path / "resume.safetensors").symlink_to("/dev/zero")
    with raises("not_a_file", file=str(tmp_path / "resume.safetensors")):
        read_tensors(tmp_path / "resume.safetensors", "cpu")


def test_a_truncated_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with raises("damaged_checkpoint", file=str(path)):
            load_model(folder)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"not safetensors at all", "damaged_checkpoint"),
        (struct.pack("<Q", 2**62) + b"{}", "damaged_checkpoint"),
        (struct.pack("<Q", 2) + b"{}", "does_not_fit"),
        (b"\x80\x04pickle", "damaged_checkpoint"),
    ],
)
def test_a_file_that_is_no_model_is_refused(folder: Path, content: bytes, code: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with raises(code, file=str(folder / "model.safetensors")):
        load_model(folder)


@pytest.mark.parametrize(
    ("content", "code", "data"),
    [
        ("", "invalid_json", {}),
        ("{", "invalid_json", {}),
        ("[" * 100_000, "invalid_json", {}),
        ("[]", "invalid_json", {}),
        ("{}", "another_format", {"format": None, "expected": 1}),
        ('{"format": 2}', "another_format", {"format": 2, "expected": 1}),
        ('{"format": 1}', "invalid_config", {}),
        ("\xff", "invalid_json", {}),
    ],
)
def test_an_invalid_config_is_refused(folder: Path, content: str, code: str, data: dict[str, JsonValue]) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with raises(code, file=str(folder / "config.json"), **data):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "code", "name", "data"),
    [
        ({"extra": 1}, "invalid_config", "config.json", {"keys": ["extra"]}),
        (
            {"run": config_of()["run"] | {"model": {"dim": 8, "heads": 3}}},
            "invalid_config",
            "config.json",
            {"keys": ["run.model"]},
        ),
        ({"run": config_of(dim=16)["run"]}, "another_run", "config.json", {}),
        (config_of(hard_attention=True), "another_run", "model.safetensors", {}),
    ],
    ids=["unknown key", "impossible run", "edited run", "files of two runs"],
)
def test_an_edited_config_is_refused(
    folder: Path, changes: dict[str, Any], code: str, name: str, data: dict[str, JsonValue]
) -> None:
    edit_config(folder, **changes)
    with raises(code, file=str(folder / name), **data):
        load_model(folder)


@pytest.mark.parametrize(
    ("part", "name"),
    [(CoPE, "cope"), (GPT2, "family.gpt2"), (AdamW, "optimizer.adamw"), (Constant, "schedule.constant")],
)
def test_another_version_is_refused_and_named(folder: Path, part: type[Kind], name: str) -> None:
    """Also where one side does not list it: the config does not list version 1 of the last three."""
    with mock.patch.object(part, "VERSION", 2):
        with raises("another_version", kind=name, trained=1, here=2):
            load_model(folder)
        spec = run_spec()
        save_model(folder, Transformer(spec), spec)
        load_model(folder)
    with raises("another_version", kind=name, trained=2, here=1):
        load_model(folder)


@pytest.mark.parametrize(
    "model",
    [
        {"dim": 16},
        {"layers": 3},
        {"layers": 1},
        {"tied": False},
        {"position": []},
        {"position": ["absolute"]},
        {"dim": 1 << 20},
        {"layers": 10_000},
        {"dim": 10**9, "heads": 1},
        {"position": [{"kind": "cope", "p_max": 10**9}]},
        {"ffn_dim": 10**9},
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_any_memory_is_taken(folder: Path, model: dict[str, Any]) -> None:
    spec = run_spec(**model)
    versions = {"selective_copy": 1} | {encoding.kind: 1 for encoding in spec.model.position}
    edit_config(folder, run_id=spec.run_id, run=spec.model_dump(mode="json"), versions=versions)
    path = folder / "model.safetensors"
    save_file(load_file(path), path)  # without its metadata, whose run id would be refused first
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with raises("does_not_fit", file=str(path)):
        load_model(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 50 << 10
