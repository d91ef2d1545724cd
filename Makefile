# hvpipe on a fresh machine, from Python 3.10+ and a C++17 compiler alone: `make train`, then `make test`.
#
#   make train            train examples/train.py on 2 ranks                 (RANKS=4 ARGS="--epochs 3" to vary it)
#   make test             everything that CI runs
#   make test TF=2.18.1   all tests on that TensorFlow, in a venv of its own
#   make peers            .venv-peers, where Horovod runs beside hvpipe and TensorFlow, for comparisons (10 minutes once)
#   make peers-test       two steps of each of them there
#   make setup | lint | plan | rest | fast | keras | cuda | wheel | format | clean
#
# PYTHON names the interpreter to start from, TF the TensorFlow. What is set up already is not set up again.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

DEFAULT_TF := $(shell sed -n 's/^tensorflow==//p' constraints.txt)
OTHER_TF := 2.18.1
TF ?= $(DEFAULT_TF)
PYTHON ?=
RANKS ?= 2
ARGS ?=
RUN_DIR ?= runs/digits
# Tests that run at a time: those that compute keep two ranks busy, and beside them there is always one that waits.
WORKERS ?= $(shell n=$$(( $$(nproc) / 2 )); echo $$(( n > 2 ? n + 1 : 3 )))

VENV := .venv$(if $(filter-out $(DEFAULT_TF),$(TF)),-tf$(TF))
CONSTRAINTS := constraints$(if $(filter-out $(DEFAULT_TF),$(TF)),-tf$(TF)).txt
BIN := $(VENV)/bin
SETUP := .ci/setup.sh
PYTEST := $(BIN)/pytest
SIDE_BY_SIDE := -n $(WORKERS) --maxschedchunk 1
CPP_FILES := find csrc -name '*.h' -o -name '*.cc' -o -name '*.cu'

export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)
# What a cluster's modules have set: their packages and their MPI would come before the venv's own.
unexport PYTHONPATH PYTHONHOME
ifneq ($(LD_LIBRARY_PATH),)
export LD_LIBRARY_PATH := $(CURDIR)/$(VENV)/lib:$(LD_LIBRARY_PATH)
endif

.PHONY: help setup train test lint plan rest fast keras cuda wheel other other-setup peers peers-test format clean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# READY says that a make above this one has set up.
setup:
	@[ -n "$(READY)" ] || $(SETUP) $(VENV) $(CONSTRAINTS) "$(PYTHON)"

train: setup
	@echo "==> training examples/train.py on $(RANKS) ranks"
	@mkdir -p $(RUN_DIR)
	@$(BIN)/hvpipe run -np $(RANKS) --trace $(RUN_DIR)/trace.json \
	    examples/train.py --save $(RUN_DIR)/model.keras --progress $$([ -t 1 ] && echo bar || echo epoch) $(ARGS)

# First what keeps one core busy, two at a time, so that a failure shows early; then what keeps all of them busy.
# The first failure ends the run.
FIRST_STEPS := plan $(if $(filter $(DEFAULT_TF),$(TF)),lint cuda wheel other-setup)
LAST_STEPS := rest $(if $(filter $(DEFAULT_TF),$(TF)),other)

test: setup
	@$(MAKE) -j2 --output-sync=target $(FIRST_STEPS) READY=1
	@for step in $(LAST_STEPS); do $(MAKE) $$step READY=1; done

lint: setup
	@echo "==> lint: ruff, mypy --strict, clang-format"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict hvpipe
	@$(CPP_FILES) | xargs -r $(BIN)/clang-format --dry-run -Werror

plan: setup
	@echo "==> tests of the planning half, with MPI and TensorFlow out of reach"
	@$(PYTEST) -q --planning

rest: setup
	@echo "==> all other tests on TensorFlow $(TF), the distributed ones under mpirun with 1, 2, 3 and 4 ranks"
	@$(PYTEST) --rest --durations=20 --durations-min=10 $(SIDE_BY_SIDE)

fast: setup
	@echo "==> fast half of the tests on TensorFlow $(TF)"
	@$(PYTEST) -m "not slow" $(SIDE_BY_SIDE)

cuda:
	@.ci/cuda.sh

wheel: setup
	@.ci/wheel.sh $(VENV) $(CONSTRAINTS)

keras: setup
	@echo "==> what meets TensorFlow of the fast half of the tests, on TensorFlow $(TF)"
	@$(PYTEST) -m "not slow" $(SIDE_BY_SIDE) -k "keras or kernels or examples or tensorflow or bad_input or docs_python"

# On the other TensorFlow, unless setup left word that no Python here can install it.
NO_PYTHON := .venv-tf$(OTHER_TF)/.stamps/no-python

other-setup:
	@$(MAKE) setup TF=$(OTHER_TF) READY= || [ -e $(NO_PYTHON) ]

other: other-setup
	@if [ -e $(NO_PYTHON) ]; then echo "==> SKIPPED: tests on TensorFlow $(OTHER_TF): no Python here can install it"; \
	else $(MAKE) keras TF=$(OTHER_TF) READY=1; fi

# Not a part of `test`: it compiles Horovod once.
peers:
	@.ci/peers.sh .venv-peers constraints-tf$(OTHER_TF).txt "$(PYTHON)"

peers-test: peers
	@echo "==> two steps of every system of bench/systems, in .venv-peers"
	@.venv-peers/bin/pytest tests/bench/systems/test_systems.py

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(CPP_FILES) | xargs -r $(BIN)/clang-format -i

clean:
	rm -rf .venv .venv-tf* .venv-peers build runs .pytest_cache .mypy_cache .ruff_cache

# The pages and the API reference, in build/site. Fails on broken links and names. Needs no network.
.PHONY: docs
FIRST_STEPS += $(if $(filter $(DEFAULT_TF),$(TF)),docs)
docs: setup
	@echo "==> docs: build/site/index.html"
	@if [ -x $(BIN)/mkdocs ]; then NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build; \
	else echo "SKIPPED: the site needs Python 3.11 or newer"; fi
