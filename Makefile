# `make` alone prints what there is. Everything installs into .venv, once. With gcc the C kernels are compiled in place, once too.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
OUT    ?= benchmarks/results/$(shell date +%F)$(OF).json
PYTEST_ARGS ?= -n 2 --dist worksteal
# What is imported is compiled then, a small part of it; all of it now where Python may not keep what it compiles.
INSTALL := $(BIN)/pip install $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# TORCH: any requirement or options that pip takes, for example
#   make study TORCH=path/to/torch.whl
#   make study TORCH="torch==2.13.0 --index-url URL"
# It is remembered in .venv until another is given. The default is the pin of constraints.txt, with TORCH_OPTIONS, such as
# "--index-url URL" of an index that has the build for CPUs: the default of Linux is the one for CUDA, gigabytes larger.
CHOICE := $(VENV)/torch-choice
TORCH  ?= $(shell cat $(CHOICE) 2>/dev/null || echo $$(grep '^torch==' constraints.txt) $(TORCH_OPTIONS))
ifneq ($(origin TORCH),file)
ifneq ($(strip $(TORCH)),$(strip $(shell cat $(CHOICE) 2>/dev/null)))
NEW_TORCH := new-torch
endif
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install study report checkpoint test quick test-elsewhere test-all sceptic conformance ecosystem check lint types format bench bench-decode gpu properties numbers claims verdicts calibration api freeze-api notebooks laws docs dist dist-test clean new-torch native

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@echo
	@echo '  ARGS="--encodings rope alibi"   options for study, report, bench, properties'
	@echo '  PYTHON=python3.12               the Python that makes .venv (3.11 to 3.13)'
	@echo '  TORCH="REQUIREMENT"             another torch build: a requirement, a wheel, with options of pip'

# ---- the main job ----
study: $(VENV)/study.stamp ## train short, test long, write the report (about five minutes)
	$(BIN)/longitude study $(ARGS)

checkpoint: $(VENV)/study.stamp ## a small Llama trained in five minutes, to try extend, measure and check on: models/llama; ARGS=--skills: one that answers questions
	$(BIN)/python examples/train_tiny_checkpoint.py --model llama --out models/llama $(ARGS)

report: $(VENV)/study.stamp ## build a report again from saved results: make report ARGS=runs/NAME
	$(BIN)/longitude report $(ARGS)

# ---- checks ----
test: check quick ## lint, types, import contracts, and the quick tier of the tests; make -j2 test: the types beside the tests

quick: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-elsewhere: $(VENV)/test.stamp ## the quick tests on one core, with other threads and instructions, busy, without C kernels, shuffled, twice
	$(BIN)/python tests/elsewhere.py $(ARGS)

test-all: check ## the same with every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

sceptic: $(VENV)/test.stamp ## 5,000 random cases against loops written from the papers; ARGS="--cases 1 --seed 4711" for one
	$(BIN)/python tests/sceptic/run.py $(ARGS)

conformance: $(VENV)/conformance.stamp ## transformers' own tests of models, over ours and a stock Llama on our attention (minutes)
	$(BIN)/python tests/conformance/run.py $(PYTEST_ARGS)

ecosystem: $(VENV)/ecosystem.stamp ## the tests with TRL, PEFT, Lightning, lm-eval, scikit-learn, and of export and caches (a few minutes)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m ecosystem tests/ecosystem tests/models tests/attention tests/native

check: lint types ## lint, types and import contracts only

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(VENV)/test.stamp
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: $(VENV)/test.stamp ## let ruff format and fix what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/bench.stamp ## what each encoding costs, against our targets and other libraries (about a quarter of an hour, quiet)
	$(BIN)/python benchmarks/targets.py --out $(OUT) $(ARGS)

bench-decode: OF := -decode
bench-decode: $(VENV)/bench.stamp ## what a generated token costs behind contexts up to 32768, for every mixer (about a quarter of an hour, quiet)
	$(BIN)/python benchmarks/decode.py --out $(OUT) $(ARGS)

gpu: ## laws and times on a GPU, in at most nine minutes, with any PYTHON that has torch for CUDA: nothing is installed
	$(if $(shell $(PYTHON) -c 'import torch, pytest, jaxtyping' 2>/dev/null && echo here),$(PYTHON),$(BIN)/python) benchmarks/gpu.py $(ARGS)

properties: OF := -properties
properties: $(VENV)/study.stamp ## two properties of every encoding: whether it is relative, and what it costs
	$(BIN)/python benchmarks/properties.py --out $(OUT) $(ARGS)

