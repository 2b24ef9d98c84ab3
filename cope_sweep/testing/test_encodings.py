"""The contract of encodings, for every registered encoding with its default fields."""

import pytest

from cope_sweep.positions import ENCODINGS
from cope_sweep.testing.encoding_contract import EncodingContract
from cope_sweep.testing.options import registered


class TestRegisteredEncodings(EncodingContract):
    """Each encoding alone; subclass the contract to test other fields and compositions."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "spec" in metafunc.fixturenames:
            metafunc.parametrize("spec", registered(metafunc.config, ENCODINGS, "EncodingContract", {}))
