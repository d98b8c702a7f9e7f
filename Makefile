# `make run` and `make test` do all of their set-up: a virtual environment in .venv, then the work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

.PHONY: run test check docs gpu clean

# the main job: on a GPU a real server pair, stock against ours; without one the demo on the CPU
ifeq ($(HAS_GPU),yes)
run: $(VENV)/.serve
	$(BIN)/sglang-fp8mla selftest --arms stock,auto
else
run: $(VENV)/.demo
	$(BIN)/sglang-fp8mla demo
endif

test: $(VENV)/.test check
	$(BIN)/python -m pytest

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.test
	$(BIN)/mkdocs build --strict

# on a machine with a GPU: every test that needs one must run, none may skip
gpu: $(VENV)/.test
	$(BIN)/python -m sglang_fp8mla.machine
	$(BIN)/python -m pytest tests/gpu tests/kernels --require-gpu

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch is what the demo needs, in the version that stock SGLang 0.5.23 pins
$(VENV)/.demo: $(BIN)/python pyproject.toml entry_points.txt
	$(PIP) install --progress-bar off -e . torch==2.14.1 numpy
	touch $@

$(VENV)/.serve: $(BIN)/python pyproject.toml entry_points.txt
	$(PIP) install --progress-bar off -e '.[sglang,plot]'
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml entry_points.txt
	$(PIP) install --progress-bar off -e '.[sglang,dev,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