numbers: $(VENV)/study.stamp ## put results of studies and benches into README.md, its picture and docs; ARGS="--keep study runs/study" adds one
	$(BIN)/python benchmarks/fill_numbers.py $(ARGS)
	$(BIN)/python benchmarks/draw.py

claims: $(VENV)/study.stamp ## make docs/claims.md from benchmarks/results/claims; a test compares
	PYTHONPATH=benchmarks $(BIN)/python docs/make_claims.py

verdicts: $(VENV)/study.stamp ## print the verdicts of the claims; ARGS="runs/claims --run" runs their studies first (hours; --plan says how many)
	PYTHONPATH=benchmarks $(BIN)/python -m claims $(ARGS)

calibration: $(VENV)/study.stamp ## print how many published comparisons have the same sign here, and which have not
	$(BIN)/python benchmarks/calibration.py

api: $(VENV)/study.stamp ## make docs/api.md, the index of public names
	$(BIN)/python docs/make_api.py

freeze-api: $(VENV)/study.stamp ## write docs/public_api.txt, the names and signatures that a test holds: only when you mean to change them
	$(BIN)/python docs/make_signatures.py

notebooks: $(VENV)/test.stamp ## execute the notebooks of examples/ again, in place; ARGS=4-your-own-encoding for one
	$(BIN)/python docs/make_notebooks.py $(ARGS)

laws: $(VENV)/test.stamp ## try the laws that the pages of the site lack results of; ARGS="alibi mamba" tries these again (minutes each)
	PYTHONPATH=benchmarks $(BIN)/python docs/make_laws.py $(ARGS)

docs: $(VENV)/docs.stamp ## make the site, build/docs/index.html: searched offline, warnings are errors (a few minutes)
	PYTHONPATH=benchmarks $(BIN)/python docs/make_site.py

dist: $(VENV)/dist.stamp ## an sdist, wheels with and without C kernels, an SBOM: dist/ (needs gcc for both machines; a few minutes)
	$(BIN)/python release/build.py

dist-test: $(VENV)/test.stamp ## install each wheel of dist/ without a compiler, and use it (minutes)
	$(BIN)/python -m pytest -m dist tests/release $(ARGS)

# ---- the environment: torch first, so that nothing drags another build in; then what each job needs on top ----
install: $(VENV)/test.stamp ## everything needed to work on the project

$(BIN)/pip: # the last thing that venv writes
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "expected Python 3.11 to 3.13, got $$($(PYTHON) --version 2>&1); say which: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV) || { echo "no ensurepip here: using the pip of $(PYTHON) instead"; \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }

$(VENV)/torch.stamp: constraints.txt $(NEW_TORCH) | $(BIN)/pip
	$(if $(NEW_TORCH),$(BIN)/pip uninstall --quiet --yes torch)
	$(INSTALL) $(TORCH)
	$(if $(NEW_TORCH),@echo '$(strip $(TORCH))' > $(CHOICE))
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/constraints.txt
	@grep -v '^torch==' constraints.txt >> $(VENV)/constraints.txt
	@touch $@

# The C kernels for this processor, if gcc is here: in less than a second if no C source changed.
native: | $(BIN)/pip ## the C kernels for this processor, in place; other targets run it first
	@$(BIN)/python src/longitude/native/build.py

$(VENV)/study.stamp: $(VENV)/torch.stamp pyproject.toml | native
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[study]'
	@touch $@

$(VENV)/docs.stamp: $(VENV)/study.stamp
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[docs]'
	@touch $@

$(VENV)/bench.stamp: $(VENV)/study.stamp
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[bench]'
	@touch $@

$(VENV)/dist.stamp: $(VENV)/torch.stamp pyproject.toml
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[dist]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml | native # in one go with what a study needs
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[test]'
	@touch $(VENV)/study.stamp $@

$(VENV)/conformance.stamp: $(VENV)/test.stamp
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[conformance]'
	@touch $@

$(VENV)/ecosystem.stamp: $(VENV)/test.stamp
	$(INSTALL) -c $(VENV)/constraints.txt -e '.[ecosystem]'
	-$(INSTALL) -c $(VENV)/constraints.txt --no-build-isolation deepspeed # compiled against our torch; its tests are skipped without it
	@touch $@

clean: ## remove builds and caches (not .venv, not runs)
	rm -rf build dist src/longitude/native/compiled .pytest_cache .ruff_cache .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
