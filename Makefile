# `make` lists the targets. Without any of them, and without an install: PYTHONPATH=src python3 -m tileweave --help

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep '^GPU ')

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-fast test-integrations fuzz lint bench sanitize site dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## create the environment with the package and its tools (PYTHON=, VENV=, TORCH_INDEX= change how)

$(STAMP): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
ifeq ($(GPUS),)
	@if $(PIP) install --retries 0 --no-deps --index-url $(TORCH_INDEX) -c constraints-cpu.txt torch; \
	then $(PIP) install -c constraints-cpu.txt -e '.[dev]'; \
	else echo 'No CPU build of torch at $(TORCH_INDEX): taking the default one.'; $(PIP) install -e '.[dev]'; fi
else
	$(PIP) install -e '.[dev]'
endif
	@touch $@

demo: venv ## run, check and draw every operator; needs no GPU
	$(BIN)/tileweave demo

test: venv ## run the tests this machine can run; WORKERS= other than 2 processes, 0 for none (GPUs: one file at a time)
	$(BIN)/python -m pytest -q -n $(if $(GPUS),0,$(WORKERS)) $(BY_FILE)

test-fast: venv ## run the tests of the edit loop: no simulator, each operator interpreted and explored once (docs/testing.md)
	$(BIN)/python -m pytest -q -n $(WORKERS) $(BY_FILE) -m fast tests/pure tests/cpu tests/explore

# Processes take files in the order of tests/conftest.py, long ones first, so that they end together.
BY_FILE := --dist loadfile --no-loadscope-reorder

# Tests start many processes: without bytecode each compiles the package again.
test test-fast test-integrations: export PYTHONDONTWRITEBYTECODE :=

# Frameworks have many dependencies of their own, so they have an environment of their own.
INTEGRATIONS := $(VENV)-integrations

test-integrations: ## run the tests of tileweave.integrations against the real frameworks, in an environment of their own (Python 3.11 or newer)
	@test -e $(INTEGRATIONS)/.installed || $(MAKE) venv VENV=$(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip --disable-pip-version-check --quiet install -r requirements-integrations.txt
	$(INTEGRATIONS)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps sglang==0.5.23 torchrec==1.9.2 fbgemm-gpu-cpu==1.8.0
	$(INTEGRATIONS)/bin/python -m pytest -q -n $(WORKERS) $(BY_FILE) tests/integrations

fuzz: venv ## explore 100,000 interleavings of the kernels of every operator, then mutants of the kernels (RUNS=, FIRST=, MUTANTS= change how many); needs no GPU
	$(BIN)/tileweave fuzz --runs $(or $(RUNS),105000) --first $(or $(FIRST),0)
	-$(BIN)/tileweave mutate --sample $(or $(MUTANTS),0)

lint: venv ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

sanitize: venv ## run compute-sanitizer over the kernels that run on one GPU, three tools (about an hour); needs a GPU
	$(BIN)/python tools/sanitize.py

bench: venv ## time every operator against its unfused path, up to 15 minutes each (OPS= some); needs GPUs
	@for op in $(or $(OPS),`$(BIN)/python -c 'import tileweave; print(*tileweave.OPERATORS)'`); do \
	echo "$$op"; $(BIN)/tileweave bench $$op || exit 1; done

site: venv ## build the documents as a site that opens from disk, site/index.html; warnings are errors
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || $(PIP) install -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open site/index.html"

TRY := build/try/bin/python -m pip --disable-pip-version-check --quiet

dist: venv ## build sdist and wheel, install the wheel into a fresh environment and try it there
	@$(BIN)/python -c 'import build' 2>/dev/null || $(PIP) install build
	rm -rf dist build/try
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/try
ifeq ($(GPUS),)
	-@$(TRY) install --retries 0 --no-deps --index-url $(TORCH_INDEX) -c constraints-cpu.txt torch
endif
	$(TRY) install $(if $(GPUS),,-c constraints-cpu.txt) "`ls dist/*.whl`[demo]" || $(TRY) install "`ls dist/*.whl`[demo]"
	cd build/try && bin/tileweave --version && bin/python -m tileweave doctor && bin/tileweave check --world 2 --calls 2 --device cpu

clean: ## remove the default environment, build outputs and caches
	rm -rf .venv .venv-integrations build dist site .pytest_cache .ruff_cache .hypothesis
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +
