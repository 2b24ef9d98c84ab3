"""Down-sampling keeps what a reader looks for: the ends and the extremes."""

from hypothesis import given
from hypothesis import strategies as st

from cope_sweep.queries.curves import downsample, thin

numbers = st.floats(-1e6, 1e6) | st.none()
series = st.lists(numbers, max_size=300).map(lambda found: [(i, 0.1 * i, value) for i, value in enumerate(found)])


@given(series, st.integers(4, 60))
def test_ends_and_extremes_are_kept(points, maximum):
    kept = downsample(points, maximum)
    assert len(kept) <= maximum
    assert kept == sorted(kept, key=lambda point: point[0])
    assert set(map(id, kept)) <= set(map(id, points))
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
    known = [value for *_, value in points if value is not None]
    if known:
        shown = [value for *_, value in kept if value is not None]
        assert (min(shown), max(shown)) == (min(known), max(known))


@given(series)
def test_few_points_are_all_kept(points):
    assert downsample(points, max(4, len(points))) == points


def test_every_bucket_keeps_its_own_extremes():
    points = [(i, None, float(i % 10)) for i in range(102)]
    kept = {i for i, *_ in downsample(points, 22)}
    assert kept == {0, 101} | {i for start in range(1, 101, 10) for i in (start + 8, start + 9)}


def test_thinned_curves_keep_common_steps():
    long, short = ([(i, 0.0) for i in range(length)] for length in (1000, 401))
    assert {i for i, _ in thin(short, 200)[:-1]} >= {i for i, _ in thin(long, 200) if i < 400}
