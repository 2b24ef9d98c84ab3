"""Contract suites: tests that every encoding and every task has to pass, built-in or from a plugin.

    python -m cope_sweep.testing --plugins my_package.my_encoding --only my_encoding
    COPE_SWEEP_PLUGINS=my_package.my_encoding pytest --pyargs cope_sweep.testing -k my_encoding

Both commands run the suites on registered classes: the first with its own configuration, the second with yours and
your conftest.py. Subclass `EncodingContract` or `TaskContract` in your own tests to choose the specs, and to add tests:

    from cope_sweep.testing import EncodingContract

    class TestMyEncoding(EncodingContract):
        specs = [MyEncoding(), [MyEncoding(decay=2.0), "rope"]]
"""

import sys

try:
    import pytest
except ModuleNotFoundError:
    sys.exit("error: the contract suites need pytest; install it with: pip install pytest")

# Before the imports, so that failed assertions show the values.
pytest.register_assert_rewrite("cope_sweep.testing.encoding_contract", "cope_sweep.testing.task_contract")

from cope_sweep.testing.encoding_contract import EncodingContract  # noqa: E402
from cope_sweep.testing.task_contract import TaskContract  # noqa: E402

__all__ = ["EncodingContract", "TaskContract"]
