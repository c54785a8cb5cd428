# From a bare clone, with Python 3.11 and make, nothing else.
#
#   make demo       see it work
#   make test       all tests
#   make test-fast  those that need no NeMo and are quick
#   make lint       ruff and mypy
#   make gpu        on a machine with a GPU: everything that needs one
#   make docs       the documentation, into build/docs
#
# The first of them makes .venv (about 3 minutes, 4 GB); after that it is there.

SHELL := /bin/bash
# The first that works: a python3.11 may be there in name only (pyenv).
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c 'import ensurepip, venv' 2>/dev/null && echo $$p && break; done)
TORCH := torch==2.13.0
CONSTRAINTS := constraints/nemo-cpu.txt
BIN := .venv/bin
# On a machine with a GPU there may be no .venv: the Python that has torch runs the suite.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) python3)
# Of that machine, for the wheels of make gpu-kit.
GPU_VERSION ?= 3.12
# Of its GPU, for NCCL's library: 90 for H100 and H200, 0 for none.
GPU_ARCH ?= 90
ONLY ?=
RESULTS ?= build/gpu
STAMP := .venv/.installed
# Bridge wants another Megatron-core than NeMo, and declares what only GPUs need: pinned as a whole, without resolving.
BRIDGE_CONSTRAINTS := constraints/bridge-cpu.txt
BRIDGE_BIN := .venv-bridge/bin
BRIDGE_STAMP := .venv-bridge/.installed

# NeMo wants transformers 4: version 5 lies beside .venv, and in front of it on the path.
HF := .transformers
HF_STAMP := $(HF)/.installed

# In one call: callbacks/, strategies/ and recipes/ are installed as subpackages of checkpointless, and mypy, which
# knows only paths, must not be asked about the same file under two names.
TYPED := checkpointless callbacks strategies recipes tests benchmarks
FAST := tests/unit -m "not nemo and not ranks and not gpu and not long and not slow"

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-long test-bridge test-transformers compat dist dist-check gpu-kit gpu lint docs format clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: $(STAMP) ## train a small GPT on 4 CPU ranks, once undisturbed and once with two faults, and compare (1 minute)
	@echo "make: training a small NeMo GPT twice on 4 CPU ranks; about a minute"
	$(BIN)/checkpointless demo --nproc 4 --steps 10 \
		--fault exception@backward:rank=2,step=4 --fault sigkill@optimizer:rank=1,step=7

test: $(STAMP) ## run all tests, two files at a time (40 minutes on 2 busy cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long"

test-fast: $(STAMP) ## run the tests that need no NeMo, start no ranks and are quick (under a minute on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(FAST)

test-long: $(STAMP) ## run what takes longer: long tests, many more drawn inputs, users' runs through drawn faults (hours)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long
	$(BIN)/python -m pytest -n 2 -m "hypothesis and not long" --hypothesis-profile nightly --timeout 7200 tests/unit
	$(BIN)/python benchmarks/users_chaos/run.py --cases 200 --seed 1 --run-dir build/users-chaos

test-bridge: $(BRIDGE_STAMP) ## run the tests with Megatron-Bridge, in .venv-bridge (3 minutes; made once, 3 GB)
	$(BRIDGE_BIN)/python -m pytest -n 2 --dist loadfile -m "not long" tests/bridge tests/unit/megatron

test-transformers: $(STAMP) $(HF_STAMP) ## run the tests with Hugging Face's Trainer of transformers 5 (4 minutes; 12 MB, made once)
	PYTHONPATH=$(HF) $(BIN)/python -m pytest -n 2 --dist loadfile tests/hf

compat: $(STAMP) ## run the fast tests with other Pythons, the newest Lightning, torch 2.14 and 2.15 (2.7 GB each), where they install
	$(BIN)/python tests/compat.py $(FAST)

dist: $(STAMP) ## build the sdist, and from it the wheel, into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

dist-check: $(STAMP) ## build both, install them into an environment of their own, and use them there (3 minutes)
	$(BIN)/python -m tests.wheel.check --torch "$(TORCH)"

gpu-kit: ## collect the wheels that make gpu needs beside torch, for a machine without a network, into build/gpu-kit
	$(GPU_PYTHON) -m tests.gpu.kit --python $(GPU_VERSION) --arch $(GPU_ARCH)

gpu: ## run what needs a GPU, with its Python's torch and build/gpu-kit (25 minutes; a part of it: ONLY=part2)
	$(GPU_PYTHON) -m tests.gpu.run --only "$(ONLY)" --results "$(RESULTS)"

lint: $(STAMP) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# Against the empty tree, so all files: no spaces at ends of lines, nothing left of a merge.
	git diff --check "$$(git hash-object -t tree /dev/null)"
	$(BIN)/mypy $(TYPED)

docs: $(STAMP) ## build the documentation, into build/docs/index.html
	$(BIN)/python -W ignore -m sphinx -b html -W --keep-going -q -d build/doctrees docs build/docs

format: $(STAMP) ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and what tools have left
	rm -rf .venv .venv-bridge .transformers .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

$(STAMP): pyproject.toml setup.py $(CONSTRAINTS)
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 is needed: install it, or say make PYTHON=/path/to/python" >&2; exit 2; }
	@echo "make: installing checkpointless, NeMo and the tools into .venv; about 3 minutes, once"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[nemo,dev,docs]' -c $(CONSTRAINTS) $(TORCH)
	@touch $@

$(HF_STAMP): constraints/transformers.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(HF) --upgrade -r $<
	@touch $@

$(BRIDGE_STAMP): pyproject.toml setup.py $(BRIDGE_CONSTRAINTS)
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 is needed: install it, or say make PYTHON=/path/to/python" >&2; exit 2; }
	@echo "make: installing checkpointless and Megatron-Bridge into .venv-bridge; about 3 minutes, once"
	@[ -x $(BRIDGE_BIN)/python ] || $(PYTHON) -m venv .venv-bridge
	$(BRIDGE_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(BRIDGE_CONSTRAINTS) -e .
	@touch $@
