# `make demo`, `make demo-vision`, `make learn`, `make test`, `make bench`, `make lint`, `make docs`: each creates .venv on its first run and needs nothing else typed.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that the dependencies have wheels for; override with `make PYTHON=/path/to/python venv`.
FITS := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do if $$p -c '$(FITS)' 2>/dev/null; then echo $$p; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
# For each interpreter its own: Python 3.12 and 3.13 get Megatron-Core 0.19.
GPU_PATH = .venv-gpu-path/$(notdir $(PYTHON))
VLLM = .venv-vllm
LM_EVAL = build/lm-eval
# Where there is no GPU the pinned CPU build keeps results and downloads small; PIP_TORCH overrides it.
PIP_TORCH ?= $(shell if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then echo torch; else grep '^torch==' docker/versions.txt; fi)
GPU_CHECK_WHEELS = build/gpu_check_wheels
# Of benchmarks/rollout.py.
AGAINST_ALL := --against 'ours (torch)' dynamic static continuous vllm --make-vllm
# One thread per process: several ranks share the machine's cores. What Python compiles is kept, also if the shell says otherwise: tests start
# many interpreters.
RUN_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
ARGS ?=
# A file of tests stays in one process (its fixtures are whole jobs); the files are shared out in the order of tests/conftest.py, over one
# process more than there are cores: tests of servers and of Slurm mostly wait. TEST_PROCESSES=0 runs all in one.
TEST_PROCESSES ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PYTEST = $(BIN)/python -m pytest -q --numprocesses=$(TEST_PROCESSES) --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
TIER := not slow
HAS_GPU = $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'
NO_TESTS := 5# pytest's exit code where ARGS choose none

.PHONY: help settings house chaos test-versions test-slurm-versions test-gpu-path gpu-check gpu-check-wheels same-numbers venv demo demo-vision learn learn-precision learn-supervised test test-all mutants preflight bench bench-full transformer-engine lint format hooks docs clean lm-eval

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

venv: $(STAMP) ## create .venv with everything the other targets need

$(STAMP): setup.py
	@if [ -z "$(PYTHON)" ]; then echo "error: no Python 3.10 to 3.13 found; name one: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; fi
	@if [ ! -x $(BIN)/python ]; then echo "creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); fi
	@echo "installing $(PIP_TORCH), aligner and the tools into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet "$(PIP_TORCH)"
	@$(BIN)/python -m pip install --quiet --editable '.[servers,mpi,dev]'
	@touch $(STAMP)

demo: $(STAMP) ## SFT -> reward model -> PPO with two servers on this machine (about 2 minutes)
	@$(RUN_ENV) $(BIN)/python examples/demo/run.py $(ARGS)

demo-vision: $(STAMP) ## a tiny model that sees adds two handwritten digits: SFT -> GRPO on this machine (about 3 minutes; fetches scikit-learn's 9 MB wheel)
	@$(RUN_ENV) $(BIN)/python examples/vision/run.py $(ARGS)

learn: $(STAMP) ## every estimator trained on small sums, with a table; fails where one does not learn (about 20 minutes)
	@$(RUN_ENV) $(BIN)/python examples/learning/run.py $(ARGS)

learn-precision: $(STAMP) ## which correction keeps GRPO stable with rollouts in FP8 and INT8, with a table (stories260k needs ../shared/data; 125 runs, about an hour)
	@$(RUN_ENV) $(BIN)/python examples/learning/precision.py $(ARGS)

learn-supervised: $(STAMP) ## supervised, preference and reward recipes from a pretrained model, with a table (needs ../shared/data; about 20 minutes)
	@$(RUN_ENV) $(BIN)/python examples/learning/supervised.py $(ARGS)

