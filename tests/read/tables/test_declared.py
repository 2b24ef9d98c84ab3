"""Claims that were declared before their runs started, and claims that came later."""

import pandas as pd
import pytest

from cope_sweep.config.ablation import Claim
from cope_sweep.read.reports.files import copy_runs
from cope_sweep.read.tables import Table, read_results
from cope_sweep.read.tables.claims import claim_findings
from cope_sweep.read.tables.declared import declared_in, declared_text, plan_declarations
from cope_sweep.read.tables.model import table_model
from cope_sweep.records import RunRecord
from cope_sweep.store import ParquetStore, Store
from cope_sweep.store.results_file import Declaration
from tests.helpers.errors import raises
from tests.helpers.finished_runs import CONTENT, finish, plan_of
from tests.helpers.sweeps import write_sweep

CLAIM = {"text": "CoPE wins", "better": {"model.position": "CoPE"}, "than": {"model.position": "None"}}
LATER = CLAIM | {"text": "CoPE wins, by loss", "metric": "dense/loss"}
PLAN = plan_of(claims=[CLAIM, LATER])
DAY_MS = 86_400_000


def data(*claims, **changes):
    return CONTENT | {"claims": list(claims)} | changes


def trained(store, plan=PLAN):
    for index, run in enumerate(plan.runs):
        finish(store, run, {"in_dist/token_error": 1.0 + index, "dense/loss": 0.1})
    return min(record.created_ms for record in store.records(plan).values())


def declared(plan, store):
    results = read_results(plan, store)
    return [each.declared for each in claim_findings(plan, Table.of(results).model, plan_declarations(plan, store))]


def test_what_a_claim_says_is_its_identity():
    identity = Claim.model_validate(CLAIM).identity("in_dist/token_error")
    same = [
        {"text": "Other words", "source": "Table 1", "note": "So what?"},
        {"than": {"model.position": ["None"]}},
        {"metric": "in_dist/token_error"},
        {"margin": 0.5},
    ]
    others = [
        {"metric": "dense/loss"},
        {"than": {"model.position": ["None", "a_b <c>"]}},
        {"better": {"model.position": "None"}},
        {"than_variant": "capped"},
        {"variant": "capped"},
        {"says": "equivalent", "margin": 0.5},
        {"says": "equivalent", "margin": "1 %"},
        {"says": "not worse", "margin": 0.5},
    ]
    for change in same:
        assert Claim.model_validate(CLAIM | change).identity("in_dist/token_error") == identity
    identities = {Claim.model_validate(CLAIM | change).identity("in_dist/token_error") for change in others}
    identities.add(Claim.model_validate(CLAIM).identity("in_dist/token_error", is_paired=True))
    assert len(identities | {identity}) == len(others) + 2


def test_claims_of_a_scale_and_its_primary_metric():
    of_scale = {"few": {"claims": [LATER]}, "dense": {"primary": "dense/loss"}, "same": None}
    content = data(CLAIM, {"text": "no rows"}, scales=of_scale)
    by_error, by_loss = (
        Claim.model_validate(CLAIM).identity(metric) for metric in ("in_dist/token_error", "dense/loss")
    )
    assert declared_in(content, None) == declared_in(content, "same") == {by_error}
    assert declared_in(content, "few") == declared_in(content, "dense") == {by_loss}
    paired = {Claim.model_validate(CLAIM).identity("in_dist/token_error", is_paired=True)}
    assert declared_in(content | {"paired": True}, None) == paired, "another test would decide"
    content["scales"]["same"] = {"paired": True}
    assert declared_in(content, "same") == paired != declared_in(content, None)
    assert declared_in({}, None) == set()


def test_claims_of_figures():
    figure = {"kind": "maps", "show": "gates", "mark": "data"}
    claims = [figure | {"claim": "Gates open"}, figure | {"claim": "Gates close", "seed": 1}]
    others = [figure | {"claim": "So it is", "show": "position_attention"}, {"kind": "unknown"}, figure]
    assert len(declared_in({"figures": claims}, None)) == 1, "the same in other words"
    assert len(declared_in({"figures": claims + others}, None)) == 2


def test_declared_before_and_after_the_runs(store, tmp_path):
    first_ms = trained(store)
    assert plan_declarations(PLAN, store) is None
    assert declared(PLAN, store) == ["not recorded", "not recorded"]
    write_sweep(store, PLAN, started_ms=first_ms - DAY_MS, data=data(CLAIM), git_commit="0123456789abc")
    write_sweep(store, PLAN, started_ms=first_ms - 2 * DAY_MS, data={}, file_text="not: [valid")
    write_sweep(store, PLAN, started_ms=first_ms + DAY_MS, data=data(CLAIM, LATER), git_commit="fedcba9876-dirty")
    before, after = declared(PLAN, store)
    assert before.startswith("before (20")
    assert before.endswith(", 0123456)")
    assert after.startswith("after (20")
    assert after.endswith(", fedcba9-dirty)")
    unknown = plan_of(claims=[CLAIM | {"than": {"model.position": "a_b <c>"}}])
    assert declared(unknown, store) == ["after"]

    # A folder of results keeps it, with and without another copy.
    results = ParquetStore(tmp_path / "results")
    copy_runs(read_results(PLAN, store), results)
    assert declared(PLAN, results) == [before, after]
    frame = pd.read_parquet(results.root / "copying.parquet")
    wider, other = plan_of(claims=[CLAIM, LATER], seeds=[0, 1, 2]), Store(tmp_path / "other", create=True)
    trained(other, wider)
    copy_runs(read_results(wider, other), results)
    assert declared(wider, results) == [before, after]
    assert pd.read_parquet(results.root / "copying.parquet").attrs == frame.attrs
    paired = plan_of(claims=[CLAIM, LATER], seeds=[0, 1, 2], paired=True)
    assert declared(paired, results) == ["not recorded", "not recorded"], "results of before pairs were part of a claim"
    frame.attrs = {}
    frame.to_parquet(results.root / "copying.parquet")
    assert declared(PLAN, results) == ["not recorded", "not recorded"]
    for wrong in (["no mapping"], {"a": 1}, {"a": ["x", "abc"]}, {"a": [10**40, "abc"]}, {"a": [1, "abc", 2]}):
        frame.attrs = {"declared": wrong}
        frame.to_parquet(results.root / "copying.parquet")
        with raises("damaged_report"):
            declared(PLAN, results)


@pytest.mark.parametrize(
    ("time_ms", "commit", "text"),
    [
        (5, "", "before (1970-01-01)"),
        (6, "abcdef0123", "after (1970-01-01, abcdef0; 2 of 3 seeds later)"),
        (9, "abcdef0123-dirty", "after (1970-01-01, abcdef0-dirty)"),
    ],
)
def test_text(time_ms, commit, text):
    assert declared_text("a", {"a": Declaration(time_ms, commit)}, {0: 5, 1: 7, 2: 8}) == text


def test_a_note_is_one_line():
    plan = plan_of(claims=[CLAIM | {"note": "More steps\nwould settle it.\n"}])
    (found,) = claim_findings(plan, table_model(plan, {run.run_id: RunRecord(run_id=run.run_id) for run in plan.runs}))
    assert found.note == "More steps would settle it."
    assert found.declared == "", "no run has started"
