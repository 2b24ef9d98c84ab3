"""Where the runs of a report come from."""

import pytest

from cope_sweep.read.reports.files import run_frame
from cope_sweep.read.reports.provenance import duration, provenance, seed_groups, seeds_text
from cope_sweep.read.tables import read_results
from tests.helpers.finished_runs import plan_of
from tests.helpers.sweeps import members, sweep_record
from tests.read.reports.test_evidence import finished_runs


def test_provenance_is_that_of_the_sweeps(store):
    plan = plan_of()
    finished_runs(plan, store)
    command = [
        "/x/__main__.py",
        "run",
        "/x/copying.yaml",
        "--store",
        "/x/store",
        "--index=postgresql://u:p@h/n",
        "--local",
    ]
    sweep = sweep_record(
        runs=members(plan), command=command, git_commit="abc", versions={"numpy": "1", "torch": "1.0"},
        machine={"host": "secret-host", "cpu": "A processor", "cpus": 4, "system": "Linux"},
    )  # fmt: skip
    store.write_sweep(sweep)
    results = read_results(plan, store)
    records = {i: each.model_copy(update={"sweep_id": sweep.sweep_id}) for i, each in results.records.items()}
    frame = run_frame(results.plan, records, results.store)
    found = provenance(frame)
    assert found.commits == ("abc",)
    assert found.versions == ("numpy 1", "torch 2.1")  # the run's own
    assert found.machines == ("cpu, 2 threads; A processor, 4 cores; Linux",)
    assert found.commands == ("cope-sweep run copying --local",)
    assert found.compute_s == 6 * 30.5
    assert found.runs == 6
    assert dict(found.lines)["Compute"].startswith("3 min ")


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (600, "10 min"), (3600 * 3 + 300, "3 h 05 min")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def trained(seed, start_min, minutes=3, row_delay=0):
    """Two runs of a seed, one after the other; 2026-11-24 12:00 UTC and later."""
    noon_ms = 1795521600000
    starts = [noon_ms + (start_min + delay) * 60_000 for delay in (0, row_delay or minutes)]
    return [{"seed": seed, "created_ms": start, "ended_ms": start + minutes * 60_000} for start in starts]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], ""),
        ([*trained(11, 6), *trained(10, 0)], "2 (10–11): 2 on 2026-11-24"),
        ([*trained(10, 0), *trained(12, 2880)], "2 (10, 12): 1 on 2026-11-24, 1 added on 2026-11-26"),
        (
            [*trained(3, 0), *trained(4, 15), *trained(5, 32)],
            "3 (3–5): 2 on 2026-11-24, 1 added on 2026-11-24 at 12:32 UTC",
        ),
        # A row that was added to the first seed, later than the second seed, makes them no group.
        ([*trained(0, 0, row_delay=3000), *trained(1, 2880)], "2 (0–1): 1 on 2026-11-24, 1 added on 2026-11-26"),
        ([*trained(0, 0), {"seed": 1, "created_ms": None, "ended_ms": None}], "1 (0): 1 on 2026-11-24"),
    ],
)
def test_seeds_that_were_added_when_others_had_ended(lines, text):
    assert seeds_text(seed_groups(lines)) == text
