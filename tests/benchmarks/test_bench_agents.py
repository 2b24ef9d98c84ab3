"""The scripted agents, by hand, and the simulated searches."""

from collections.abc import Iterator

from cope_benchmarks.agents import SEARCHES, Draw, Search, follow_the_verdict, keep_the_better_mean, measure


def draws(*values: float) -> Draw:
    """The runs of a row, in this order."""
    left: Iterator[float] = iter(values)
    return lambda number: [next(left) for _ in range(number)]


def test_one_seed_keeps_what_is_better_than_what_was_kept_last():
    search = Search(draws(5.0), [draws(6.0), draws(4.0), draws(4.5), draws(4.0), draws(1.0)], frozenset())
    assert keep_the_better_mean(1)(search) == {1, 4}


def test_a_mean_hides_one_lucky_seed():
    search = Search(draws(5.0, 5.0), [draws(1.0, 9.5), draws(4.0, 5.0)], frozenset())
    assert keep_the_better_mean(2)(search) == {1}


def test_the_verdict_needs_seeds_that_can_be_significant_after_the_correction():
    def search(seeds: int) -> Search:
        base = draws(*range(10, 10 + seeds))
        return Search(base, [draws(*range(seeds)), *(draws(*range(10, 10 + seeds)) for _ in range(9))], frozenset({0}))

    assert follow_the_verdict(5)(search(5)) == set()  # 10 comparisons × 2 / C(10, 5) = 0.079
    assert follow_the_verdict(6)(search(6)) == {0}  # 10 × 2 / C(12, 6) = 0.022


def test_the_verdict_keeps_nothing_that_is_worse():
    search = Search(draws(*range(8)), [draws(*range(10, 18))], frozenset())
    assert follow_the_verdict(8)(search) == set()


def test_the_measured_searches_can_be_repeated():
    rows = measure(SEARCHES)["rows"]
    counts = {name: (row["counts"]["false"], row["counts"]["missed"]) for name, row in rows.items()}
    assert len(counts) == 9
    assert counts["nothing differs: keep what is better on one seed"][0] >= SEARCHES / 4
    assert counts["nothing differs: follow the verdict, 8 seeds"][0] <= 3  # 5 % of 20 are 1; more than 3 has p = 0.02
    assert counts == {
        name: (row["counts"]["false"], row["counts"]["missed"]) for name, row in measure(SEARCHES)["rows"].items()
    }
