# hvpipe on a new machine needs Python 3.10+ and a C++17 compiler: `make train`, then `make test`.
#
#   make train            train examples/train.py on 2 ranks          (for example with RANKS=4 ARGS="--epochs 3")
#   make test             run everything that CI runs (some 25 minutes on 2 cores)
#   make test-all         the same anew, with the layouts of ranks that `test` leaves out
#   make test TF=2.18.1   run all tests on that TensorFlow, in a separate venv
#   make fast             run the planning half, and each way to train once on 2 ranks
#   make matrix           set up each Python and TensorFlow at the ends of what is supported, test and train (an hour)
#   make mutations        break one line at a time and check that a test notices
#   make sanitize         run the engine under AddressSanitizer, UBSan and ThreadSanitizer
#   make reliability      print the figures of docs/reliability.md: faults, costs, sanitizers, fuzzing (5 hours)
#   make peers            set up .venv-peers, where Horovod runs beside hvpipe, for comparisons (10 minutes once)
#   make peers-test       train two steps with each of those systems
#   make rivals           set up .venv-rivals, where Keras runs on JAX and on PyTorch, for comparisons
#   make container-test   build the Dockerfile's file system without docker, and train in it as two hosts (root, Debian)
#   make release-test     build sdist and wheel, check them, and train with both in clean venvs (10 minutes)
#   make horovod-test     start examples/train.py with a real horovodrun
#   make kubernetes-test  run the commands of examples/kubernetes as pods, in network namespaces (needs root)
#   make slurm-test       run the scripts of examples/ on a Slurm of two nodes (needs root, Debian's packages)
#   make setup | lint | plan | races | bench | rest | keras | oldest-keras | cuda | wheel | mpich | ucx | format | clean
#
# PYTHON names the interpreter to start from, TF the TensorFlow. Finished setup steps are not repeated.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

DEFAULT_TF := $(shell sed -n 's/^tensorflow==//p' constraints.txt)
OTHER_TF := 2.18.1
TF ?= $(DEFAULT_TF)
OLDEST_KERAS := $(shell sed -n 's/^OLDEST_KERAS = "\(.*\)"/\1/p' hvpipe/world/versions.py)
PYTHON ?=
RANKS ?= 2
ARGS ?=
RUN_DIR ?= runs/digits
# Tests that run at a time: computing ones keep two cores busy, and one more mostly waits.
WORKERS ?= $(shell n=$$(( $$(nproc) / 2 )); echo $$(( n > 2 ? n + 1 : 3 )))

VENV := .venv$(if $(filter-out $(DEFAULT_TF),$(TF)),-tf$(TF))
CONSTRAINTS := constraints$(if $(filter-out $(DEFAULT_TF),$(TF)),-tf$(TF)).txt
BIN := $(VENV)/bin
SETUP := .ci/setup.sh
PYTEST := $(BIN)/pytest
TIMED := .ci/timed.sh
# UNLESS_PASSED STEP COMMAND: not again with the same files, compiler and packages, also in another checkout.
UNLESS_PASSED := $(BIN)/python .ci/unless_passed.py
SIDE_BY_SIDE := -n $(WORKERS) --maxschedchunk 1
CPP_FILES := find csrc -name '*.h' -o -name '*.cc' -o -name '*.cu'

export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Cluster modules set these. Their packages and MPI would take precedence over the venv's.
unexport PYTHONPATH PYTHONHOME
ifneq ($(LD_LIBRARY_PATH),)
export LD_LIBRARY_PATH := $(CURDIR)/$(VENV)/lib:$(LD_LIBRARY_PATH)
endif

.PHONY: help setup train test test-all all-layouts lint lint-steps plan quick rest fast keras oldest-keras matrix cuda wheel mpich other other-setup mutations races bench sanitize reliability peers rivals peers-test horovod-test kubernetes-test \
    ucx slurm-test release-test container-test format clean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

# READY is set if the make that calls this one has set up.
setup:
	@[ -n "$(READY)" ] || $(SETUP) $(VENV) $(CONSTRAINTS) "$(PYTHON)"

train: setup
	@echo "==> training examples/train.py on $(RANKS) ranks"
	@mkdir -p $(RUN_DIR)
	@$(BIN)/hvpipe run -np $(RANKS) --trace $(RUN_DIR)/trace.json \
	    examples/train.py --save $(RUN_DIR)/model.keras --progress $$([ -t 1 ] && echo bar || echo epoch) $(ARGS)

