"""Settings of the benchmarks' tests."""

from tests.kernels.conftest import one_thread  # noqa: F401 - a fixture of all tests
