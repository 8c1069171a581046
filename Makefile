# Every target sets up what it needs in .venv; `make help` lists the targets.

# The first interpreter that runs: pyenv's shims exist even for versions that are not enabled.
PYTHON ?= $(firstword $(foreach p,python3.11 python3,$(shell $(p) -c 'print("$(p)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
BACKEND ?= neuron
# Tests run in as many processes as there are cores, so each keeps to one thread of OpenMP's.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n auto --dist worksteal
OUTPUT ?= demo-output

# mypy judges the code by the types of what it imports, so it needs all of that installed.
LINT_EXTRAS := lint,test,demo,bench
# Messages shall name the files, not the links to them that `types` makes.
MYPY = $(BIN)/mypy | sed -E 's,^build/types/neuron_compile/(lowering|runtime)/,\1/,; s,^build/types/,,'

.DEFAULT_GOAL := help
# Parts of the benchmarks that ran at once would measure one another.
.NOTPARALLEL:
.PHONY: help demo test test-all conformance programs lint typecheck types bench bench-suite \
	bench-warm-start bench-depth bench-memory bench-report test-versions clean
# A failed install must not leave a stamp that says it is done.
.DELETE_ON_ERROR:

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | \
		while IFS="$$(printf '\t')" read -r name text; do printf '%-16s %s\n' "$$name" "$$text"; done

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python found; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp for each list of extras, made anew when the requirements change.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@touch $@

demo: $(VENV)/.installed-demo ## Compare eager and compiled on real data (BACKEND=, OUTPUT=)
	$(BIN)/python -m examples.demo --backend $(BACKEND) --output $(OUTPUT)

test: $(VENV)/.installed-test,demo ## Run the fast tests (ARGS= is passed to pytest)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-test,demo ## Run the slow tests too
	$(PYTEST) $(ARGS)

conformance: $(VENV)/.installed-test,demo ## Run PyTorch's whole operator database, resumable
	$(BIN)/python -m tests.conformance --page $(ARGS)

programs: $(VENV)/.installed-test,demo ## Run 5,000 random programs, resumable (ARGS= is passed on)
	$(BIN)/python -m tests.programs $(ARGS)

lint: $(VENV)/.installed-$(LINT_EXTRAS) types ## Run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MYPY)

typecheck: $(VENV)/.installed-$(LINT_EXTRAS) types ## Run mypy alone
	$(MYPY)

# The package as it is imported, which setuptools maps from three folders; see [tool.mypy].
types:
	@rm -rf build/types && mkdir -p build/types/neuron_compile
	@ln -s $(CURDIR)/neuron_compile/*.py* $(CURDIR)/neuron_compile/cli $(CURDIR)/lowering \
		$(CURDIR)/runtime build/types/neuron_compile/

bench: bench-suite bench-warm-start bench-depth bench-memory bench-report ## Run all benchmarks (ARGS=--resume continues)

bench-suite: $(VENV)/.installed-bench ## Steady state and first calls: all suites and backends
	$(BIN)/python -m benchmarks $(ARGS)

bench-warm-start: $(VENV)/.installed-bench ## Cold and warm starts, in processes of their own
	$(BIN)/python -m benchmarks.warm_start $(ARGS)

bench-depth: $(VENV)/.installed-bench ## First calls of 2 to 48 layers
	$(BIN)/python -m benchmarks.depth $(ARGS)

bench-memory: $(VENV)/.installed-bench ## Peak memory of training and inference
	$(BIN)/python -m benchmarks.peak_memory $(ARGS)

bench-report: $(VENV)/.installed-bench ## Write docs/performance.md from what was measured
	$(BIN)/python -m benchmarks.report

test-versions: | $(BIN)/python ## Test on each Python found with the newest jax and torch-mlir
	$(BIN)/python tools/test_versions.py $(ARGS)

clean: ## Remove what the targets made
	rm -rf $(VENV) .venv-3.* demo-output build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
