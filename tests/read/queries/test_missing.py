"""What a table lacks, by hand."""

import json

import pytest

from cope_sweep.api.ablations import GetMissing
from cope_sweep.read.queries import AblationFiles, Queries
from tests.helpers.errors import raises
from tests.helpers.finished_runs import CONTENT, fail, finish, plan_of, stop


@pytest.mark.parametrize("schedule", ["asha", "none"])
def test_unfinished_runs_by_row_and_the_command_that_trains_them(store, tmp_path, schedule):
    plan = plan_of()
    runs = [run for row in plan.rows for run in row.runs]
    finish(store, runs[0], {"in_dist/token_error": 1.0})
    fail(store, runs[1])
    stop(store, runs[2])
    (tmp_path / "ablations").mkdir()
    (tmp_path / "ablations" / f"{plan.name}.yaml").write_text(json.dumps(CONTENT | {"schedule": schedule}))
    queries = Queries(store, AblationFiles(tmp_path / "ablations"))
    answer = queries.ask(GetMissing(name=plan.name))
    lacking = {each.run_id: each for row in answer.rows for each in row.runs}
    kept = {runs[0].run_id, runs[2].run_id} if schedule == "asha" else {runs[0].run_id}
    assert answer.missing == len(runs) - len(kept) == len(lacking)
    assert lacking.keys() == {run.run_id for run in runs} - kept
    assert (lacking[runs[1].run_id].status, lacking[runs[1].run_id].seed) == ("failed", runs[1].seed)
    assert answer.command.startswith(f"cope-sweep run {plan.name} --store ")
    assert [row.row for row in answer.rows] == [
        row.name for row in plan.rows if any(r.run_id in lacking for r in row.runs)
    ]
    with raises("not_found"):
        queries.ask(GetMissing(name="other"))