test: $(STAMP) ## every behaviour once: all tests without the mark `slow`, on the GPU where there is one and the test does not mean the CPU (ARGS='-k name')
	@if $(HAS_GPU); then \
	  failed=0; \
	  $(RUN_ENV) $(PYTEST) -m 'not cpu and ($(TIER))' $(ARGS) || [ $$? = $(NO_TESTS) ] || failed=1; \
	  $(RUN_ENV) CUDA_VISIBLE_DEVICES= $(PYTEST) -m 'cpu and ($(TIER))' $(ARGS) || [ $$? = $(NO_TESTS) ] || failed=1; \
	  exit $$failed; \
	else $(RUN_ENV) $(PYTEST) -m '$(TIER)' $(ARGS); fi

test-all: ## all tests, the long and exhaustive too; writes how long each took into tests/durations.json and CONTRIBUTING.md (an hour)
	@$(MAKE) test TIER='slow or not slow' ARGS='--record-durations $(ARGS)'

test-versions: ## every recipe and a resume with the oldest and newest torch, transformers, Megatron-Core, numpy and Python (ARGS='newest-3.11' chooses; up to ten minutes each)
	@if [ -z "$(PYTHON)" ]; then echo "error: no Python 3.10 to 3.13 found; name one: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; fi
	@$(PYTHON) tests/versions.py $(ARGS)

test-slurm-versions: $(STAMP) ## the core of the tests on Slurm on the versions of later Debian suites, and a job in Apptainer (root, debootstrap; a gigabyte, half an hour)
	@tests/slurm_versions.sh $(ARGS)

test-gpu-path: ## the GPU code path on a simulated GPU, the tests that run on GPUs, and vLLM's CPU build, in environments of their own (two gigabytes, once; half an hour)
	@if [ -z "$(PYTHON)" ]; then echo "error: no Python 3.10 to 3.13 found; name one: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; fi
	@$(PYTHON) tests/simulated_cuda/environment.py $(GPU_PATH) || { code=$$?; [ $$code = 3 ] && echo "skipped: no simulated GPU here (the line above says why)" && exit 0; exit $$code; }
	@if [ -e $(GPU_PATH)/.complete ]; then rm -rf build/gpu_path; $(RUN_ENV) $(GPU_PATH)/bin/python -m pytest -q --numprocesses=$(TEST_PROCESSES) --maxprocesses=2 -m 'not cpu' tests/simulated_cuda tests/unit $(ARGS) && $(GPU_PATH)/bin/python tests/simulated_cuda/table.py; fi
	@if $(PYTHON) benchmarks/vllm_environment.py $(VLLM); then $(RUN_ENV) $(VLLM)/bin/python -m pytest -q tests/unit/rollout/test_vllm.py tests/unit/rollout/test_vllm_images.py tests/distributed/test_vllm_ranks.py $(ARGS) || [ $$? = $(NO_TESTS) ]; fi

# On a GPU machine without a network there is no .venv: the interpreter is then the one that has torch.
gpu-check: ## everything verified and measured on one real GPU, in two halves of ten minutes (ARGS='--half 1'; brings what `make gpu-check-wheels` fetched)
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/gpu_check.py $(if $(wildcard $(GPU_CHECK_WHEELS)),--wheels $(GPU_CHECK_WHEELS)) --output build/gpu_check $(ARGS)

gpu-check-wheels: ## the packages that `make gpu-check` brings to a machine without a network (50 MiB)
	@$(PYTHON) tools/gpu_check_wheels.py $(GPU_CHECK_WHEELS)

mutants: $(STAMP) ## plants faults one at a time, all of which a test must notice; writes tests/mutants.md (ARGS='--only ID'; 40 minutes)
	@$(RUN_ENV) $(BIN)/python tests/mutants.py $(ARGS)

chaos: $(STAMP) ## random processes of a PPO run killed at random moments: is what comes out the same? (ARGS='--kills 100 --seed 1 --table build/chaos.md': an hour)
	@$(RUN_ENV) PYTHONPATH=tests $(BIN)/python tests/functional/chaos.py $(ARGS)

house: $(STAMP) ## measures of the code's structure against their limits in tests/house.yaml: files, lines, import depth, circles, what a GRPO run imports
	@$(RUN_ENV) $(BIN)/python tests/house.py --grpo

