# Each target sets up what it needs in .venv; nothing but Python 3.11+ has to be there before.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# The build that is tested. Installed first, so that a fresh machine gets one torch and not, through
# an open range, several gigabytes of another one. A torch that is already in .venv is kept.
TORCH := torch==2.13.0
STAMP := $(VENV)/.ready

.PHONY: help setup demo test test-slow lint format bench audit gpu-check docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 14

$(STAMP): pyproject.toml
	@test -x $(RUN) || $(PYTHON) -c 'import sys; sys.exit("curvlab needs Python 3.11 or newer; run make PYTHON=python3.x") if sys.version_info < (3, 11) else 0'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -c 'import torch' 2>/dev/null || $(RUN) -m pip install --quiet $(TORCH)
	@$(RUN) -m pip install --quiet --editable '.[test,lint]'
	@touch $@

setup: $(STAMP)  ## make .venv and install curvlab with all that tests and demo need

demo: $(STAMP)  ## the main job on embedded data: tables, a picture and the report page in demo/
	$(RUN) -m experiments.demo --out demo

test: $(STAMP)  ## the whole default test suite
	$(RUN) -m pytest -m "not slow" -n auto --maxprocesses 4 --dist loadfile

test-slow: $(STAMP)  ## the long tests that `make test` leaves out
	$(RUN) -m pytest -m slow

lint: $(STAMP)  ## ruff (lint and format) and mypy (strict)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(STAMP)  ## let ruff rewrite the code
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(STAMP)  ## what fits of the targets into about 20 minutes, with verdicts; the rest is named
	$(RUN) -m benchmarks --minutes 18

audit: $(STAMP)  ## compile every kernel for sm_80, sm_90 and sm_100, check the code, and execute it from PTX
	$(RUN) -m curvlab_kernels.audit
	$(RUN) -m curvlab_kernels.audit.execution

gpu-check: $(STAMP)  ## on a CUDA machine: confirm what cannot be confirmed without one
	PYTHONPATH=. $(RUN) -m curvlab_kernels.audit.gpu_check --flows tests/pretend_device/flows.py

docs: $(STAMP)  ## the documentation site in site/, links checked
	$(RUN) -m pip install --quiet --editable '.[docs]'
	$(RUN) .ci/docs/build.py --out site

clean:  ## remove .venv and what runs wrote
	rm -rf $(VENV) demo site results .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
