# Everything runs in .venv, which `make setup` makes: no target needs more than make and a Python of 3.12 to 3.14.

SHELL := /bin/bash
VENV := .venv
WORKDIR ?= runs/demo
# For tests: options for pytest, such as ARGS="-k packing", and how many processes share the files out.
ARGS ?=
JOBS ?= 2

RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check
PYTEST := JAX_PLATFORMS=cpu $(RUN) -m pytest -q --numprocesses=$(JOBS) --dist=loadfile --no-loadscope-reorder

# A stamp in .venv for each thing installed: older than the files that name its packages, it is installed again.
INSTALLED := $(VENV)/.installed
INSTALLED_GPU_COMPILE := $(VENV)/.installed-gpu-compile

.PHONY: help setup demo demo-sft test test-fast setup-gpu-compile test-gpu-compile lint docs clean
.DELETE_ON_ERROR:

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 20

setup: $(INSTALLED)  ## prepare .venv (PYTHON=/path/to/python chooses the Python)

$(INSTALLED): pyproject.toml requirements/dev.txt scripts/make_venv.sh
	@scripts/make_venv.sh $(VENV)
	@echo "installing JaxForge and its packages into $(VENV) (about two minutes the first time)"
	@$(INSTALL) --constraint requirements/dev.txt --editable ".[demo,dev]"
	@touch $@

demo: $(INSTALLED)  ## train the demo on 8 simulated devices (WORKDIR=folder, by default runs/demo)
	$(RUN) -m jaxforge.train --config=configs/demo_vlm.py --workdir=$(WORKDIR)

demo-sft: SFT := runs/demo_sft
demo-sft: $(INSTALLED)  ## fine-tune a tiny Hugging Face checkpoint on a JSONL file with images, and export it
	JAX_PLATFORMS=cpu $(RUN) scripts/make_sft_demo.py $(SFT)_data
	$(RUN) -m jaxforge.train --config=configs/demo_sft.py --workdir=$(SFT)
	rm -rf $(SFT)_hf
	JAX_PLATFORMS=cpu $(RUN) -m jaxforge.convert to-hf $(SFT) $(SFT)_hf --verify

test: $(INSTALLED)  ## the test suite, on the CPU
	$(PYTEST) --durations=15 --ignore=tests/gpu_compile $(ARGS)

test-fast: $(INSTALLED)  ## the test suite without its slow tests
	$(PYTEST) --ignore=tests/gpu_compile -m "not slow" $(ARGS)

setup-gpu-compile: $(INSTALLED_GPU_COMPILE)  ## add the CUDA compiler (1.1 GB), for make test-gpu-compile and jaxforge.plan

$(INSTALLED_GPU_COMPILE): $(INSTALLED) requirements/gpu-compile.txt
	@echo "installing the CUDA compiler into $(VENV) (1.1 GB)"
	@$(INSTALL) --no-deps --requirement requirements/gpu-compile.txt
	@touch $@

test-gpu-compile: $(INSTALLED_GPU_COMPILE)  ## compile for GPUs that aren't here, and check what comes out
	$(PYTEST) --durations=5 tests/gpu_compile tests/cluster/test_topology.py tests/memory/test_policy.py $(ARGS)

lint: $(INSTALLED)  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m mypy

docs: $(INSTALLED)  ## write docs/config.md from the schema
	JAX_PLATFORMS=cpu $(RUN) scripts/make_config_docs.py

clean:  ## remove .venv and caches; runs stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build *.egg-info
