# Each target sets up what it needs, in .venv, from the package registry alone.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv

.PHONY: quickstart test test-fast lint format bench clean help

help:            ## What there is
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / — /'

quickstart: .venv/run.stamp   ## From a clone to a table: train the quick-start ablation, and show it
	$(BIN)/cope-sweep run quickstart

test: .venv/test.stamp   ## Every test
	$(BIN)/python -m pytest

test-fast: .venv/test.stamp   ## The tests that take a second at most each: under 3 minutes on 2 cores
	$(BIN)/python -m pytest -m fast

lint: .venv/test.stamp   ## Style, types, and which way imports run
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/test.stamp   ## Put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/run.stamp   ## Measure the sweep on this machine
	$(BIN)/cope-sweep bench sweep

clean:   ## Remove the environment (not the store)
	rm -rf .venv

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "cope-sweep needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

.venv/run.stamp: pyproject.toml | $(UV)
	@echo "Installing into .venv (about 6 GB, once) …"
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --editable .
	@touch $@

.venv/test.stamp: pyproject.toml | $(UV)
	@echo "Installing into .venv (about 6 GB, once) …"
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --editable '.[test,lint]'
	@touch $@ .venv/run.stamp
