# Two commands: `make serve` and `make test`. Both set up all they need in .venv.
# `make test-fast` is for the time between two changes: no servers, no torch.
# `make docs` builds the documentation as a site, and `make release` the packages, which it tries as a user would.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST := $(VENV)/transformers-5.17.0
TRITON := $(VENV)/triton-3.9.0
SGLANG := $(VENV)/sglang-0.5.23
SPHINX := $(VENV)/sphinx

# One test process more than there are cores, because tests wait for servers. A file stays in one process, so that its
# servers start once. Files keep their order, in which the longest begin (tests/cpu_seconds.toml).
PROCESSES = $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() + 1))')
PARALLEL = -n $(PROCESSES) --dist loadfile --no-loadscope-reorder
FAST := core cost config engine flow laws routing wire workload test_architecture.py
FAST_SKIP := laws/test_schedule_never_changes_the_network.py

# Tests start a hundred processes; without bytecode each would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install serve test tests tests-cuda tests-oldest tests-sglang test-fast mutants docs release lint clean

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

# The oldest transformers that pyproject.toml allows, beside the one installed. Tests with the marker
# `transformers` run on both.
$(OLDEST): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --target $@ transformers==$(lastword $(subst -, ,$@))
	@touch $@

# Triton, whose interpreter runs the GPU kernels. It is beside the environment, because torch would load it in every
# process of every other test. Where there is none for a platform, tests/cuda is skipped.
$(TRITON): $(INSTALLED)
	-$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$(lastword $(subst -, ,$@))
	@mkdir -p $@
	@touch $@

# SGLang's sources, which the contract tests of moestro-sglang read and do not run. Its libraries need GPUs.
$(SGLANG): $(INSTALLED)
	-$(BIN)/python -m pip install --quiet --no-deps --target $@ sglang==$(lastword $(subst -, ,$@))
	@mkdir -p $@
	@touch $@

# Each goal runs, whatever becomes of those before it.
test:
	@$(MAKE) --no-print-directory --keep-going lint tests tests-cuda tests-oldest tests-sglang

tests: install
	$(BIN)/pytest $(PARALLEL)

tests-cuda: $(TRITON)
	PYTHONPATH=$(TRITON) $(BIN)/pytest $(PARALLEL) tests/cuda

tests-oldest: $(OLDEST)
	PYTHONPATH=$(OLDEST) $(BIN)/pytest $(PARALLEL) -m 'transformers and not slow' tests/parity tests/model

tests-sglang: $(SGLANG)
	PYTHONPATH=$(SGLANG) $(BIN)/pytest integrations/sglang/tests

test-fast: lint
	$(BIN)/pytest $(PARALLEL) $(FAST:%=tests/%) $(FAST_SKIP:%=--ignore=tests/%)

# Known faults, each planted in a copy of the package, that the tests must catch (tests/mutants.md).
mutants: install $(TRITON)
	PYTHONPATH=$(abspath $(TRITON)) $(BIN)/python tools/mutants.py --json bench/results/robustness/mutants.json

# Sphinx, beside the environment: no test and no server loads it.
$(SPHINX): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --target $@ --constraint constraints.txt --group docs
	@touch $@

# The documentation as a site with search, in docs/_build; a broken link or a page that no menu has fails it.
docs: $(SPHINX)
	PYTHONPATH=$(abspath $(SPHINX)) $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build
	@echo "open docs/_build/index.html"

# The packages in dist/, each installed into an empty environment, where the first commands of its users run.
release: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group release
	$(BIN)/python tools/release.py

clean:
	rm -rf $(VENV) dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
