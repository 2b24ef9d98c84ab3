"""Every file of a run, damaged in every way: readers say so, other runs are answered, and the run is trained again."""

import shutil

import pytest

from cope_sweep.store import Store
from cope_sweep.store.rebuild import check, rebuild
from cope_sweep.train import Runtime, train_run
from tests.tiny import tiny_run
from tests.train.stores import stop_after, weights

RUN, OTHER = tiny_run(**{"train.steps": 12}), tiny_run(seed=1)
FILES = {
    "finished": ["spec.json", "state.json", "curve.jsonl", "result.json", "checkpoint/model.safetensors"],
    "interrupted": ["spec.json", "state.json", "curve.jsonl", "resume.safetensors"],
}


def _replace_by_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "garbled": lambda path: path.write_bytes(bytes(byte ^ 0x5A for byte in path.read_bytes())),
    "of another type": lambda path: path.write_text("[1, null]"),
    "of other keys": lambda path: path.write_text('{"status": 3, "attempt": "x", "spec": [], "metrics": {"a": "b"}}'),
    "missing": lambda path: path.unlink(),
    "a folder": _replace_by_folder,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store with a finished run, and the same run interrupted in another store."""
    stores = {name: Store(tmp_path_factory.mktemp(name), create=True) for name in FILES}
    for store in stores.values():
        train_run(OTHER, store, Runtime())
    train_run(RUN, stores["finished"], Runtime())
    train_run(RUN, stores["interrupted"], Runtime(), should_stop=stop_after(5))
    return stores


@pytest.mark.parametrize(
    ("kind", "name", "damage"),
    [(kind, name, damage) for kind, names in FILES.items() for name in names for damage in DAMAGES],
)
def test_damage(whole, tmp_path, kind, name, damage):
    shutil.copytree(whole[kind].root, tmp_path / "store")
    store = Store(tmp_path / "store")
    folder = store.run(RUN.run_id)
    DAMAGES[damage](folder.path / name)

    rebuild(store)
    statuses = store.index.statuses()
    assert statuses[OTHER.run_id] == "finished"
    index_name = "result.json" if kind == "finished" else "state.json"
    if name in ("spec.json", index_name) and damage != "missing":
        assert statuses[RUN.run_id] == "damaged"
        assert name in store.index.records([RUN.run_id])[RUN.run_id].message
    problems = [each.item for each in check(store, checksums=True)]
    assert OTHER.run_id not in problems
    unnoticed = damage == "missing" and name != "spec.json"
    if kind == "finished" and not unnoticed:
        assert RUN.run_id in problems

    assert train_run(RUN, store, Runtime()) == "finished"
    assert folder.status == "finished"
    untouched = whole["finished"].run(RUN.run_id)
    if not (kind == "finished" and name in ("curve.jsonl", "checkpoint/model.safetensors")):
        assert folder.curve() == untouched.curve()
        assert folder.result["metrics"] == untouched.result["metrics"]
        for key, tensor in weights(untouched).items():
            assert (tensor == weights(folder)[key]).all(), key
