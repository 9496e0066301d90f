"""The kernels beside what others offer; `python -m benchmarks.kernel_peers` runs it."""
