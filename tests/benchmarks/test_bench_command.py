import pytest
from cope_benchmarks.command import _check_writable

from cope_sweep.errors import UserError


def test_a_folder_that_cannot_be_kept_in_is_named_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"--keep .*file/results: .*name a folder"):
        _check_writable(tmp_path / "file" / "results")


def test_a_folder_is_made_and_left_empty(tmp_path):
    _check_writable(tmp_path / "new" / "results")
    assert list((tmp_path / "new" / "results").iterdir()) == []
