# Everything runs in .venv, which is made from the pinned versions in constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo docs test test-slow test-faults lint bench bench-curvature bench-peers clean
demo: .venv/installed
	$(BIN)/python -m fedjax_flat demo --run runs/demo

# The site, in build/site; search needs a server: python -m http.server --directory build/site
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_docs.py

test: .venv/installed
	$(BIN)/python -m pytest

test-slow: .venv/installed
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m slow

# Kills, damages and fills disks at random; prints what was lost.
test-faults: .venv/installed
	$(BIN)/python tests/faults.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy

# With the peers that `make bench-peers` put into an environment of their own, if it did.
bench: .venv/installed
	$(firstword $(wildcard .venv-bench/bin/python) $(BIN)/python) benchmarks/run.py

bench-curvature: .venv/installed
	$(firstword $(wildcard .venv-bench/bin/python) $(BIN)/python) benchmarks/curvature.py

# torch first and alone, or CUDA packages follow.
bench-peers:
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet torch==2.13.0
	.venv-bench/bin/python -m pip install --quiet --requirement benchmarks/requirements.txt --editable '.[onednn]'

.venv/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedjax_flat needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-bench build *.egg-info .pytest_cache .mypy_cache .ruff_cache
