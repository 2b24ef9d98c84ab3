"""Whether a row is better than another one, in one word."""

import itertools
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cope_sweep.api.tables import GetTable, GetVerdict
from cope_sweep.config import plan_of_recorded
from cope_sweep.read.queries import AblationFiles, Queries
from cope_sweep.read.tables import Results, Table, table
from cope_sweep.read.tables.stats import least_seeds, smallest_p, smallest_p_of_pairs
from cope_sweep.records import RunRecord
from tests.helpers.errors import raises
from tests.helpers.finished_runs import CONTENT, fail, finish, plan_of

ERROR = "in_dist/token_error"


def trained(store, plan, errors, unfinished=()):
    """Finish the runs of a plan. `errors`: label → one error for each seed."""
    for row in plan.rows:
        for run in row.runs:
            if (row.name, run.seed) not in unfinished:
                finish(store, run, {ERROR: errors[row.name][run.seed], "dense/loss": 1.0})


def three_rows(seeds, **changes):
    return plan_of(seeds=list(range(seeds)), **changes)


def ask(plan, store, row="CoPE", than="None", margin=None):
    asked = table(plan, store, compare=than)
    asked = type(asked)(asked.results, asked.question.model_copy(update={"margin": margin}))
    return next(each for each in asked.verdicts if each.row == row)


def spread(centre, seeds, width=1.0):
    """Errors around `centre`, all different."""
    return [centre + width * (seed - (seeds - 1) / 2) / seeds for seed in range(seeds)]


def test_a_hand_worked_verdict(store):
    """5 and 5 runs that do not overlap: p = 2 / C(10, 5) = 2/252, by Holm 2 · 2/252 for the two rows compared with None."""
    plan = three_rows(5)
    trained(store, plan, {"CoPE": spread(1, 5), "a_b <c>": spread(50, 5), "None": spread(20, 5)})
    found = ask(plan, store)
    assert (found.verdict, found.row, found.than, found.n) == ("better", "CoPE", "None", (5, 5))
    assert found.difference == pytest.approx(-19)
    assert found.compared == 2
    assert found.p == pytest.approx(4 / 252)
    assert found.ci_low < -19 < found.ci_high < 0
    assert (found.unfinished, found.more_seeds, found.command, found.declared) == (0, 0, None, "not claimed")
    assert ask(plan, store, "a_b <c>").verdict == "worse"
    assert "better" in found.text


def test_three_seeds_are_too_few_and_the_command_has_new_ones(store):
    """3 and 3 runs: p is at least 2/20. Two comparisons need 2 · 2/C(2n, n) ≤ 0.05: n = 5 (4/252), as for n = 4 it is 4/70."""
    plan = three_rows(3)
    trained(store, plan, {"CoPE": spread(1, 3), "a_b <c>": spread(50, 3), "None": spread(20, 3)})
    found = ask(plan, store)
    assert (found.verdict, found.more_seeds, found.unfinished) == ("too few seeds", 2, 0)
    assert "--set 'seeds=[0,1,2,3,4]'" in found.command


def test_no_verdict_while_planned_runs_are_missing(store):
    """However clear it looks: whoever stops when p is small finds differences where there are none."""
    plan = three_rows(7)
    errors = {"CoPE": spread(1, 7), "a_b <c>": spread(50, 7), "None": spread(20, 7)}
    trained(store, plan, errors, unfinished={("CoPE", 6)})
    found = ask(plan, store)
    assert (found.verdict, found.unfinished, found.more_seeds, found.n) == ("too few seeds", 1, 0, (6, 7))
    assert "seeds=" not in found.command
    assert ask(plan, store, "a_b <c>").verdict == "worse"  # this pair is complete


def test_a_failed_run_is_not_left_out_of_a_verdict(store):
    plan = three_rows(6)
    errors = {"CoPE": spread(1, 6), "a_b <c>": spread(50, 6), "None": spread(20, 6)}
    trained(store, plan, errors, unfinished={("CoPE", 0)})
    fail(store, plan.rows[0].runs[0])
    assert ask(plan, store).verdict == "too few seeds"


