# Every target builds what it needs, on a fresh machine too.  `make` alone lists them.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help quickstart test lint check bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.run: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -r requirements.txt
	@touch $@

.venv/.dev: requirements-dev.txt .venv/.run
	$(PIP) -r requirements-dev.txt
	@touch $@

quickstart: .venv/.run  ## train ortho_vit_digits on the embedded digits: about a minute on two cores
	$(BIN)/python train.py --config configs/quickstart.yaml

test: .venv/.dev  ## run every test
	$(BIN)/python -m pytest -n auto

lint: .venv/.dev  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test  ## all that CI runs

bench: .venv/.dev  ## optimizers and input pipeline against their peers, and a training step, on this machine
	$(BIN)/python -m benchmarks.optimizer_step
	$(BIN)/python -m benchmarks.input_pipeline
	$(BIN)/python -m benchmarks.train_step

clean:  ## remove the environment and every cache
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
