# make demo | test | test-all | check | bench | bench-quick | bench-setup: each makes the environment first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
BENCH_VENV := .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.stamp
BENCH_READY = $(if $(wildcard $(BENCH_STAMP)),$(BENCH_STAMP),$(STAMP))
BENCH_PYTHON = $(dir $(BENCH_READY))bin/python
# uv reads neither PIP_FIND_LINKS nor pip's configuration; without this it would miss a CPU wheel that pip sees.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.PHONY: setup demo test test-all check bench bench-setup bench-quick bench-more clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hatch_build.py src/evenstep/distributed/shm/allreduce.c src/evenstep/distributed/shm/seeds.c
	@echo "making the environment in $(VENV); this takes some minutes, once ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "evenstep needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
	@# Bytecode is compiled once, here: where Python may not write it, every import of torch would compile it again.
	@$(BIN)/python -m pip install -q --disable-pip-version-check uv 2>/dev/null \
	  && $(BIN)/uv pip install -q --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[dev]' \
	  || $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
	@echo "done; for the command: source $(VENV)/bin/activate"

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

# More processes than two cores: tests wait for processes, sockets and timers most of the time. Long files first: those of
# tests/pure, which are short, fill what is left. Bytecode is compiled first: with PYTHONDONTWRITEBYTECODE, every process
# of a test would compile evenstep again.
PROCESSES ?= 4
test: $(STAMP)
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -p tests.forked -p tests.parallel --processes $(PROCESSES) tests/process tests/faults tests/browser tests/pure

test-all: $(STAMP)
	$(BIN)/python -m pytest -p tests.parallel --processes 3 -m 'not gpu'

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The peers have an environment of their own; without it, .venv races those that it has.
bench-setup: $(BENCH_STAMP)

$(BENCH_STAMP): pyproject.toml constraints.txt bench/requirements.txt
	@echo "making the environment of the peers in $(BENCH_VENV) ..."
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip install -q --disable-pip-version-check uv 2>/dev/null \
	  && $(BENCH_VENV)/bin/uv pip install -q --compile-bytecode --python $(BENCH_VENV)/bin/python \
	    -c constraints.txt -r bench/requirements.txt -e . \
	  || $(BENCH_VENV)/bin/python -m pip install -q --disable-pip-version-check \
	    -c constraints.txt -r bench/requirements.txt -e .
	@touch $(BENCH_STAMP)

bench: $(BENCH_READY)
	$(BENCH_PYTHON) bench/suite.py $(if $(DATA),--data $(DATA))

# Whether what evenstep says of itself is right: the parts of a step, its advice, what comparing replicas costs,
# how soon it reacts to a fault.
bench-more: $(STAMP)
	$(BIN)/python bench/parts.py --out bench/results/$(shell date +%F)-parts-cpu.json
	$(BIN)/python bench/advice.py bench/results/$(shell date +%F)-advice-cpu.json
	$(BIN)/python bench/replicas.py bench/results/$(shell date +%F)-replicas-cpu.json
	$(BIN)/python bench/reactions.py bench/results/$(shell date +%F)-reactions-cpu.json

bench-quick: $(BENCH_READY)
	@$(BENCH_PYTHON) bench/quick.py

clean:
	rm -rf $(VENV) $(BENCH_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
