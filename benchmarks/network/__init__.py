"""Step times between network namespaces; `python -m benchmarks.network` runs it."""
