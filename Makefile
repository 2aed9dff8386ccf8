# From a machine with only Python: every target builds .venv when it is missing or older than
# pyproject.toml and constraints.txt. `make help` lists the targets.

PYTHON ?= python3
PORT   ?= 5006
JOBS   ?= 3
TORCH  ?= torch==2.13.0
ROOT   ?= sample_ckpts
SHOTS  ?=

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt
DEPS := pyproject.toml constraints.txt

# One BLAS thread a test process: the processes already fill the cores. JOBS is one more than the cores of a small
# machine: a quarter of the time, a process waits for a browser, a kernel or a disk. Bytecode is written whatever the
# environment says: otherwise each of some hundred processes compiles the package anew, and each worker every test.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# nbmake, which `make notebooks` needs, takes each process 1.6 s to import.
TESTS  := $(PYTEST) -p no:nbmake -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint bench notebooks docs screenshots clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: PYTHON=$(PYTHON) PORT=$(PORT) ROOT=$(ROOT) JOBS=$(JOBS) TORCH=$(TORCH)"

demo: $(VENV)/.demo-ready ## the dashboard on sample_ckpts/ (PORT, ROOT)
	$(BIN)/workbench serve $(ROOT) --port $(PORT) --show

# Whole files go to the workers, in the order of tests/conftest.py.
test: $(VENV)/.test-ready ## every test but the slow ones, with browser and notebooks
	$(TESTS) -o faulthandler_exit_on_timeout=true --max-worker-restart 2

test-all: lint ## lint, then the whole suite with its slow tests
	WORKBENCH_SLOW=1 $(TESTS)

lint: $(VENV)/.test-ready ## ruff check, ruff format --check, mypy
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

bench: $(VENV)/.test-ready ## benchmarks/, with the physical floor beside each result
	$(BIN)/python -m benchmarks

notebooks: $(VENV)/.test-ready ## execute notebooks/ (they are stored without outputs)
	$(PYTEST) --nbmake notebooks

docs: $(VENV)/.test-ready ## the site, into build/docs; a broken link is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -b html docs build/docs

screenshots: $(VENV)/.test-ready ## docs/images/*.png of every tab; SHOTS=FOLDER: light and dark at both widths, there
	$(BIN)/python -m tests.screenshots $(SHOTS)

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone: resolved together with the rest, pip may trade a local CPU build for a
# CUDA one. setuptools is installed rather than fetched for the build, so constraints.txt pins it too.
$(VENV)/.torch-ready: constraints.txt | $(BIN)/python
	@echo "installing torch into $(VENV) (once, some minutes)"
	$(PIP) setuptools $(TORCH)
	@touch $@

$(VENV)/.demo-ready: $(DEPS) | $(VENV)/.torch-ready
	$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.test-ready: $(DEPS) | $(VENV)/.torch-ready
	$(PIP) --no-build-isolation -e '.[test,lab,zstd,docs,dev]'
	@touch $@ $(VENV)/.demo-ready
