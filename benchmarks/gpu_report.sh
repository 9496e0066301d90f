#!/usr/bin/env bash
# On a machine with a GPU: compare the compiled Triton kernels with the reference, measure them,
# and keep the dated report. Run from anywhere:
#
#     bash benchmarks/gpu_report.sh
#
# PYTHON names the interpreter that has torch with CUDA, Triton and pytest (default: .venv, else
# python3); arguments go to the benchmark (--mib 256 on a small GPU).
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
"$PYTHON" -c 'import torch; assert torch.cuda.is_available(), "torch sees no CUDA device"'

report="benchmarks/results/gpu-$(date -u +%Y-%m-%d).txt"
checked="$(mktemp)"
trap 'rm -f "$checked"' EXIT
unset TRITON_INTERPRET
"$PYTHON" -m qsdp.check | tee "$checked"
"$PYTHON" -m pytest tests/test_kernels_triton.py -q | tee -a "$checked"
"$PYTHON" -m benchmarks.kernel_peers --device cuda --bars --out "$report" "$@"
{
    printf '\nThe comparison before:\n\n'
    cat "$checked"
} >>"$report"
printf 'report: %s\n' "$report"