def test_a_finished_run_without_a_value_is_not_left_out_either(store):
    plan = three_rows(6)
    errors = {"CoPE": spread(1, 6), "a_b <c>": spread(50, 6), "None": spread(20, 6)}
    trained(store, plan, errors, unfinished={("CoPE", 0)})
    finish(store, plan.rows[0].runs[0], {"dense/loss": 1.0})
    found = ask(plan, store)
    assert (found.verdict, found.unfinished, found.more_seeds, found.n) == ("too few seeds", 0, 0, (5, 6))
    assert "1 finished runs of these rows have no value" in found.text


def test_a_metric_that_a_task_does_not_have_needs_no_more_seeds(store, tmp_path):
    """Of rows that both lack it, only a question about them has an answer; a pair with one such row is in the table."""
    (tmp_path / "copying.yaml").write_text(json.dumps(CONTENT | {"seeds": list(range(5))}))
    queries = Queries(store, AblationFiles(tmp_path))
    plan = queries.load("copying", None, [])
    for row in plan.rows:
        for run in row.runs:
            finish(store, run, {"dense/loss": 1.0} | ({ERROR: 1.0 + run.seed} if row.name == "CoPE" else {}))
    of_table = json.loads(queries.ask(GetTable(name="copying", compare="None")))["compared"]["verdicts"]
    assert [(each["row"], each["verdict"], each["n"]) for each in of_table] == [("CoPE", "unclear", [5, 0])]
    assert of_table[0]["text"].endswith("no run of None has this metric")
    found = queries.ask(GetVerdict(name="copying", row="a_b <c>", than="None", margin="1 %"))
    assert (found.verdict, found.more_seeds, found.command) == ("unclear", 0, None)
    assert found.text.endswith("n = 0 and 0, no run of these rows has this metric")


def test_without_runs(store):
    found = ask(three_rows(5), store)
    assert (found.verdict, found.difference, found.p, found.unfinished) == ("too few seeds", None, None, 10)


def test_a_margin_makes_small_differences_equivalent(store):
    plan = three_rows(6)
    trained(store, plan, {"CoPE": spread(19, 6), "a_b <c>": spread(50, 6), "None": spread(20.5, 6)})
    verdicts = {None: "better", "0.5": "better", "3": "equivalent", "20 %": "equivalent", "1%": "better"}
    assert {margin: ask(plan, store, margin=margin).verdict for margin in verdicts} == verdicts


def test_overlapping_rows_are_unclear_whatever_their_number(store):
    plan = three_rows(8)
    trained(store, plan, {"CoPE": spread(20, 8), "a_b <c>": spread(50, 8), "None": spread(20.01, 8)})
    found = ask(plan, store)
    assert (found.verdict, found.more_seeds, found.command) == ("unclear", 0, None)


def test_a_margin_that_is_none(store):
    plan = three_rows(5)
    trained(store, plan, {name: spread(1, 5) for name in ("CoPE", "a_b <c>", "None")})
    for margin in ("0", "-1", "x", "1 % of it", "nan", ""):
        with raises("margin", value=margin):
            ask(plan, store, margin=margin)


def test_a_higher_value_may_be_better(store):
    plan = three_rows(6, metrics=[{"name": ERROR, "goal": "max"}])
    trained(store, plan, {"CoPE": spread(1, 6), "a_b <c>": spread(50, 6), "None": spread(20, 6)})
    assert ask(plan, store).verdict == "worse"


def test_pairs_of_runs(store):
    """6 pairs with differences of one sign: p = 2/64, by Holm 4/64; 7 pairs are needed for two comparisons."""
    plan = three_rows(6, paired=True)
    trained(store, plan, {"CoPE": spread(1, 6), "a_b <c>": spread(50, 6), "None": spread(20, 6)})
    found = ask(plan, store)
    assert (found.verdict, found.paired, found.more_seeds) == ("too few seeds", True, 1)


