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
# Else every process compiles the project anew, and there are many.
unexport PYTHONDONTWRITEBYTECODE
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
WITH ?=
RESULTS ?= build/gpu
STAMP := .venv/.installed
# Bridge wants another Megatron-core than NeMo, and declares what only GPUs need: pinned as a whole, without resolving.
BRIDGE := .venv-bridge312
OLDER_BRIDGE := .venv-bridge
# A pyenv has one even where its python3.12 is there in name only.
PYTHON312 ?= $(shell for p in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python; do \
	"$$p" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$$p" && break; done)
# Ranks that need no NeMo, with this Megatron-core and torch.
BARE := tests/ranks/test_megatron_loop.py
# What an older Bridge can break: the seams, a fault in every phase, and Megatron-core 0.16.
OLDER := tests/bridge/test_parts.py tests/bridge/test_faults.py tests/unit/megatron

# Its wheels want glibc 2.39. What is used here is pure Python: put where pip would put it, whatever the glibc.
RESILIENCY := nvidia-resiliency-ext==0.6.0
PIP312 := $(BRIDGE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile

# NeMo wants transformers 4: version 5 lies beside .venv, and in front of it on the path.
HF := .transformers
HF_STAMP := $(HF)/.installed
TITAN := .torchtitan

# In one call: callbacks/, strategies/ and recipes/ are installed as subpackages of checkpointless, and mypy, which
# knows only paths, must not be asked about the same file under two names.
TYPED := checkpointless callbacks strategies recipes tests benchmarks
FAST := not nemo and not ranks and not gpu and not long and not slow

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-long test-bridge test-older-bridge test-transformers test-titan compat dist dist-check gpu-kit gpu lint docs format clean

help: ## what there is
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 26

demo: $(STAMP) ## train a small GPT on 4 CPU ranks, once undisturbed and once with two faults, and compare (1 minute)
	@echo "make: training a small NeMo GPT twice on 4 CPU ranks; about a minute"
	$(BIN)/checkpointless demo --nproc 4 --steps 10 \
		--fault exception@backward:rank=2,step=4 --fault sigkill@optimizer:rank=1,step=7

test: $(STAMP) ## run all tests, three files at a time, since many wait (nine minutes on 2 cores)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not long"

test-fast: $(STAMP) ## run the tests that need no NeMo, start no ranks and are quick (half a minute on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile --hypothesis-profile quick tests/unit -m "not lightning and $(FAST)"

test-long: $(STAMP) ## run what takes longer: long tests, many more drawn inputs, users' runs through drawn faults (hours)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long
	$(BIN)/python -m pytest -n 2 -m "hypothesis and not long" --hypothesis-profile nightly --timeout 7200 tests/unit
	$(BIN)/python benchmarks/users_chaos/run.py --cases 200 --seed 1 --run-dir build/users-chaos

test-bridge: $(BRIDGE)/.installed ## run the tests with Megatron-Bridge 0.6 and Python 3.12 (5 minutes; environment, once: 5, 6.5 GB)
	$(BRIDGE)/bin/python -m pytest -n 2 --dist loadfile -m "not long" tests/bridge tests/unit/megatron $(BARE)

test-older-bridge: $(OLDER_BRIDGE)/.installed ## run some with Megatron-Bridge 0.3 and Python 3.11 (2 minutes; environment, once: 3, 3 GB)
	$(OLDER_BRIDGE)/bin/python -m pytest -n 2 --dist loadfile -m "not long" $(OLDER)

test-transformers: $(STAMP) $(HF_STAMP) ## run the tests with Hugging Face's Trainer of transformers 5 (4 minutes; 12 MB, made once)
	PYTHONPATH=$(HF) $(BIN)/python -m pytest -n 2 --dist loadfile tests/hf

test-titan: $(BRIDGE)/.installed $(TITAN)/.installed ## run those with torchtitan, on top of test-bridge's Python (8 minutes; 8 MB)
	PYTHONPATH=$(TITAN) $(BRIDGE)/bin/python -m pytest tests/titan

compat: $(STAMP) ## run the fast tests with other Pythons, Lightning, torch 2.14 and 2.15 (2.7 GB each; one: ONLY="newest torch")
	$(BIN)/python tests/compat.py $(if $(ONLY),--only "$(ONLY)") tests/unit -m "$(FAST)"

dist: $(STAMP) ## build the sdist, and from it the wheel, into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

dist-check: $(STAMP) ## build both, install them into an environment of their own, and use them there (3 minutes)
	$(BIN)/python -m tests.wheel.check --torch "$(TORCH)"

gpu-kit: ## collect the wheels that make gpu needs beside torch, for a machine without a network; WITH=nemo: for part5
	$(GPU_PYTHON) -m tests.gpu.kit --python $(GPU_VERSION) --arch $(GPU_ARCH) --with "$(WITH)"

gpu: ## run what needs a GPU, with its Python's torch and build/gpu-kit (11 minutes; a part of it: ONLY=part2)
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
	rm -rf .venv $(BRIDGE) $(OLDER_BRIDGE) $(HF) $(TITAN) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

$(STAMP): pyproject.toml setup.py $(CONSTRAINTS)
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 is needed: install it, or say make PYTHON=/path/to/python" >&2; exit 2; }
	@echo "make: installing checkpointless, NeMo and the tools into .venv; about 3 minutes, once"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[nemo,dev,docs]' -c $(CONSTRAINTS) $(TORCH)
	@touch $@

$(HF_STAMP): constraints/transformers.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(HF) --upgrade -r $<
	@touch $@

$(TITAN)/.installed: constraints/torchtitan.txt | $(BRIDGE)/.installed
	$(PIP312) --target $(TITAN) --upgrade -r $<
	@touch $@

$(BRIDGE)/.installed: pyproject.toml setup.py constraints/bridge312-cpu.txt
	@[ -n "$(PYTHON312)" ] || { echo "make: Python 3.12 is needed: install it, or say make PYTHON312=/path/to/python" >&2; exit 2; }
	@echo "make: installing checkpointless and Megatron-Bridge 0.6 into $(@D); about 5 minutes, once"
	@[ -x $(BRIDGE)/bin/python ] || $(PYTHON312) -m venv $(BRIDGE)
	$(PIP312) -r constraints/bridge312-cpu.txt -e .
	$(PIP312) --upgrade --only-binary=:all: --platform manylinux_2_39_x86_64 --python-version 3.12 \
		--target $(BRIDGE)/lib/python3.12/site-packages $(RESILIENCY)
	@# This compiles what is imported: a quarter of all, and before a test waits for it.
	CHECKPOINTLESS_CPU=1 $(BRIDGE)/bin/python -W ignore -c 'import checkpointless.bridge' >/dev/null
	@touch $@

$(OLDER_BRIDGE)/.installed: pyproject.toml setup.py constraints/bridge-cpu.txt
	@[ -n "$(PYTHON)" ] || { echo "make: Python 3.11 is needed: install it, or say make PYTHON=/path/to/python" >&2; exit 2; }
	@echo "make: installing checkpointless and Megatron-Bridge 0.3 into $(@D); about 3 minutes, once"
	@[ -x $(OLDER_BRIDGE)/bin/python ] || $(PYTHON) -m venv $(OLDER_BRIDGE)
	$(OLDER_BRIDGE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints/bridge-cpu.txt -e .
	@touch $@
