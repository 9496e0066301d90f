#!/usr/bin/env bash
# The report of a machine with a GPU: kernels against the reference, bandwidth, FSDP2 steps, ranks
# as threads, NCCL, sanitizers, losses. Runs from a copy of the tree, nothing installed:
#
#     OUT=folder bash benchmarks/gpu_report.sh [--parts 1,3] [--device cpu] [--seconds 570]
#
# PYTHON names the interpreter that has torch with CUDA and Triton (default: .venv, else python3).
# The folder gets report.txt, summary.txt and traces; without OUT it is one in benchmarks/results.
set -euo pipefail
OUT="$(realpath -m "${OUT:-$(dirname "$0")/results/gpu-$(date -u +%Y-%m-%d)}")"
cd "$(dirname "$0")/.."
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m benchmarks.gpu --out "$OUT" "$@"
