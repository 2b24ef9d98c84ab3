"""Every ablation at every scale: its runs, their ids, and the runs that files share."""

from functools import lru_cache
from pathlib import Path

import pytest

from cope_sweep.config import Plan, estimates, expand, load_ablation, parameter_count, total_seconds, with_overrides
from cope_sweep.read.tables.layout import layout
from cope_sweep.read.tables.model import table_model
from cope_sweep.store import RunRecord
from tests.helpers.shipped import shipped_files

FOLDER = Path(__file__).parent
ABLATIONS = FOLDER.parents[1] / "ablations"
NAMES = [path.stem for path in shipped_files()]
IDS = FOLDER / "run_ids.json"
"""File → scale ("" for none) → its rows with their first run. `python -m tests.ablations.pins` writes it."""

FOR_A_GPU = (
    *("encodings_counting", "encodings_counting_tuning"),
    *(
        "gain_over_training",
        "learn_or_generalise",
        "learn_or_generalise_tuning",
        "short_convolutions_tuning",
        "encodings_2026",
        "encodings_2026_tuning",
    ),
)
"""Files whose runs take many hours on two cores, and minutes on a GPU."""


@lru_cache
def plan(name: str, scale: str = "") -> Plan:
    return expand(with_overrides(load_ablation(ABLATIONS / f"{name}.yaml"), scale=scale or None))


@lru_cache
def scales(name: str) -> list[str]:
    return ["", *load_ablation(ABLATIONS / f"{name}.yaml").content.scales]


def ids(name: str, scale: str = "") -> set[str]:
    return {run.run_id for run in plan(name, scale).runs}


SIZES = [(name, scale) for name in NAMES for scale in scales(name)]


@pytest.mark.parametrize(("name", "scale"), SIZES)
def test_every_run_is_planned_once(name, scale):
    rows = plan(name, scale).rows
    assert rows
    assert len({row.name for row in rows}) == len(rows)
    runs = [run for row in rows for run in row.runs]
    assert len(plan(name, scale).runs) == len(runs)
    assert all(parameter_count(row.runs[0]) > 0 for row in rows)


def test_an_id_means_one_configuration():
    known = {}
    for name, scale in SIZES:
        for run in plan(name, scale).runs:
            assert known.setdefault(run.run_id, run) == run
    assert len(known) > 500


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"quickstart", "axes", "encodings_tuning", *FOR_A_GPU}))
def test_every_file_has_a_small_scale_with_enough_seeds(name):
    """With 3 seeds a row no exact test reaches 0.05. What only tunes is not tested."""
    assert len(plan(name, "small").ablation.content.seeds) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_are_not_shown_beside_other_sizes(name):
    """But in the claims, whose order can be that of the paper."""
    if "small" in scales(name):
        small = plan(name, "small")
        model = table_model(small, {run.run_id: RunRecord(run_id=run.run_id) for run in small.runs})
        assert not [header.text for header in layout(model).headers if "published" in header.text]


def test_the_small_scales_take_hours_at_most():
    """All of them together on two cores, by the rule of thumb."""
    runs = {}
    for name in sorted(set(NAMES) - set(FOR_A_GPU)):
        each = plan(name, "small" if "small" in scales(name) else "")
        runs |= estimates(each)
    assert total_seconds(runs.values(), 2) < 24 * 3600


def test_the_runs_for_two_cores_are_those_of_the_paper():
    assert ids("flip_flop_architectures", "two_cores") < ids("flip_flop_architectures")
