import itertools
import shutil
import time

import pytest
import torch

from cope_sweep.model.checkpoint import save_model
from cope_sweep.store import Store
from cope_sweep.store.indexing import refresh_index
from cope_sweep.text import TextTokenizer
from cope_sweep.train import Runtime, Trainer, train_run
from cope_sweep.train.resume import load_state
from tests.helpers.damages import DAMAGES, garble, missing
from tests.helpers.tiny import tiny_run
from tests.helpers.training import stop_after, text_run, weights


def test_facts_name_the_data_and_the_checkpoint_has_the_tokenizer(store, text):
    run = text_run(text)
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    folder = store.run(run.run_id)
    assert folder.result["facts"]["data"] == run.task.fingerprint()
    assert folder.result["facts"]["tokenizer"] == run.task.tokenizer_name()
    assert folder.result["facts"]["precision"] == "fp32"
    cached = run.task.open_corpus().folder / "tokenizer.json"
    assert (folder.checkpoint / "tokenizer.json").read_bytes() == cached.read_bytes()
    assert set(folder.result["metrics"]) >= {f"test/{name}" for name in run.task.METRICS}


def test_the_cache_may_be_deleted_while_a_run_trains(store, text, tmp_path):
    run = text_run(text)
    folder = store.run(run.run_id)

    def delete(event):
        if event.step >= 3:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    assert train_run(run, folder, Runtime(), on_event=delete) == "finished"
    assert TextTokenizer.load(folder.checkpoint / "tokenizer.json").digest == run.task.open_corpus().tokenizer.digest


@pytest.mark.parametrize(
    ("position", "measured"), [(["cope"], True), (["rope"], True), (["alibi"], True), (["relative"], True),
                               ([{"kind": "relative", "far": "last"}], True), ([], True), (["absolute"], False)]
)  # fmt: skip
def test_longer_contexts_are_measured_or_the_facts_say_why_not(store, text, position, measured):
    """The run was trained on 16 tokens. Absolute positions end there, which does not fail the run."""
    run = text_run(text, **{"model.position": position, "evaluate.contexts": [8, 16, 32, 64]})
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    metrics, facts = store.run(run.run_id).result["metrics"], store.run(run.run_id).result["facts"]
    assert metrics["test/perplexity@16"] == pytest.approx(metrics["test/perplexity"], rel=1e-5)
    assert "validation/perplexity@8" in metrics
    assert ("test/perplexity@64" in metrics) == measured
    if measured:
        assert "contexts_left_out" not in facts
    else:
        assert facts["contexts_left_out"].startswith("32, 64: absolute position encoding has 16 embeddings")


@pytest.mark.parametrize("position", ["cope", "absolute"])
def test_longer_sequences_are_measured_or_the_facts_say_why_not(store, position):
    task = {"kind": "flip_flop", "pairs": 4}
    run = tiny_run(task=task, **{"model.position": [position], "evaluate.lengths": [2, 4]})
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    metrics, facts = store.run(run.run_id).result["metrics"], store.run(run.run_id).result["facts"]
    assert {name for name in metrics if "@" in name} == (
        {f"in_dist/{name}@{times}x" for times in (2, 4) for name in run.task.METRICS} if position == "cope" else set()
    )
    reason = "2x, 4x: absolute position encoding has 7 embeddings, and the input has 15 tokens"
    assert facts.get("contexts_left_out", reason).startswith(reason)
    assert ("contexts_left_out" in facts) == (position == "absolute")


def test_a_result_has_nothing_of_an_earlier_evaluation(store):
    """The last one has one sequence, and so fewer distances of brackets than those before it."""
    task = {"kind": "dyck", "brackets": 16, "longer_brackets": 64, "depth": 2, "deeper_depth": 3}
    evaluate = {"evaluate.every": 2, "evaluate.sequences": 32, "evaluate.final_sequences": 1}
    run = tiny_run(task=task, **{"train.steps": 3} | evaluate)
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    middle, last = (set(row) for row in store.run(run.run_id).curve() if "deeper/loss" in row)
    assert middle - last
    metrics = store.run(run.run_id).result["metrics"]
    assert {name for name in metrics if not name.startswith("train/")} == last - {"step"}
    assert "train/loss" in metrics


