"""Settings of the kernels' tests. Without a C++ compiler, attention is computed by PyTorch, and test_native.py is skipped."""

import os
import shutil

import pytest
import torch


def pytest_collection_modifyitems(items):
    if any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "c++") if name):
        return
    reason = pytest.mark.skip(reason="no C++ compiler: attention falls back to PyTorch here")
    for item in items:
        if item.path.name == "test_native.py":
            item.add_marker(reason)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small: a second thread costs more than it gives, above all where tests run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poisoned_memory():
    """New memory, and scratch memory of the native kernels, is NaN, so that reading what was not written shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