# The first steps keep one core busy each, so they run two at a time and show failures early. The last steps keep
# all cores busy. The first failure ends the run. Each step prints how long it took.
FIRST_STEPS := plan $(if $(filter $(DEFAULT_TF),$(TF)),lint races cuda wheel mpich other-setup)
LAST_STEPS := bench rest $(if $(filter $(DEFAULT_TF),$(TF)),oldest-keras other $(if $(wildcard .venv-peers/.stamps/horovod-*),horovod-test))

test: setup
	@$(TIMED) "first steps" $(MAKE) -j2 --output-sync=target $(FIRST_STEPS) READY=1
	@for step in $(LAST_STEPS); do $(MAKE) $$step READY=1; done

# Run it where you touched what only it tests: see CONTRIBUTING.md.
test-all: export AGAIN := 1
test-all: test
	@$(MAKE) all-layouts READY=1

all-layouts: setup
	@$(TIMED) "Keras cases on 1 and 3 ranks, devices on 1 rank and over a ring" $(PYTEST) -m all_layouts -n 2 tests/test_mpi.py

lint: setup
	@$(TIMED) "lint: ruff, mypy --strict, clang-format, vulture" $(MAKE) lint-steps

lint-steps:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --strict hvpipe
	@$(CPP_FILES) | xargs -r $(BIN)/clang-format --dry-run -Werror
	@$(BIN)/vulture

plan: setup
	@$(TIMED) "tests of the planning half, which can import neither MPI nor TensorFlow" \
	    $(PYTEST) -q --planning -n 2 --ignore=tests/bench

quick: setup
	@$(TIMED) "quick tests with MPI and TensorFlow $(TF), on 2 ranks" $(PYTEST) -q -n 2 -m quick tests/test_mpi.py tests/keras/test_supported.py

fast: setup
	@$(TIMED) "fast tests" $(MAKE) -j2 --output-sync=target plan quick READY=1

rest: setup
	@$(TIMED) "all other tests on TensorFlow $(TF), the distributed ones under mpirun with 1, 2, 3 and 4 ranks" \
	    $(PYTEST) --rest --durations=20 --durations-min=10 $(SIDE_BY_SIDE) --ignore=tests/bench

bench: setup
	@$(TIMED) "tests of bench/, planning half" $(UNLESS_PASSED) bench $(PYTEST) -q --planning -n 2 tests/bench
	@$(TIMED) "tests of bench/, the others" $(UNLESS_PASSED) bench $(PYTEST) -q --rest $(SIDE_BY_SIDE) tests/bench

cuda:
	@$(TIMED) "CUDA compile" .ci/cuda.sh

wheel: setup
	@$(TIMED) "wheel" $(UNLESS_PASSED) wheel env CI=$(CI) .ci/wheel.sh $(VENV) $(CONSTRAINTS)

# Ranks on another MPI. The first time it builds hvpipe a second time.
mpich: setup
	@$(TIMED) "engine and a training on MPICH" $(UNLESS_PASSED) mpich .ci/mpich.sh $(VENV) $(CONSTRAINTS)

# Not part of `test`: it takes packages of Debian.
ucx: setup
	@$(TIMED) "engine on Open MPI 4.1 over UCX" .ci/ucx.sh $(VENV)

# Not part of `test`: it needs root, and may install sshd.
kubernetes-test: setup
	@mkdir -p build
	@$(TIMED) "commands of examples/kubernetes, as pods" .ci/kubernetes.sh $(VENV)

# Not part of `test`: it needs root, takes packages of Debian, and runs for half an hour.
slurm-test: setup
	@$(TIMED) "the scripts of examples/ on a Slurm of two nodes" .ci/slurm.sh $(VENV) $(CONSTRAINTS)

# Not part of `test`: it makes two venvs.
release-test: setup
	@$(TIMED) "a release: sdist and wheel" .ci/release.sh $(VENV) $(CONSTRAINTS)

# Not part of `test`: it needs root and Debian's packages. MPI=ucx or MPI=openmpi runs one of both.
container-test:
	@$(TIMED) "a container as two hosts" .ci/container.sh $(MPI)

