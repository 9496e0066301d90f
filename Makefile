# make demo: set up and run the main job.  make test: set up, lint, types, all tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py constraints.txt qsdp/kernels/cpu.cpp $(wildcard qsdp/kernels/native/*.h)

.PHONY: setup setup-dev demo test dist compatibility lint types fuzz bench readme clean
.DELETE_ON_ERROR:

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

# constraints.txt pins every package, torch==2.13.0 among them: a range would take a CUDA build.
$(VENV)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo,dev]'
	touch $@

demo: setup
	bash recipes/demo.sh

# Two files of tests run beside each other; those of one file share what they start. Should tests
# run into their timeouts on a slow machine, WORKERS=0 runs one file after the other.
WORKERS ?= 2
test: lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The distributed tests on the oldest torch, two between and the newest, each in an environment of
# its own (4 to 7 GB), and the table in docs/compatibility.md.
compatibility: setup
	$(BIN)/python tests/compatibility.py --python $(PYTHON)

# The sdist and the wheel in dist/, installed without a compiler on each of these Pythons.
PYTHONS ?= python3.11 python3.12 python3.13
dist: setup-dev
	$(BIN)/python tests/packages.py --python $(PYTHONS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

# Longer random comparison of the native kernels with the reference, under AddressSanitizer.
fuzz: setup-dev
	$(BIN)/python tests/fuzz_kernels.py

bench: setup
	$(BIN)/qsdp bench kernels

# The tables of README and docs/networks.md, from what runs wrote: runs/demo and
# benchmarks/*/results.
readme: setup
	$(BIN)/python benchmarks/readme_tables.py
	$(BIN)/python -m benchmarks.network.tables

clean:
	rm -rf $(VENV) build dist *.egg-info runs/demo
