"""Settings of the kernels' tests. Without a C++ compiler, attention uses the blocked path, and test_native.py is skipped."""

import os
import shutil

import pytest
import torch
from hypothesis import settings

# Examples are slow or fast by their size, and machines differ: no deadline. By default examples are the same in every
# run; HYPOTHESIS_PROFILE=random draws new ones.
settings.register_profile("kernels", deadline=None, derandomize=os.environ.get("HYPOTHESIS_PROFILE") != "random")
settings.load_profile("kernels")


def pytest_collection_modifyitems(items):
    if any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "c++") if name):
        return
    reason = pytest.mark.skip(reason="no C++ compiler: attention falls back to blocked PyTorch here")
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
