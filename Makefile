# `make demo` and `make test` need Python 3.11 or later with pip and nothing else:
# each first builds the virtual environment where it is missing or out of date. Both may be run again.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WITH_LIBRARIES := $(VENV)/.with-libraries

# Threads that wait by spinning slow each other down many times over where other programs want the same cores.
export OMP_WAIT_POLICY ?= PASSIVE
# Freed memory is kept, which is much faster than to take it from the system again.
export MALLOC_MMAP_THRESHOLD_ ?= 33554432
export MALLOC_TRIM_THRESHOLD_ ?= 268435456

.PHONY: help demo test soak lint docs format clean

help: ## Show what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## Solve a real prompt with three strategies on the CPU and draw the trees
	$(BIN)/python examples/demo.py

test: lint docs $(WITH_LIBRARIES) ## Lint, types, import contract, documentation, tests
	@echo '== tests'
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest --numprocesses auto --dist worksteal

soak: $(INSTALLED) ## Three minutes of clients of every kind on a real server; TREEWISE_SOAK_SECONDS=1800 for half an hour
	$(BIN)/python -m pytest -m stress tests/server/test_soak.py -s

lint: $(INSTALLED) ## Lint, types, import contract
	@echo '== style'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo '== types'
	$(BIN)/mypy
	@echo '== import contract'
	$(BIN)/lint-imports

docs: $(INSTALLED) ## Build the documentation in build/docs; needs no network
	@echo '== documentation'
	$(BIN)/python -m sphinx --quiet --fresh-env --write-all --fail-on-warning --keep-going docs build/docs

format: $(INSTALLED) ## Put the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the virtual environment, what was built and the tools' caches
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "treewise needs Python 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The heavier libraries that there are adapters for: only their tests need them.
$(WITH_LIBRARIES): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,eval,reasoners,ray]'
	@touch $@
