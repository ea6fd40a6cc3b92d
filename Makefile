# Every target does its own set-up, in .venv, and repeats only what is stale. Paths are relative, so that a clone may
# lie in a folder with spaces. Settings: PYTHON, TORCH (what pip is asked for), and README.md's environment variables.
SHELL  := /bin/bash -o pipefail
PYTHON ?= python3
TORCH  ?= torch>=2.10
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check

export PIP_PROGRESS_BAR ?= on
export PYTHONUNBUFFERED := 1

CSRC := $(shell find csrc -type f 2>/dev/null)

.PHONY: help demo test build bench lint format cuda-check sanitize clean FORCE
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed $(VENV)/.built  ## the main job: a sentence encoder and a Vision Transformer, eager against fused
	$(PY) -m ampkernels demo $(ARGS)

test: $(VENV)/.installed $(VENV)/.built  ## all tests; ARGS="-k softmax" picks some
	$(PY) -m pytest $(ARGS)

build: $(VENV)/.built  ## compile the extension into the source tree

bench: $(VENV)/.installed $(VENV)/.built  ## the microbenchmarks; ARGS is handed on
	$(PY) -m benchmarks $(ARGS)

lint: $(VENV)/.dev  ## ruff, mypy and clang-format, changing nothing; the layering test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	git ls-files -z 'csrc/*.h' 'csrc/*.cuh' 'csrc/*.cpp' 'csrc/*.cu' | xargs -0 $(VENV)/bin/clang-format --dry-run -Werror
	$(PY) -m pytest -q tests/test_layering.py

format: $(VENV)/.dev  ## ruff and clang-format, in place
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	git ls-files -z 'csrc/*.h' 'csrc/*.cuh' 'csrc/*.cpp' 'csrc/*.cu' | xargs -0 $(VENV)/bin/clang-format -i

cuda-check:  ## compile every .cu for 8.0, 9.0a, 10.0, 12.0; fail on warnings, spills and unreviewed local memory
	$(PYTHON) tools/cuda_check.py $(ARGS)

sanitize: $(VENV)/.installed $(VENV)/.built  ## memcheck and racecheck on a small sweep of every op; needs a GPU
	@for tool in memcheck racecheck; do \
	  echo "==> compute-sanitizer --tool $$tool"; \
	  compute-sanitizer --tool $$tool --error-exitcode 9 $(PY) tools/sanitizer_sweep.py $(ARGS) | tail -n 20 || exit 1; \
	done

clean:  ## remove all that these targets made
	rm -rf $(VENV) build dist *.egg-info ampkernels/*.so demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis

# ---------------------------------------------------------------------------------------------------------- set-up

$(VENV)/bin/python:
	@$(PYTHON) tools/preflight.py
	@echo "==> creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(VENV)/bin/python
	@echo "==> installing torch and the build tools (the CUDA build of torch is a download of about 3 GB)"
	$(PIP) install "$(TORCH)" "setuptools>=77" ninja "pybind11>=2.13" numpy
	@$(PY) -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(VENV)/torch.txt
	@touch $@

# ninja prints whole command lines; the source file says it.
SHORT_NINJA := sed -u -E "s|^(\[[0-9]+/[0-9]+\]) .* -c .*(csrc/[^' ]+)'? -o .*|\1 \2|"

# What the build depends on besides files: a change of these builds again.
OPTIONS := $(AMPKERNELS_CUDA)|$(TORCH_CUDA_ARCH_LIST)|$(CUDA_HOME)|$(CXX)|$(CUDA_VISIBLE_DEVICES)|$(wildcard /dev/nvidia[0-9]*)

$(VENV)/.options: FORCE
	@mkdir -p $(VENV)
	@echo '$(OPTIONS)' | cmp -s - $@ || echo '$(OPTIONS)' > $@

$(VENV)/.built: $(VENV)/.torch $(VENV)/.options $(CSRC) setup.py tools/build_support.py ampkernels/_build.py
	@echo "==> building the extension"
	@$(PY) setup.py -q build_ext --inplace 2>&1 | $(SHORT_NINJA)
	@touch $@

# Held to the torch that the extension was built with.
$(VENV)/.installed: $(VENV)/.built pyproject.toml
	@echo "==> installing ampkernels (editable) and what its tests and its demo need"
	$(PIP) install -c $(VENV)/torch.txt --no-build-isolation -e ".[test,demo,bench]"
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install -c $(VENV)/torch.txt --no-build-isolation -e ".[dev]"
	@touch $@
