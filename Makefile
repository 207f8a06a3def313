# Two commands: `make serve` and `make test`. Both set up all they need in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST := $(VENV)/transformers-5.17.0

.PHONY: install serve test lint clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Moestro needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 install")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[serve]' --group dev
	@touch $@

serve: install
	$(BIN)/moestro serve

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The oldest transformers that pyproject.toml allows, beside the one installed; the tests of the model room run on both.
$(OLDEST): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --target $@ transformers==$(lastword $(subst -, ,$@))
	@touch $@

test: export OMP_NUM_THREADS ?= 1
test: lint $(OLDEST)
	$(BIN)/pytest
	PYTHONPATH=$(OLDEST) $(BIN)/pytest tests/parity tests/model

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
