# Every target builds what it needs, on a fresh machine too.  `make` alone lists them.
PYTHON ?= python3
BIN := .venv/bin
PIP := -m pip install --quiet --disable-pip-version-check
LOWEST := .venv-lowest
DEMO := .venv-demo
QUICK := tests/test_examples.py tests/test_imports.py tests/cli tests/data tests/experiments tests/models tests/training

.PHONY: help quickstart test lint check check-lowest bench docs docs-serve docs-check demo-check wheel clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/.run: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(PIP) -r requirements.txt
	@touch $@

.venv/.dev: requirements-dev.txt .venv/.run
	$(BIN)/python $(PIP) -r requirements-dev.txt
	@touch $@

quickstart: .venv/.run  ## train ortho_vit_digits on the embedded digits: about a minute on two cores
	$(BIN)/python train.py --config configs/quickstart.yaml

test: .venv/.dev  ## run every test
	$(BIN)/python -m pytest -n auto

lint: .venv/.dev  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test docs  ## all that .ci/run runs

# The lower bounds of pyproject.toml, each `>=` made `==`.  torch and torchvision have the bounds that the pinned pair has:
# the only build that the tests have run with.  So the tests of optim and transport, which use torch alone, are left out.
# Old releases warn about their newer dependencies, so warnings are not errors.
$(LOWEST)/.run: pyproject.toml requirements-dev.txt
	rm -rf $(LOWEST) && $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
		| sed 's/>=/==/' > $(LOWEST)/requirements.txt
	grep -E '^(pytest|pytest-xdist|hypothesis|POT)==' requirements-dev.txt >> $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python $(PIP) -r $(LOWEST)/requirements.txt
	@touch $@

check-lowest: $(LOWEST)/.run  ## the quick tests with the oldest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest -n auto -W default -m "not slow" $(QUICK)

bench: .venv/.dev  ## optimizers and input pipeline against their peers, and a training step, on this machine
	$(BIN)/python -m benchmarks.optimizer_step
	$(BIN)/python -m benchmarks.optimizer_step --compile
	$(BIN)/python -m benchmarks.input_pipeline
	$(BIN)/python -m benchmarks.train_step

docs: .venv/.dev  ## build the site into site/ and check its links; needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	$(BIN)/python docs/scripts/check_site.py site

docs-serve: .venv/.dev  ## show the site on http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8000

docs-check: docs  ## look at every page in Debian's chromium: screenshots, consoles, images, widths, the search
	$(BIN)/python docs/scripts/check_site.py site --browser

# Gradio wants an older Pillow than requirements.txt pins, so it has an environment of its own, on top of .venv.
$(DEMO)/.run: pyproject.toml .venv/.run
	rm -rf $(DEMO) && $(PYTHON) -m venv $(DEMO)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(DEMO)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	$(DEMO)/bin/python $(PIP) "$$(sed -n 's/^demo = \["\([^"]*\)".*/\1/p' pyproject.toml)"
	@touch $@

demo-check: $(DEMO)/.run  ## use the demo in Debian's chromium: upload, choose, see
	$(DEMO)/bin/python docs/scripts/check_demo.py

wheel: .venv/.dev  ## build dist/ortho_vit-*.whl, with the configurations and the trained weights inside
	rm -rf build dist ortho_vit.egg-info
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build ortho_vit.egg-info
	@ls dist

clean:  ## remove the environments, the build and every cache
	rm -rf .venv $(LOWEST) $(DEMO) build dist site site-screenshots ortho_vit.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
