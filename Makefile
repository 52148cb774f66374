# `make train` and `make test` set up what is missing; a second run sets nothing up again.
SHELL := /bin/bash
PYTHON ?= python3.11
RECIPE ?= recipes/aime_lora.yaml
ARGS ?=
TESTS ?= tests

VENV := .venv
RUN := $(VENV)/bin/python
SHIM := packaging/vllm-shim/pyproject.toml
# Local projects are built with the setuptools of the lock, so that no package index is asked.
INSTALL := $(RUN) -m pip install --disable-pip-version-check --no-deps --no-build-isolation

.DELETE_ON_ERROR:
.PHONY: setup kernels train test soak lint format lock clean

setup: kernels

# The interpreter and every pinned package. $(VENV)/cpu.lock is the lock that the environment was made from; the
# environment is made anew when its content has changed, and only then.
$(VENV)/cpu.lock: requirements/cpu.lock
	@if cmp -s $< $@; then touch $@; else set -e; \
	command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or set PYTHON=" >&2; exit 2; }; \
	echo "setting up $(VENV) from $<: some minutes, 3 GB"; \
	$(PYTHON) -m venv --clear $(VENV); \
	$(INSTALL) -qq $$(grep -E '^(setuptools|wheel)==' $< | cut -d' ' -f1); \
	$(INSTALL) -qq -r $< || { \
	    echo "if pip found no torch +cpu: point pip at PyTorch's CPU wheels, see README.md" >&2; exit 2; }; \
	cp $< $@; fi

# This project (editable) and the distribution that carries the name `vllm`.
$(VENV)/local: $(VENV)/cpu.lock pyproject.toml $(SHIM)
	@if cat pyproject.toml $(SHIM) | cmp -s - $@; then touch $@; else set -e; \
	$(INSTALL) -qq --force-reinstall ./$(dir $(SHIM)); \
	$(INSTALL) -qq --editable .; \
	cat pyproject.toml $(SHIM) > $@; fi

# The build looks at the hash of its sources itself and returns at once when nothing has changed.
kernels: $(VENV)/local
	@$(RUN) -m zmrl.batch_invariant.build

train: setup
	$(RUN) -m zmrl.train $(RECIPE) $(ARGS)

test: setup
	$(RUN) -m pytest -m "not soak" $(ARGS) $(TESTS)

soak: setup
	@mkdir -p docs/soak
	set -o pipefail; $(RUN) -m pytest -m soak -v --no-header --durations=0 $(ARGS) $(TESTS) 2>&1 | tee docs/soak/last.log

lint: $(VENV)/local
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/local
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

lock:
	requirements/compile.sh

clean:
	rm -rf $(VENV) zmrl/batch_invariant/_build build *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	    packaging/*/build packaging/*/*.egg-info
	find zmrl tests -name __pycache__ -type d -prune -exec rm -rf {} +
