# Each target makes what it needs on a fresh machine that has Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick-tests test-all chaos options docs gallery lint docker lock

demo: .venv/package
	$(BIN)/finetune demo

# Each core runs one file of tests at a time, whose tests share fixtures. The longest files come first (tests/conftest.py).
PYTEST := $(BIN)/pytest --numprocesses logical --dist loadfile --no-loadscope-reorder

# A quick test of each promise and each module, in minutes. The linters run in parallel with the first tests.
test: .venv/installed
	$(MAKE) --no-print-directory --jobs 2 lint quick-tests

quick-tests: .venv/installed
	$(PYTEST) -m "not slow and not network"

# All tests, without the linters. `make test-all MARKED="slow and not network"` runs only those that `make test` does not run.
# `make test-all PYTEST_OPTIONS=--record-seconds` writes tests/seconds.json.
MARKED = not network
test-all: .venv/installed
	$(PYTEST) -m "$(MARKED)" $(PYTEST_OPTIONS)

# Thousands of faults, with a table of what was tried and how often, in less than an hour.
CHAOS = $(wildcard tests/promises/test_damaged_*.py) tests/promises/test_hostile_requests.py tests/nightly/test_hostile_network.py tests/nightly/test_kills.py tests/nightly/test_growth.py
chaos: .venv/installed
	FINETUNE_CHAOS=full timeout 3600 $(BIN)/pytest $(CHAOS) -m "not network"

# docs/reference.md, from the settings.
options: .venv/installed
	$(BIN)/python tools/reference_page.py

# The documentation as a searchable site in site/; fails if a link leads nowhere. To read it: python3 -m http.server -d site
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	if [ -d build/gallery ]; then cp -r build/gallery site/; fi

# The screenshots of docs/gallery.md, for the next `make docs`: fits, and Chromium on their pages, in some minutes.
gallery: .venv/installed
	$(BIN)/python tools/gallery.py build/gallery

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Build the image of the Dockerfile, then train a few steps in it: offline, on a read-only disk.
ENGINE ?= $(shell for engine in docker podman; do $$engine info >/dev/null 2>&1 && echo $$engine && break; done)
docker:
	@test -n "$(ENGINE)" || { echo "make docker needs docker or podman, and neither answers" >&2; exit 1; }
	@if command -v hadolint >/dev/null; then hadolint Dockerfile; else echo "hadolint is not installed: the Dockerfile is not linted"; fi
	$(ENGINE) build $(BUILD_OPTIONS) --tag finetune .
	$(ENGINE) run --rm $(RUN_OPTIONS) finetune --version
	$(ENGINE) run --rm $(RUN_OPTIONS) --network none --read-only --tmpfs /tmp --tmpfs /workspace \
		finetune fit --config sample_source.yaml --trainer.max_steps 3

# The packages of the image, with hashes. Versions are kept if possible; `make lock COMPILE_OPTIONS=--upgrade` takes the newest.
COMPILE = $(BIN)/uv pip compile --quiet --python-version 3.11 --python-platform linux --only-binary :all: \
	--generate-hashes --annotation-style line --custom-compile-command "make lock" $(COMPILE_OPTIONS)
LOCKED_EXTRAS = --extra parquet --extra export --extra serve --extra storage
# requirements-extras.lock has only what timm and the loggers add.
lock: $(BIN)/uv
	$(COMPILE) pyproject.toml $(LOCKED_EXTRAS) --output-file requirements.lock
	$(COMPILE) pyproject.toml $(LOCKED_EXTRAS) --extra timm --extra tensorboard --extra wandb --extra mlflow \
		--constraint requirements.lock $$(sed -n 's/^\([a-z0-9._-]*\)==.*/--no-emit-package \1/p' requirements.lock) \
		--output-file requirements-extras.lock
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
		| $(COMPILE) - --output-file requirements-build.lock

$(BIN)/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv

# pip would compile 20,000 files, in a minute; Python compiles the quarter that is imported.
INSTALL := $(BIN)/pip install --quiet --no-compile --editable
.venv/package: pyproject.toml
	$(PYTHON) -m venv .venv
	$(INSTALL) .
	touch $@

# What tests need as well.
.venv/installed: .venv/package
	$(INSTALL) '.[dev]'
	touch $@
