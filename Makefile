# Each target makes what it needs on a fresh machine that has Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint docker lock

demo: .venv/installed
	$(BIN)/finetune demo

# A file of tests a core at a time: what a file's tests share is made once.
test: lint
	$(BIN)/pytest --numprocesses logical --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The image of the Dockerfile, then a few steps of training in it: offline, and with nothing to write to but memory.
ENGINE ?= $(shell for engine in docker podman; do $$engine info >/dev/null 2>&1 && echo $$engine && break; done)
docker:
	@test -n "$(ENGINE)" || { echo "make docker needs docker or podman, and neither answers" >&2; exit 1; }
	@if command -v hadolint >/dev/null; then hadolint Dockerfile; else echo "without hadolint: not linted"; fi
	$(ENGINE) build $(BUILD_OPTIONS) --tag finetune .
	$(ENGINE) run --rm $(RUN_OPTIONS) finetune --version
	$(ENGINE) run --rm $(RUN_OPTIONS) --network none --read-only --tmpfs /tmp --tmpfs /workspace \
		finetune fit --config sample_source.yaml --trainer.max_steps 3

# What the image is made of, with hashes: versions that still fit stay; `make lock COMPILE_OPTIONS=--upgrade` takes the newest.
COMPILE = $(BIN)/uv pip compile --quiet --python-version 3.11 --python-platform linux --only-binary :all: \
	--generate-hashes --annotation-style line --custom-compile-command "make lock" $(COMPILE_OPTIONS)
lock: $(BIN)/uv
	$(COMPILE) pyproject.toml --extra parquet --extra export --extra serve --output-file requirements.lock
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
		| $(COMPILE) - --output-file requirements-build.lock

$(BIN)/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