def test_when_a_claim_about_the_pair_was_declared(store):
    claim = {"text": "it is", "better": {"model.position": "CoPE"}, "than": {"model.position": "None"}}
    plan = three_rows(5, claims=[claim])
    trained(store, plan, {"CoPE": spread(1, 5), "a_b <c>": spread(50, 5), "None": spread(20, 5)})
    assert ask(plan, store).declared == "not recorded"  # no sweep has trained these runs
    assert ask(plan, store, "a_b <c>").declared == "not claimed"


def test_the_question_names_one_row_on_each_side(store, tmp_path):
    (tmp_path / "copying.yaml").write_text(json.dumps(CONTENT | {"seeds": list(range(5))}))
    queries = Queries(store, AblationFiles(tmp_path))
    plan = queries.load("copying", None, [])
    trained(store, plan, {"CoPE": spread(1, 5), "a_b <c>": spread(50, 5), "None": spread(20, 5)})
    asked = GetVerdict(name="copying", row="cope", than="position=None")
    assert queries.ask(asked).verdict == "better"
    of_table = json.loads(queries.ask(GetTable(name="copying", compare="None", top=1)))["compared"]["verdicts"]
    assert of_table == [queries.ask(asked).model_dump(mode="json", exclude={"command"})]
    with raises("unknown_row", row="CoPA"):
        queries.ask(asked.model_copy(update={"row": "CoPA"}))
    with raises("unknown_row", row="paper"):
        queries.ask(asked.model_copy(update={"than": "paper"}))
    with raises("same_row", row="None"):
        queries.ask(asked.model_copy(update={"row": "None"}))
    with raises("margin_without_compare"):
        queries.ask(GetTable(name="copying", margin="1"))


def test_a_pair_has_one_p_whichever_row_is_named_first(store, tmp_path):
    """CoPE and None overlap, so that its p depends on the other pair of the family: with CoPE, a row that differs."""
    (tmp_path / "copying.yaml").write_text(json.dumps(CONTENT | {"seeds": list(range(5))}))
    queries = Queries(store, AblationFiles(tmp_path))
    plan = queries.load("copying", None, [])
    trained(store, plan, {"CoPE": spread(2, 5, 4), "a_b <c>": spread(50, 5), "None": spread(4, 5, 4)})
    one = queries.ask(GetVerdict(name="copying", row="None", than="CoPE"))
    other = queries.ask(GetVerdict(name="copying", row="CoPE", than="None", margin="9"))
    (of_table,) = [
        each
        for each in json.loads(queries.ask(GetTable(name="copying", compare="CoPE")))["compared"]["verdicts"]
        if each["row"] == "None"
    ]
    assert one.p == other.p == of_table["p"] != pytest.approx(1)
    assert (other.row, other.than, other.compared, other.n) == ("CoPE", "None", 2, (5, 5))
    assert (one.difference, one.ci_low, one.ci_high) == (-other.difference, -other.ci_high, -other.ci_low)
    assert (one.verdict, other.verdict) == ("unclear", "equivalent")
    assert queries.ask(GetVerdict(name="copying", row="CoPE", than="a_b <c>")).verdict == "better"


def test_a_pair_has_the_p_of_the_table_that_compares_rows_of_the_same_task(store, tmp_path):
    grid = {
        "model.position": {"CoPE": ["cope"], "RoPE": ["rope"], "None": []},
        "task": {
            f"Copy of {tokens}": {"kind": "selective_copy", "tokens": tokens, "blanks": 2, "dense_blanks": 1, "sparse_blanks": 4}
            for tokens in (2, 3)
        },
    }  # fmt: skip
    base = {key: value for key, value in CONTENT["base"].items() if key != "task"}
    content = CONTENT | {"base": base, "grid": grid, "seeds": list(range(5))}
    (tmp_path / "copying.yaml").write_text(json.dumps(content))
    queries = Queries(store, AblationFiles(tmp_path))
    plan = queries.load("copying", None, [])
    trained(store, plan, {row.name: spread(place, 5) for place, row in enumerate(plan.rows)})
    for against in ("CoPE", "RoPE"):
        of_table = json.loads(queries.ask(GetTable(name="copying", compare=against)))["compared"]["verdicts"]
        assert len(of_table) == 4
        for each in of_table:
            alone = queries.ask(GetVerdict(name="copying", row=each["row"], than=each["than"]))
            assert alone.model_dump(mode="json", exclude={"command"}) == each
            assert alone.compared == 2
    of_two_tasks = GetVerdict(name="copying", row="RoPE · Copy of 2", than="CoPE · Copy of 3")
    assert queries.ask(of_two_tasks).compared == 5, "no label is the only difference"


