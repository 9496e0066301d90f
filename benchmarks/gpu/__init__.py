"""What a machine with one GPU can tell in ten minutes: `OUT=folder bash benchmarks/gpu_report.sh`.

Parts run in order of value (:mod:`benchmarks.gpu.__main__`), each a process of its own. Ranks are
simulated where one GPU cannot hold several: torch's fake process group for time and memory
(:mod:`benchmarks.gpu.fake`), threads for correctness (:mod:`benchmarks.gpu.threads`). All of it
runs on CPU too, in the test suite.
"""
