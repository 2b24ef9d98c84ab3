"""Settings of the benchmarks' tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are small: a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