# The tests marked older_tensorflow.
keras: setup
	@$(TIMED) "tests that depend on the versions of Keras and TensorFlow, on TensorFlow $(TF)" \
	    $(PYTEST) -m older_tensorflow $(SIDE_BY_SIDE)

# Each way to train once, on a Keras that is laid over the venv's.
oldest-keras: setup
	@$(TIMED) "quick tests with Keras $(OLDEST_KERAS)" .ci/with_keras.sh $(VENV) $(OLDEST_KERAS) \
	    $(PYTEST) -q -m quick -k "quick-2 or supported" tests/test_mpi.py tests/keras/test_supported.py

# Not part of `test`: it makes five venvs.
matrix:
	@.ci/matrix.sh

# Setup leaves this file if no Python here can install the other TensorFlow.
NO_PYTHON := .venv-tf$(OTHER_TF)/.stamps/no-python

other-setup:
	@$(MAKE) setup TF=$(OTHER_TF) READY= || [ -e $(NO_PYTHON) ]

other: other-setup
	@if [ -e $(NO_PYTHON) ]; then echo "==> SKIPPED: tests on TensorFlow $(OTHER_TF): no Python here can install it"; \
	else $(MAKE) keras TF=$(OTHER_TF) READY=1; fi

# Not part of `test`: it builds copies of hvpipe and runs for an hour.
mutations: setup
	@$(BIN)/python tests/mutations.py

# The part of `sanitize` that CI runs. The first time it takes 5 minutes of one core, most of them to compile.
races: setup
	@$(TIMED) "engine from many threads under ThreadSanitizer, as two hosts and over TCP" \
	    $(UNLESS_PASSED) races .ci/sanitize.sh $(VENV) thread hosts tcp
	@$(TIMED) "the same under AddressSanitizer and UBSan" $(UNLESS_PASSED) races .ci/sanitize.sh $(VENV) address driver

# Not part of `test`: it builds the engine twice more and takes some 8 minutes.
sanitize: export AGAIN := 1
sanitize: setup
	@$(TIMED) "engine from many threads under ThreadSanitizer, 2 and 4 ranks" $(UNLESS_PASSED) races .ci/sanitize.sh $(VENV) thread
	@$(TIMED) "tests/mpi/engine under AddressSanitizer and UBSan, 2 ranks" $(UNLESS_PASSED) races .ci/sanitize.sh $(VENV) address

# Not part of `test`. Readers of files get some 10 minutes each.
FUZZED := tests/test_file_readers.py tests/checkpoints/test_malformed.py tests/blackbox/test_blackbox.py \
    tests/commands/test_plan_malformed.py
reliability: setup
	@$(BIN)/python -m bench.faults --trials 20 --soak 30
	@$(BIN)/mpirun --allow-run-as-root --bind-to none -np 2 $(BIN)/python -m bench.faults.reliability_cost
	@$(MAKE) sanitize READY=1
	@FUZZ_EXAMPLES=300000 $(PYTEST) -q --hypothesis-profile=fuzz --timeout=7200 $(SIDE_BY_SIDE) $(FUZZED)

# Not part of `test`: it compiles Horovod once.
peers:
	@.ci/peers.sh .venv-peers constraints-tf$(OTHER_TF).txt "$(PYTHON)"

rivals:
	@.ci/rivals.sh .venv-rivals constraints.txt "$(PYTHON)"

# CI runs it where the peers are set up already.
horovod-test: peers
	@$(TIMED) "jobs that a real horovodrun starts" .venv-peers/bin/pytest -q tests/peers

peers-test: peers
	@echo "==> two steps of every system of bench/systems, in .venv-peers"
	@.venv-peers/bin/pytest tests/bench/systems/test_systems.py

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(CPP_FILES) | xargs -r $(BIN)/clang-format -i

clean:
	rm -rf .venv .venv-tf* .venv-matrix .venv-mpich .venv-ucx .venv-peers .venv-rivals build runs .pytest_cache .mypy_cache .ruff_cache

# The pages and the API reference, in build/site. Fails on broken links and names. Needs no network.
.PHONY: docs
FIRST_STEPS += $(if $(filter $(DEFAULT_TF),$(TF)),docs)
docs: setup
	@echo "==> docs: build/site/index.html"
	@if [ -x $(BIN)/mkdocs ]; then NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build; \
	else echo "SKIPPED: the site needs Python 3.11 or newer"; fi
