# The commands of the house. Each creates .venv if missing, installs what it needs, and runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo demo-ranks demo-kills demo-search docs tutorials test test-gpu test-gpu-multi lint format bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.train ## train and evaluate an image-text model on built-in data (about 5 minutes on 2 cores)
	$(BIN)/contrastile train recipes/glyphs.toml
	$(BIN)/contrastile evaluate runs/glyphs

demo-ranks: $(VENV)/.train ## a short run of the same on two ranks under torchrun (half a minute)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m contrastile train recipes/glyphs.toml name=glyphs-ranks \
		train.examples=10_000 train.batch=512 evaluate.every=1.0 evaluate.digits=false

demo-kills: $(VENV)/.train ## kill a run on two ranks six times and resume it: the same weights as undisturbed (four minutes)
	$(BIN)/python benchmarks/kills.py recipes/glyph-shards.toml

demo-search: $(VENV)/.train ## train a retriever for the Python code on this machine, then search it (two minutes on 2 cores)
	$(BIN)/contrastile train recipes/docstrings.toml
	$(BIN)/contrastile encode runs/docstrings
	$(BIN)/contrastile search runs/docstrings "bracket the minimum of a function"

docs: $(VENV)/.docs ## build the documentation site, build/site/index.html; runs tutorials that changed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

tutorials: $(VENV)/.docs ## run the five tutorials anew, for the site (five to ten minutes on 2 cores)
	$(BIN)/python docs/site/tutorials.py

test: $(VENV)/.dev ## the test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-gpu: $(VENV)/.dev ## the kernels compiled, in bf16 and at large sizes too; needs a CUDA device
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu --timeout 600

test-gpu-multi: $(VENV)/.dev ## losses, the main job and its failures on 2 and 4 GPUs, over NCCL
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m gpu_multi --timeout 600 tests/test_gpu_ranks.py

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## put the code into the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.train ## time and memory of the losses beside the dense formula and other libraries
	$(BIN)/contrastile bench loss

clean: ## remove the environment and caches; runs stay
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,search]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,search,data,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.train pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,search,docs]'
	@touch $@
