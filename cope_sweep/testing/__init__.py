"""Contract suites for encodings and tasks, built-in and plugins: `pytest --pyargs cope_sweep.testing`."""
