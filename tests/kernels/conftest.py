"""Where no C++ compiler is found the native kernels are not there, and the blocked path is what runs: said, and skipped."""

import os
import shutil

import pytest


def pytest_collection_modifyitems(items):
    if any(shutil.which(name) for name in (os.environ.get("CXX"), "g++", "c++") if name):
        return
    reason = pytest.mark.skip(reason="no C++ compiler: attention falls back to blocked PyTorch here")
    for item in items:
        if item.path.name == "test_native.py":
            item.add_marker(reason)
