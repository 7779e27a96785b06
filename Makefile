# One word for each thing one does here: `make help`. Every target does its own set-up first.
.DEFAULT_GOAL := check
SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export HF_HUB_OFFLINE := 1
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Rings one and two: no engine, no server, no cluster. The rest has markers.
FAST := not (engines or postgres or slow or slurm or gpu)
ARGS ?=

.PHONY: help setup check test demo demo-slurm soak nightly format lint types layers unit marked live bless db-revision clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: ## install and build what is missing (seconds when nothing is)
	@scripts/setup.sh

check: lint types layers unit ## before every commit: linters, types, layers, fast tests (< 2 min)

# A real Slurm is mostly waited for, so what is tested with it goes on beside all the rest; what
# that says comes at the end.
test: ## everything, as CI runs it (ARGS="..." goes to pytest)
	@scripts/setup.sh tiny swapping
	@scripts/beside.sh "$(MAKE) --no-print-directory lint types layers unit marked" \
		"$(MAKE) --no-print-directory live"

demo: ## three GRPO jobs share one hold, shared against alone (<= 8 min; ARGS="--help" for its knobs)
	@scripts/setup.sh tiny
	$(BIN)/plexrl demo $(ARGS)

demo-slurm: ## the same on a private Slurm: several users, a node lost, a hold renewed (<= 15 min, root; ARGS="--help")
	@scripts/setup.sh tiny
	$(BIN)/python -m tests.slurm_live.demo $(ARGS)

# Part of `make test` with the fakes, for SOAK_MINUTES of 3 unless said otherwise.
soak: ## eight jobs with memory for two, random kill -9: nobody may differ (SOAK_MINUTES=20; ARGS="--engine deepspeed")
	@scripts/setup.sh tiny
	$(BIN)/python -m tests.soak $(ARGS)

# A property on each core; prints a line every thousand examples. A failure prints what repeats it.
nightly: setup ## what the scheduler promises, with 10^5 examples each (hours; PLEXRL_EXAMPLES=5000)
	PLEXRL_EXAMPLES=$${PLEXRL_EXAMPLES:-100000} $(PYTEST) -n $$(nproc) --dist worksteal -s -v --timeout 0 tests/core/test_*_machine.py tests/core/test_*_properties.py tests/sim/test_run_properties.py tests/daemons/test_tier_steps.py tests/daemons/test_tier_properties.py $(ARGS)
	$(BIN)/python -m benchmarks.starvation

format: setup ## rewrite: ruff format and its safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## ruff, no rewriting
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup ## mypy --strict
	$(BIN)/mypy

layers: setup ## who may import whom (import-linter)
	$(BIN)/lint-imports

unit: setup
	$(PYTEST) -n 2 --dist worksteal -m "$(FAST)" $(ARGS)

# Nothing that was promised here may be skipped. What a killed service leaves of the SDK's connections
# is blamed on whichever test is running when it is collected, so that warning is no error here.
MARKED := PLEXRL_TESTS_MUST_RUN=slurm,postgres,engines $(PYTEST) -W ignore:unclosed:ResourceWarning --durations=10 \
	--dist loadfile --no-loadscope-reorder

# One worker more than cores: each waits for the others' processes now and then.
marked: ## what starts engines, servers and daemons, but for a real Slurm
	@scripts/setup.sh tiny swapping
	$(MARKED) -n 3 -m "not ($(FAST)) and not slurm" $(ARGS)

live: ## what needs a real Slurm: on two private clusters at once (root)
	@scripts/setup.sh tiny
	$(MARKED) -n 2 -m slurm tests/slurm_live $(ARGS)

bless: setup ## rewrite the golden files in tests/golden, then read the diff
	$(PYTEST) -m "$(FAST)" --bless $(ARGS)

db-revision: setup ## a new migration: make db-revision m="add a column to jobs"
	@test -n "$(m)" || { echo 'say what it does: make db-revision m="..."' >&2; exit 64; }
	$(BIN)/python scripts/db_revision.py "$(m)"

clean: ## remove what tests, tools and the demo left (keeps .venv, .cache and models)
	rm -rf demo build dist *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -type d -prune -exec rm -rf {} +
