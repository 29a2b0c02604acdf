# Each target makes what it needs on a fresh machine that has Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint

demo: .venv/installed
	$(BIN)/finetune demo

test: lint
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
