#!/usr/bin/env bash
# Train the tiny model on the plays with two ranks: full precision, 8 bits, 4 bits; then compare,
# and tell what the runs would have taken on slower links than this machine's memory.
set -euo pipefail

python=${PYTHON:-.venv/bin/python}
runs=${RUNS:-runs/demo}

for comm in w32g32 w8g8 w4g4; do
  "$python" -m qsdp train --preset tiny --nproc 2 --comm "$comm" --folder "$runs/$comm" --overwrite
done
"$python" -m qsdp report "$runs"/{w32g32,w8g8,w4g4}
echo
"$python" -m qsdp plan --runs "$runs"/{w32g32,w8g8,w4g4} --bandwidth 0.1 1 10
