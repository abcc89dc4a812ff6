# make demo | test | test-all | check | bench: each makes the environment first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# uv reads neither PIP_FIND_LINKS nor pip's configuration; without this it would miss a CPU wheel that pip sees.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.PHONY: setup demo test test-all check bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hatch_build.py src/evenstep/worker/comm/sums.c
	@echo "making the environment in $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "evenstep needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
	@# Bytecode is compiled once, here: where Python may not write it, every import of torch would compile it anew.
	@$(BIN)/python -m pip install -q --disable-pip-version-check uv 2>/dev/null \
	  && $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[dev]' \
	  || $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest

test-all: $(STAMP)
	$(BIN)/python -m pytest -m 'not gpu'

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python bench/step_cost.py
	$(BIN)/python bench/input.py
	$(BIN)/python bench/start.py
	$(BIN)/python bench/replicas.py
	$(BIN)/python bench/parts.py
	$(BIN)/python bench/advice.py
	$(BIN)/python bench/allreduce.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
