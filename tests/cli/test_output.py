import pytest

from cope_sweep.cli.output import duration, grid, quantity, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (45.2, "45 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 00 min"),
        (8040, "2 h 14 min"),
        (86399, "1 day 0 h"),
        (3 * 86400 + 4 * 3600, "3 days 4 h"),
        (364 * 86400, "364 days 0 h"),
        (366 * 86400, "1.0 years"),
        (365494 * 3600, "41.7 years"),
        (1e12, "31,688.1 years"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (936, "936"),
        (1000, "1.0 k"),
        (105216, "105.2 k"),
        (999_940, "999.9 k"),
        (999_960, "1.0 M"),
        (3_300_000, "3.3 M"),
        (124_439_808, "124.4 M"),
        (1_558_000_000, "1.6 G"),
    ],
)
def test_quantity(number, text):
    assert quantity(number) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (640 * 2**20, "640.0 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (1.2 * 2**30, "1.2 GiB"),
        (5 * 2**40, "5.0 TiB"),
    ],
)
def test_size(size_bytes, text):
    assert size(size_bytes) == text


def test_columns_of_numbers_are_right_aligned():
    assert [column.justify for column in grid("run", "seed").columns] == ["left", "right"]
