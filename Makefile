# Every target does all the set-up that it needs. A fresh machine needs Python 3.10 or newer with venv, and make.
#
#   make demo    train a small GPT, eager and compiled side by side
#   make test    style, types, layers, then all tests
#   make help    the other targets
#
# Settings, as `make test JOBS=4` or from the environment:
#
#   PYTHON           the Python that .venv is made from                        (python3)
#   VENV             where the virtual environment is                          (.venv)
#   FOREGRAD_PYTHON  a Python that has PyTorch already: .venv is made from it and sees its packages, so its
#                    PyTorch is used in place of the pinned one                (none)
#   TORCH            a version of PyTorch in place of the pinned one: TORCH=2.15.0, in .venv-torch-2.15.0 (none)
#   SETUP=no         install nothing: run FOREGRAD_PYTHON, or else VENV's Python, as it is
#   JOBS             test processes                                            (2)
#   ARGS             more arguments for demo, sweep, hops, fuzz, fresh, bench, clients, matrix, sizes or pytest, for example ARGS="--steps 50"
#   MATRIX_PYTHONS   interpreters for `make matrix` besides those on the path and pyenv's; what else it takes is told
#                    by ARGS=--help, for example ARGS="--only 3.12 3.13 -- tests/guards"

PYTHON ?= python3
TORCH ?=
VENV ?= .venv$(if $(TORCH),-torch-$(TORCH))
JOBS ?= 2
ARGS ?=
SETUP ?= yes

ifeq ($(SETUP),no)
  RUN := PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) $(or $(FOREGRAD_PYTHON),$(VENV)/bin/python)
  READY :=
else
  RUN := $(VENV)/bin/python
  READY := $(VENV)/.foregrad-ready $(VENV)/.foregrad-native
endif

PIP := $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-input --progress-bar off
EXTRAS := cli,solver,torchao,notebook,test,dev,docs
# One thread a test process: the processes share the cores. Hundreds of tests start processes of their own, which take a
# second less where what they import was compiled before. Each process begins with a part of the tests in their order,
# and takes from the part of another one when it is done: tests of one file share what they set up.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test test-all test-core quick matrix setup lint format sweep hops fuzz fresh bench clients coverage docs site sizes clean help
.DEFAULT_GOAL := help

demo: $(READY)  ## train a small GPT, eager and compiled side by side
	@$(RUN) -m foregrad demo $(ARGS)

