"""The contract of encodings, for every registered encoding with its default fields."""

from __future__ import annotations

from typing import Any

import pytest

from cope_sweep.positions import ENCODINGS
from cope_sweep.testing.encoding_contract import EncodingContract
from cope_sweep.testing.options import kinds_to_test


class TestRegisteredEncodings(EncodingContract):
    """Each encoding alone; subclass the contract to test other fields and compositions."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "spec" in metafunc.fixturenames:
            only = kinds_to_test(metafunc.config)
            metafunc.parametrize("spec", [_spec(kind) for kind in ENCODINGS if not only or kind in only])


def _spec(kind: str) -> Any:
    """A parameter: the kind, or a skip if it cannot be constructed without fields."""
    required = [name for name, field in ENCODINGS[kind].model_fields.items() if field.is_required()]
    marks = (
        [pytest.mark.skip(reason=f"{kind} needs {', '.join(required)}; subclass EncodingContract")] if required else []
    )
    return pytest.param(kind, id=kind, marks=marks)
