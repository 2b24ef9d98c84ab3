import pytest

from cope_sweep.cli.output import duration, estimated_time, quantity
from cope_sweep.read.queries import plans


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
        (86399, "1 d 0 h"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
        (10 * 86400 - 1800, "10 d"),
        (364 * 86400, "364 d"),
        (366 * 86400, "1.0 y"),
        (1.5 * 365.25 * 86400, "1.5 y"),
        (9.96 * 365.25 * 86400, "10 y"),
        (12 * 365.25 * 86400, "12 y"),
        (365494 * 3600, "42 y"),
        (1e12, "31,688 y"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.fixture(params=[False, True], ids=["no GPU", "a GPU"])
def gpu(request, tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "GPU_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if request.param:
        (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    return request.param


def test_years_without_the_gpu_that_may_be_used_are_not_given(gpu):
    year_s = 365.25 * 86400
    assert estimated_time(2 * year_s, 2 * year_s, lacks_gpu=not gpu) == ("about 2.0 y" if gpu else "needs a GPU")
    assert estimated_time(2 * year_s, 2 * year_s, lacks_gpu=False) == "about 2.0 y"
    assert estimated_time(0.5 * year_s, 0.5 * year_s, lacks_gpu=not gpu) == "about 183 d"
    assert estimated_time(100, 20, lacks_gpu=not gpu) == (
        "about 20 s, or 1 min 40 s if the machine stays as busy as now"
    )


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
