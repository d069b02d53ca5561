# The commands of the house. Each creates .venv if missing, installs what it needs, and runs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# one worker more than two cores: many tests wait for ranks
JOBS   ?= 3

.DEFAULT_GOAL := help
.PHONY: help demo demo-ranks demo-kills demo-search docs tutorials test test-faults test-hostile test-integrations test-kernels test-gpu \
	test-gpu-multi lint format bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Threads for the cores that other programs leave free during one second, one at least: more threads than free cores are many
# times slower, because they wait for each other. OMP_NUM_THREADS, where it is set, decides.
FREE = $${OMP_NUM_THREADS:-$$({ head -n 1 /proc/stat; sleep 1; head -n 1 /proc/stat; } | awk -v cores=$$(nproc) '\
	{ idle = $$5 + $$6 - idle; total = $$2 + $$3 + $$4 + $$5 + $$6 + $$7 + $$8 - total } \
	END { free = int(cores * idle / (total > 0 ? total : 1) + 0.5); print (free > 0 ? free : 1) }')}

demo: $(VENV)/.train ## train and evaluate an image-text model on built-in data (about 5 minutes on 2 cores)
	@echo "Trains an image-text model from nothing on 45,000 drawn characters and their names, then measures it: names in"
	@echo "fonts that it never saw, names that it never saw, handwritten digits. Nothing is downloaded."
	@cores=$$(env -u OMP_NUM_THREADS nproc); threads=$(FREE); export OMP_NUM_THREADS=$$threads; \
	echo "It takes about 5 minutes on two free cores, 17 at most; here it uses $$threads of $$cores cores."; \
	if [ $$threads -lt 2 ]; then echo "That is less than two free cores: it takes longer, and may see fewer pairs and learn less. OMP_NUM_THREADS=2 make demo takes two."; fi; \
	echo; echo "$(BIN)/contrastile train recipes/glyphs.toml"; \
	$(BIN)/contrastile train recipes/glyphs.toml

demo-ranks: $(VENV)/.train ## a short run of the same on two ranks under torchrun (half a minute)
	@echo "Takes 20 steps of the demo on two ranks, to show that they train together: it is not meant to learn anything, so"
	@echo "its results are near chance. Half a minute on two free cores."
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m contrastile train recipes/glyphs.toml name=glyphs-ranks \
		train.examples=10_000 train.batch=512 evaluate.every=1.0 evaluate.digits=false

demo-kills: $(VENV)/.train ## kill a run on two ranks six times and resume it: the same weights as undisturbed (four minutes)
	$(BIN)/python benchmarks/kills.py recipes/glyph-shards.toml

demo-search: $(VENV)/.train ## train a retriever for the Python code on this machine, then search it (two minutes on 2 cores)
	$(BIN)/contrastile train recipes/docstrings.toml
	$(BIN)/contrastile encode runs/docstrings
	$(BIN)/contrastile search runs/docstrings "bracket the minimum of a function"

docs: $(VENV)/.docs ## build the documentation site, build/site/index.html; runs tutorials that changed
	@# without --quiet, which would let warnings pass
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "build/site/index.html; to search in it: python3 -m http.server --directory build/site"

tutorials: $(VENV)/.docs ## run the five tutorials anew, for the site (two to ten minutes on 2 cores)
	$(BIN)/python docs/site/tutorials.py

# With bytecode kept, whatever the shell says: without it every one of some sixty processes compiles the tests anew.
test: $(VENV)/.dev ## the test suite
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-hostile: $(VENV)/.dev ## all attacks on the readers of data: bombs, damage, random bytes (two minutes)
	$(BIN)/python -m pytest -m 'hostile or not hostile' tests/test_hostile_*.py

test-integrations: .venv-integrations/.done .venv-sentences-5/.done .venv-open-clip/.done .venv-open-clip-2/.done ## the adapters with the libraries themselves, in environments of their own
	.venv-integrations/bin/python -m pytest tests/integrations
	.venv-sentences-5/bin/python -m pytest tests/integrations/test_sentence_transformers*.py
	.venv-open-clip/bin/python -m pytest tests/integrations/test_open_clip.py tests/integrations/test_export_pairs.py \
		tests/integrations/test_retrievers.py tests/integrations/test_losses.py -k 'open_clip or colpali or lightly'
	.venv-open-clip-2/bin/python -m pytest tests/integrations/test_open_clip.py tests/integrations/test_export_pairs.py -k open_clip

test-faults: $(VENV)/.dev ## kill, tear and fail file events of every command that writes, a sample of 30 (a minute on 2 cores)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(BIN)/python tests/faults.py $(FAULTS)

test-kernels: $(VENV)/.dev ## every kernel compiled ahead of time for every chip; no GPU needed, three minutes on 2 cores
	CONTRASTILE_EVERY_KERNEL=1 $(BIN)/python -m pytest tests/test_tiles_triton_aot.py --timeout 900

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

bench: $(VENV)/.train ## time and memory of the losses beside the plain formula and other libraries
	$(BIN)/contrastile bench loss

clean: ## remove the environment and caches; runs stay
	rm -rf $(VENV) .venv-* build *.egg-info .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

PINNED := --constraint constraints.txt --constraint constraints-integrations.txt

.venv-integrations/.done: pyproject.toml constraints.txt constraints-integrations.txt
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet $(PINNED) --editable '.[train,search,integrations]' pytest pytest-timeout peft faiss-cpu \
		deepspeed
	@# without what they require, which is older: only their losses are loaded
	$(@D)/bin/python -m pip install --quiet $(PINNED) --no-deps FlagEmbedding pylate tevatron pytorch-metric-learning siglip-kernel
	@touch $@

# Environments that stand on the one above, whose packages follow their own: a second torch would take a minute and 1.6 GB.
PURELIB = import sysconfig; print(sysconfig.get_path("purelib"))
ON_INTEGRATIONS = test -d $(@D) || $(PYTHON) -m venv $(@D); \
	printf 'import site; site.addsitedir("%s")\n' "$$(.venv-integrations/bin/python -c '$(PURELIB)')" \
		> "$$($(@D)/bin/python -c '$(PURELIB)')/below.pth"

# the last version 5 of sentence-transformers
.venv-sentences-5/.done: .venv-integrations/.done
	$(ON_INTEGRATIONS)
	grep -v ^sentence-transformers constraints-integrations.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --constraint $(@D)/constraints.txt \
		sentence-transformers==5.7.0
	@touch $@

# torchvision's wheel is built for CUDA; beside torch for CPUs tests/integrations/conftest.py declares its operators, and
# other libraries would load it where it is found
.venv-open-clip/.done: .venv-integrations/.done
	$(ON_INTEGRATIONS)
	$(@D)/bin/python -m pip install --quiet $(PINNED) open_clip_torch webdataset pandas braceexpand
	$(@D)/bin/python -m pip install --quiet $(PINNED) --no-deps colpali-engine lightly lightly_utils
	@touch $@

# the last version 2 of open_clip
.venv-open-clip-2/.done: .venv-integrations/.done
	$(ON_INTEGRATIONS)
	grep -v ^open_clip_torch constraints-integrations.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt --constraint $(@D)/constraints.txt \
		open_clip_torch==2.32.0 webdataset pandas braceexpand
	@touch $@

# as a path: a script beside the clone would find the clone's folder, of the same name, before setuptools' own finder
EDITABLE := --config-settings editable_mode=compat --editable

$(VENV)/.train: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(EDITABLE) '.[train,search]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(EDITABLE) '.[train,search,data,dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.train pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(EDITABLE) '.[train,search,docs]'
	@touch $@