def test_a_variant_is_the_same_training_evaluated_with_other_fields(store, text):
    """Weights and metrics of the run itself are those without the variant; the variant's are those of a capped run."""
    # At a high rate, the embeddings become so large that a distance without one is seen in the perplexity.
    relative, contexts = {"model.position": ["relative"]}, {"evaluate.contexts": [16, 48], "train.lr": 0.3}
    capped_alone = {"model.position": [{"kind": "relative", "far": "last"}]}
    both, plain, capped = (
        text_run(text, **contexts | position)
        for position in (
            relative | {"evaluate.variants": {"capped": {"relative.far": "last"}}},
            relative,
            capped_alone,
        )
    )
    results = []
    for run in (both, plain, capped):
        assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
        results.append(store.run(run.run_id).result["metrics"])
    assert set(results[0]) >= set(both.metrics)
    variants = {name.removeprefix("capped/"): x for name, x in results[0].items() if name.startswith("capped/")}
    assert {name: results[0][name] for name in results[1]} == results[1]
    assert variants == {name: results[2][name] for name in variants}
    assert results[0]["test/perplexity@48"] != pytest.approx(results[0]["capped/test/perplexity@48"], rel=1e-4)
    trained, alone = (weights(store.run(run.run_id)) for run in (both, plain))
    assert trained.keys() == alone.keys()
    assert all(torch.equal(trained[name], alone[name]) for name in alone)


def test_facts_have_the_time_of_all_attempts(store):
    run = tiny_run(**{"train.steps": 30})
    assert train_run(run, store.run(run.run_id), Runtime(), should_stop=stop_after(14)) == "interrupted"
    folder = store.run(run.run_id)
    before = load_state(folder.resume, Trainer(run, Runtime()))["spent"]
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    facts = folder.result["facts"]
    assert facts["resumed_from_step"] == 15
    assert facts["train_s"] > before["train_s"] > 0
    assert facts["wall_s"] > before["wall_s"] > before["train_s"]


def test_a_checkpoint_is_written_outside_the_training_time(store, monkeypatch):
    def save_slowly(*arguments):
        time.sleep(0.5)
        save_model(*arguments)

    monkeypatch.setattr("cope_sweep.train.loop.save_model", save_slowly)
    run = tiny_run()
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    facts = store.run(run.run_id).result["facts"]
    assert facts["wall_s"] - facts["train_s"] > 0.5


def test_facts_have_the_precision_of_all_steps(store):
    """A sweep that goes on at another node may train in another precision there, which tables warn about."""
    run = tiny_run(**{"train.steps": 30})
    folder = store.run(run.run_id)
    assert train_run(run, folder, Runtime(), should_stop=stop_after(4)) == "interrupted"
    assert train_run(run, folder, Runtime(precision="bf16"), should_stop=stop_after(14)) == "interrupted"
    assert train_run(run, folder, Runtime(precision="bf16")) == "finished"
    assert folder.result["facts"]["precision"] == "fp32, then bf16"


LONGER = tiny_run(**{"train.steps": 12})


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A store with a finished run, and one where it was interrupted."""
    whole, interrupted = (Store(tmp_path_factory.mktemp("store"), create=True) for _ in range(2))
    train_run(LONGER, whole.run(LONGER.run_id), Runtime())
    train_run(LONGER, interrupted.run(LONGER.run_id), Runtime(), should_stop=stop_after(5))
    return whole, interrupted


STATE = ("spec.json", "state.json", "curve.jsonl", "resume.safetensors")
LOSSES = set(itertools.product(STATE, DAMAGES)) - {("resume.safetensors", garble)}
"""The state to resume from has no checksum: a flipped bit in its tensors is not noticed."""


@pytest.mark.parametrize(("name", "damage"), sorted(LOSSES, key=lambda loss: (loss[0], loss[1].__name__)))
def test_an_interrupted_run_with_a_damaged_file_comes_to_the_same_end(stores, tmp_path, name, damage):
    whole, interrupted = (each.run(LONGER.run_id) for each in stores)
    store = Store(tmp_path / "store", create=True)
    folder = store.run(LONGER.run_id)
    shutil.copytree(interrupted.path, folder.path)
    damage(folder.path / name)
    refresh_index(store.index, store.files)
    if name in ("spec.json", "state.json") and damage is not missing:
        record = store.index.records([LONGER.run_id])[LONGER.run_id]
        assert (record.status, name in record.message) == ("interrupted", True)
    assert train_run(LONGER, store.run(LONGER.run_id), Runtime()) == "finished"
    if name == "curve.jsonl":
        assert "curve.jsonl" in folder.result["facts"]["restarted"]
    assert folder.curve() == whole.curve()
    assert folder.result["metrics"] == whole.result["metrics"]
    for key, tensor in weights(whole).items():
        assert (tensor == weights(folder)[key]).all(), key


def test_rows_after_the_resume_file_are_trained_again_once(store):
    run = tiny_run(**{"train.steps": 12})
    train_run(run, store.run(run.run_id), Runtime(), should_stop=stop_after(5))
    folder = store.run(run.run_id)
    with (folder.path / "curve.jsonl").open("a") as file:
        file.write('{"step": 7, "train/loss": 9.0}\n{"step": 8, "tra')  # a worker that was killed
    assert train_run(run, store.run(run.run_id), Runtime()) == "finished"
    assert 9.0 not in [row.get("train/loss") for row in folder.curve()]
    assert folder.result["facts"]["resumed_from_step"] == 6
