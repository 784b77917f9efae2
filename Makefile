# Paged Arena: `make run` starts it, `make test` proves it. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where plain pip would take a CUDA build of torch and you have no GPU: make run TORCH_INDEX=<PyTorch's CPU wheel index>
TORCH_INDEX ?=
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check
PIP_TORCH := $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX))
ARGS ?=

.PHONY: help run test check format bench bench-peers install pull tools clean
.DEFAULT_GOAL := help

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(VENV)/.pulled  ## install, fetch the default checkpoints once, start engine and web (ARGS="--port 8080")
	@exec $(BIN)/arena serve $(ARGS)

test: $(VENV)/.tests-installed  ## the whole suite, browser tests included (ARGS="tests/engine -k prefix")
	@$(BIN)/python -m tests.browser.chromium
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.tests-installed  ## lint and format check, the Dockerfile too
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/hadolint Dockerfile

format: $(VENV)/.tests-installed  ## apply the formatter
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: pull  ## our engine over HTTP against transformers' generate, same weights, one run
	@$(BIN)/arena engine bench --against transformers $(ARGS)

bench-peers: pull  ## other engines beside ours: installed apart, loaded in turns (ARGS="--help")
	@$(BIN)/python -m tests.bench $(ARGS)

pull: install  ## fetch and convert the default checkpoints into the cache folder
	@$(BIN)/arena engine pull

# Once: should the cache folder be emptied, the engine fetches anew by itself, with a progress line.
$(VENV)/.pulled: $(VENV)/.installed
	@$(BIN)/arena engine pull
	@touch $@

install: $(VENV)/.installed  ## the virtual environment with the pinned packages

tools:
	@command -v $(PYTHON) >/dev/null || { echo "missing: Python 3.11 or newer  (Debian, Ubuntu: apt-get install python3 python3-venv)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "missing: Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Another one: make run PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "missing: Python's venv module  (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "missing: a C++ compiler  (Debian, Ubuntu: apt-get install build-essential)"; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | tools
	@echo "Installing Paged Arena into $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --upgrade pip==$(shell sed -n 's/^pip==//p' constraints.txt)
	@$(PIP) install --quiet --progress-bar on -c constraints.txt $(PIP_TORCH) torch
	@$(PIP) install --quiet --progress-bar on -c constraints.txt -e .
	@touch $@

$(VENV)/.tests-installed: $(VENV)/.installed
	@$(PIP) install --quiet --progress-bar on -c constraints.txt -e '.[test]'
	@touch $@

clean:  ## remove the virtual environment; checkpoints and votes stay
	rm -rf $(VENV) *.egg-info