test: $(READY) lint  ## style, types, layers, then all tests
	@echo "==> tests"
	@$(TEST_ENV) $(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(READY)  ## all tests with every product of their cases whole: see tests/covering.py
	@FOREGRAD_TESTS=all $(TEST_ENV) $(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

quick: $(READY)  ## the tests but for those that take more than some ten seconds each
	@$(TEST_ENV) $(RUN) -m pytest -n $(JOBS) --dist worksteal -m "not slow" $(ARGS)

# With the annexes hidden. A file belongs here if it is about the core alone; in the second list if its programs also
# have state (modules, attributes, tensors reached by closure) and hooks.
CORE_TESTS := $(wildcard tests/unit/test_partition_*.py) $(addprefix tests/unit/test_,$(addsuffix .py, \
  effect_log heap numbering memory_order identity maxflow printing written_inputs partial_backward detached_results \
  symbolic_layouts size_arithmetic backends_boxed backends_source))
STATE_TESTS := tests/golden $(addprefix tests/unit/test_,$(addsuffix .py, \
  late_metadata late_graphs origin spelling gradient_arrival left_behind))

test-core: $(READY)  ## the core's tests alone, without the annexes: at most four minutes
	@$(TEST_ENV) $(RUN) -m pytest -n $(JOBS) --dist worksteal -p tests.house.core_alone $(ARGS) $(CORE_TESTS)
	@$(TEST_ENV) FOREGRAD_TEST_WITH=python,regions $(RUN) -m pytest -n $(JOBS) --dist worksteal -p tests.house.core_alone \
	  $(ARGS) $(STATE_TESTS)

matrix:  ## all tests on each Python that is here, 3.10 to 3.14; with ARGS=--torch, on each minor version of PyTorch
	@JOBS=$(JOBS) $(PYTHON) tests/matrix.py $(ARGS)

setup: $(READY)  ## only make the virtual environment

lint: $(READY)  ## ruff, mypy and import-linter
	@echo "==> style, types, layers"
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@said=$$($(RUN) -c 'from importlinter.cli import lint_imports_command as main; main()' 2>&1) \
		|| { echo "$$said"; exit 1; }

format: $(READY)  ## rewrite the sources in the project's style
	@$(RUN) -m ruff check --quiet --fix .
	@$(RUN) -m ruff format .

sweep: $(READY)  ## every operator and module of PyTorch's own databases against eager
	@$(RUN) -m tests.parity.sweep $(ARGS)

hops: $(READY)  ## PyTorch's higher-order operators and programs with them, each in a process of its own, against eager
	@$(RUN) -m tests.operators.hop_survey $(ARGS)

fuzz: $(READY)  ## random programs against eager, longer than the tests do
	@$(RUN) -m tests.parity.fuzz $(ARGS)
ifeq ($(ARGS),)
	@$(RUN) -m tests.higher.fuzz
	@$(RUN) -m tests.guards.stress
endif

fresh: $(READY)  ## every layer of torch.nn and every example, each in a process of its own with the default backend
	@$(RUN) -m tests.front_door.run $(ARGS)

bench: $(READY)  ## every benchmark, against PyTorch's own, into benchmarks/RESULTS.md
	@$(RUN) -m benchmarks.run $(ARGS)

clients: $(READY)  ## training programs of libraries from the package index against eager, into benchmarks/CLIENTS.md
	@$(RUN) -m tests.clients.run --install --write benchmarks/CLIENTS.md $(ARGS)

coverage: $(READY)  ## the lines that no test runs
	@$(TEST_ENV) $(RUN) -m pytest -n $(JOBS) --cov --cov-report=term $(ARGS)

docs: $(READY)  ## run the documentation's examples and insert what they print
	@$(RUN) docs/generate.py

site: $(READY)  ## the documentation as a site that opens without a network: build/site/index.html
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(RUN) -m mkdocs build --strict --quiet
	@echo "the site is in $(CURDIR)/build/site/index.html"

sizes: $(READY)  ## lines of the core and of each annex, and the imports between them, which may only fall
	@$(RUN) -m tests.house.measure $(ARGS)

clean:  ## remove what the targets made, the virtual environment too
	rm -rf $(VENV) .venv-3.* .venv-torch-* .venv-clients build dist .coverage .coverage.* .hypothesis .import_linter_cache
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks docs examples -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)


# The stamp is written last, so a set-up that was interrupted is done again, from where it was.
$(VENV)/.foregrad-ready: pyproject.toml constraints.txt
	@set -eu; \
	python="$(or $(FOREGRAD_PYTHON),$(PYTHON))"; \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "foregrad needs Python 3.10 or newer, and '$$python' is not: try make PYTHON=python3.12 ..." >&2; exit 1; }; \
	if ! "$(VENV)/bin/python" -c 'import pip' 2>/dev/null; then \
		echo "==> making $(VENV)"; \
		"$$python" -m venv $(if $(FOREGRAD_PYTHON),--system-site-packages) "$(VENV)" || { \
			echo "making a virtual environment failed: on Debian and Ubuntu, install python3-venv" >&2; exit 1; }; \
	fi; \
	if [ -n "$(FOREGRAD_PYTHON)" ]; then : 'Where it is of a virtual environment itself, the new one sees only what is behind that.'; \
		"$$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
			>"$$("$(VENV)/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/foregrad_python.pth"; \
	fi; \
	cp constraints.txt "$(VENV)/constraints.txt"; \
	if [ -n "$(FOREGRAD_PYTHON)" ] && [ -z "$(TORCH)" ] && "$(VENV)/bin/python" -c 'import torch' 2>/dev/null; then \
		echo "==> using the PyTorch that is there"; \
		grep -v '^torch==' constraints.txt >"$(VENV)/constraints.txt"; \
	else \
		echo "==> PyTorch $(or $(TORCH),$$(sed -n 's/^torch==//p' constraints.txt)) (the first time, some minutes)"; \
		$(if $(TORCH),sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >"$(VENV)/constraints.txt";) \
		$(PIP) "$$(grep '^torch==' "$(VENV)/constraints.txt")" -c "$(VENV)/constraints.txt"; \
	fi; \
	echo "==> foregrad and its tools"; \
	FOREGRAD_BUILD_NATIVE=0 $(PIP) -e ".[$(EXTRAS)]" -c "$(VENV)/constraints.txt"; \
	touch "$@"

# Where there is no compiler, calls go through Python, and the tests of the C++ part are skipped.
$(VENV)/.foregrad-native: $(VENV)/.foregrad-ready $(wildcard src/foregrad/_native/*.cpp src/foregrad/_native/*.h) src/foregrad/_native/build.py
	@echo "==> the C++ part of calls"
	@$(VENV)/bin/python -m foregrad build-native || true
	@touch "$@"