same-numbers: $(STAMP) ## every recipe in this checkout against BEFORE=commit, bit for bit (about ten minutes)
	@$(RUN_ENV) $(BIN)/python tests/same_numbers.py $(BEFORE) $(ARGS)

preflight: $(STAMP) ## aligner preflight for the smoke job of slurm/ on this machine
	@$(RUN_ENV) $(BIN)/aligner preflight ppo_smoke_cpu $(ARGS)

bench: $(STAMP) ## rollouts, refits, estimators and a GRPO step against TRL, short (ARGS are for the last)
	@$(RUN_ENV) $(BIN)/python benchmarks/rollout.py --repeats 2
	@$(RUN_ENV) $(BIN)/python benchmarks/refit.py --repeats 3
	@$(RUN_ENV) $(BIN)/python benchmarks/advantages.py
	@$(RUN_ENV) $(BIN)/python benchmarks/grpo_vs_trl.py $(ARGS)

lm-eval: $(STAMP) ## lm-eval in an environment of its own, and its test against the endpoint (needs ../shared/data)
	@if [ ! -x $(LM_EVAL)/bin/python ]; then $(BIN)/python -m venv $(LM_EVAL); $(LM_EVAL)/bin/python -m pip install --quiet 'lm_eval[api]==0.4.13'; fi
	@$(RUN_ENV) ALIGNER_LM_EVAL=$(CURDIR)/$(LM_EVAL)/bin/python $(BIN)/python -m pytest -q tests/functional/test_endpoint_real.py -k lm_eval $(ARGS)

bench-full: $(STAMP) ## the same on all sizes and batches and against all competitors; makes .venv-vllm (an hour and a half)
	@$(RUN_ENV) $(BIN)/python benchmarks/rollout.py --sizes small --batches 1 8 32 64 --rounds 2 $(AGAINST_ALL)
	@$(RUN_ENV) $(BIN)/python benchmarks/rollout.py --sizes large --batches 1 8 32 --repeats 2 $(AGAINST_ALL)
	@$(RUN_ENV) $(BIN)/python benchmarks/refit.py
	@$(RUN_ENV) $(BIN)/python benchmarks/advantages.py
	@$(RUN_ENV) $(BIN)/python benchmarks/asynchronous.py
	@$(RUN_ENV) $(BIN)/python benchmarks/grpo_vs_trl.py $(ARGS)
	@$(RUN_ENV) $(BIN)/python benchmarks/grpo_vs_trl.py --sizes large --rounds 1 --steps 1 $(ARGS)
	@$(RUN_ENV) $(BIN)/python benchmarks/vision_trl.py

# Python code only: what is compiled of Transformer Engine is another package, and none of Megatron-Core's is called.
transformer-engine: build/transformer_engine-2.9.0 build/transformer_engine-2.20.2 build/megatron_core-0.19.2 ## Transformer Engine's Python code, for the tests that build models of it

build/transformer_engine-% build/megatron_core-%: | $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps --only-binary :all: --python-version 3.12 --ignore-requires-python --target $@.part $(subst -,==,$(notdir $@))
	@mv $@.part $@

settings: $(STAMP) ## what `aligner train CONFIG --help` prints without importing a recipe, into conf/settings.json: after every change of a setting or config
	@$(RUN_ENV) $(BIN)/python tests/settings_file.py

lint: $(STAMP) ## ruff, types (mypy) and the level order
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP) ## reformat and apply ruff's safe fixes
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

hooks: $(STAMP) ## before each commit, run what `make lint` runs and look for large files, conflict marks and broken YAML
	@$(BIN)/pre-commit install

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $(DOCS_STAMP)

docs: $(DOCS_STAMP) ## the site, in build/docs: needs no network; fails for a link or an anchor that leads nowhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/docs/index.html; with search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs"

clean: ## remove .venv, caches and build outputs (not run directories)
	rm -rf $(VENV) .venv-trl $(VLLM) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
