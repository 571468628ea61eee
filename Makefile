# One command sets up and runs the main job (`make demo`), one sets up and tests
# (`make test`). Both need nothing but this clone, Python 3.11+ and pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Several torch processes on few cores fight over OpenMP threads; one each is faster.
export OMP_NUM_THREADS ?= 1
WORKERS ?= 2

.PHONY: help setup demo test test-all trust mutation lint types unit format clean

help:
	@echo "make setup     create $(VENV) and install curvedp with its tools"
	@echo "make demo      train dp-sgd, dp-kfc and dp-ngd beside the non-private reference"
	@echo "make test      lint, types and tests (under 10 minutes on 2 cores)"
	@echo "make test-all  the same with the slow tests"
	@echo "make trust     attack the promises and print one page of figures (20 minutes)"
	@echo "make mutation  planted bugs and generated mutants: how many do tests notice"
	@echo "make lint      ruff, import contracts, spelling"
	@echo "make format    let ruff rewrite the code"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("curvedp needs Python 3.11 or newer, and this is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: lint types unit

test-all: lint types setup
	$(BIN)/python -m pytest -n $(WORKERS)

trust: setup
	$(BIN)/python -m tests.trust.page --json trust.json $(TRUST)

mutation: setup
	$(BIN)/python -m tests.trust.planting
	$(BIN)/python -m tests.trust.mutants --count $(or $(MUTANTS),60)

unit: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs examples benchmarks README.md CHANGELOG.md CONTRIBUTING.md

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
