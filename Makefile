# make setup   a virtual environment in .venv with everything the project needs
# make test    what CI runs: format, lint, types, tests; minutes
# make test-all  the same with the tests that are slow by nature: shaped links, all rounds of hostile messages
# make demo    AdaptSFL against three others on digits with 20 simulated devices; about a minute
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

# Tests of real datasets read them from here; without the folder they are skipped.
ifneq ($(wildcard ../shared/data/.),)
test test-all: export ADAPTSFL_DATA ?= $(abspath ../shared/data)
endif

# Idle threads sleep instead of spinning, which on busy cores keeps others from the work that they wait for.
export OMP_WAIT_POLICY ?= PASSIVE

# One thread: the tests' networks are so small that more of them mostly wait for each other, and records are compared
# byte for byte, which takes the same number of threads everywhere.
test test-all: export OMP_NUM_THREADS ?= 1

# Files side by side, one on each core; tests of one file share what they set up.
PYTEST := $(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

.PHONY: setup test test-all check format demo bench wire clean

setup: .venv/installed

# torch comes first and alone: a package that pulls torch by itself would bring another build.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("AdaptSFL needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[train,dev]'
	@touch $@

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check
	$(PYTEST) -m "not slow"

test-all: check
	$(PYTEST)

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One thread: this network is so small that more of them mostly wait for each other, above all on busy cores.
demo: export OMP_NUM_THREADS ?= 1
demo: setup
	$(BIN)/adaptsfl simulate recipes/digits.toml
	@echo "Open runs/digits/report.html in a browser."
	@if [ -n "$$DISPLAY" ] && command -v xdg-open > /dev/null; then xdg-open runs/digits/report.html; fi

# What parties say to each other, from its description.
wire: setup
	$(BIN)/python -m grpc_tools.protoc -Isrc/adaptsfl/deploy --python_out=src/adaptsfl/deploy --pyi_out=src/adaptsfl/deploy src/adaptsfl/deploy/wire.proto

bench: setup
	$(BIN)/python benchmarks/planner.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