def test_rows_without_finished_runs_count_in_the_correction(store):
    """4 seeds, 3 rows: for two comparisons p is at least 2 · 2/70, whichever of them is trained first."""
    plan = three_rows(4)
    before = ask(plan, store)
    assert (before.compared, before.more_seeds) == (2, 1)
    errors = {"CoPE": spread(1, 4), "a_b <c>": spread(50, 4), "None": spread(20, 4)}
    trained(store, plan, errors, unfinished={("a_b <c>", seed) for seed in range(4)})
    found = ask(plan, store)
    assert (found.verdict, found.compared, found.more_seeds) == ("too few seeds", 2, 1)
    assert found.p == pytest.approx(4 / 70)
    trained(store, plan, errors)
    assert ask(plan, store) == found


@given(st.integers(1, 9000), st.booleans())
def test_the_least_number_of_seeds_is_the_smallest_that_can_be_significant(comparisons, is_paired):
    def floor(n):
        return comparisons * (smallest_p_of_pairs(n) if is_paired else smallest_p(n, n))

    n = least_seeds(comparisons, is_paired=is_paired)
    assert all(floor(fewer) > 0.05 for fewer in range(2, n or 30))
    assert n is None or floor(n) <= 0.05
    assert n is not None or comparisons > 3000


def test_no_command_adds_seeds_to_the_rows_of_a_search(store):
    """With more seeds for each row, the search would suggest other rows."""
    search = {"kind": "optuna", "samples": 2, "seeds_per_sample": 2}
    base = plan_of(grid={"model.position": {"CoPE": ["cope"], "None": []}}, search=search)
    rows = [(row.runs[0].run_id, row.labels) for row in base.examples]
    plan = plan_of_recorded(base.ablation, rows)
    errors = {"CoPE": [1.0, 2.0], "None": [5.0, 6.0]}
    trained(store, plan, errors, unfinished={("None", 1)})
    assert ask(plan, store).command is None
    for row in plan.rows:
        finish(store, row.runs[1], {ERROR: 5.0, "dense/loss": 1.0})
    found = ask(plan, store)
    assert (found.verdict, found.more_seeds, found.command) == ("too few seeds", 2, None)


@pytest.mark.parametrize("seeds", [4, 5, 6])
@given(st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_exact_reference_by_all_divisions(store, seeds, random):
    """p of one comparison, by counting the divisions of the runs of two rows in plain Python."""
    plan = plan_of(seeds=list(range(seeds)), grid={"model.position": {"CoPE": ["cope"], "None": []}})
    errors = {name: [random.uniform(0, 30) for _ in range(seeds)] for name in ("CoPE", "None")}
    both = errors["CoPE"] + errors["None"]
    true = abs(sum(errors["CoPE"]) - sum(errors["None"]))
    sums = [sum(both[i] for i in chosen) for chosen in itertools.combinations(range(2 * seeds), seeds)]
    p = sum(abs(2 * part - sum(both)) >= true - 1e-9 for part in sums) / math.comb(2 * seeds, seeds)
    records = {
        run.run_id: RunRecord(run_id=run.run_id, status="finished", metrics={ERROR: errors[row.name][run.seed]})
        for row in plan.rows
        for run in row.runs
    }
    asked = GetTable.model_construct(name="copying", compare="None")
    found = next(each for each in Table(Results(plan, records, store), asked).verdicts if each.row == "CoPE")
    assert found.p == pytest.approx(p)
    better = sum(errors["CoPE"]) < sum(errors["None"])
    assert found.verdict == (("better" if better else "worse") if p <= 0.05 else "unclear")
