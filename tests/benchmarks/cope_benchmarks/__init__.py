"""Benchmarks of the kernels, the sweep and the data; `cope-sweep bench` runs them."""
