# Shortcuts; every recipe is a command of the README.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: build test check bench clean

build: $(BIN)/neml2-build
	$(BIN)/neml2-build

$(BIN)/neml2-build: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -e '.[dev]'

test: $(BIN)/neml2-build
	$(BIN)/pytest

check: $(BIN)/neml2-build
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(BIN)/neml2-build
	$(BIN)/python benchmarks/run.py --quick

clean:
	rm -rf aoti cache/objects cache/actions cache/targets cache/tmp cache/toolchain cache/logs cache/doit.db
