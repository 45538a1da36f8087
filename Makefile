# Two commands: `make serve` answers requests on this machine, `make test` proves the code.
# PORT=8000 MODEL=smollm2-135m-instruct ARGS="--max-num-seqs 64" change what is served; PYTHON names the interpreter.

VENV   ?= .venv
PYTHON ?= python3
PORT   ?= 8000
MODEL  ?=
ARGS   ?=
TESTS  ?=
# One test process a core; each starts in seconds and takes up to 2 GiB.
PYTEST_WORKERS ?= logical

BIN      := $(VENV)/bin
PIP      := $(VENV)/bin/pip install --disable-pip-version-check $(if $(CI),--quiet)
NATIVE   := CMakeLists.txt $(shell find csrc -type f)
# An editable install follows the Python files; what is built must be built again when its sources change.
SERVE_STAMP := $(VENV)/.installed
TEST_STAMP  := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.PHONY: help serve test lint clean

help:
	@echo "make serve   start the server on 127.0.0.1:$(PORT) with the demo model (PORT=, MODEL=, ARGS=)"
	@echo "make test    run the whole test suite (TESTS='tests/api -k chat' for a part of it)"
	@echo "make lint    check format and lint"
	@echo "make clean   remove what was built, $(VENV) included"

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else \
		"Python 3.11 to 3.13 is needed; this is %d.%d. Name another with PYTHON=python3.12" % v[:2])'
	@echo "==> making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(SERVE_STAMP): pyproject.toml $(NATIVE) | $(BIN)/pip
	@echo "==> installing pagedserve (the first time takes a few minutes: torch is large)"
	@$(PIP) --editable .
	@touch $@

$(TEST_STAMP): pyproject.toml $(NATIVE) | $(BIN)/pip
	@echo "==> installing pagedserve with what its tests need"
	@$(PIP) --editable '.[test]'
	@touch $@ $(SERVE_STAMP)

serve: $(SERVE_STAMP)
	@$(BIN)/pagedserve serve --port $(PORT) $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(TEST_STAMP)
	@$(BIN)/python -m pytest --numprocesses $(PYTEST_WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 2 $(TESTS)

lint: $(TEST_STAMP)
	@$(BIN)/ruff format --check . && $(BIN)/ruff check .

clean:
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .ruff_cache
