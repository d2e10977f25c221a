# Two commands set everything up, with Python, make and a package index:
#   make demo    trains a small model on several virtual devices and shows what happens
#   make test    checks style, types and behaviour
# `make help` lists the rest.

.DEFAULT_GOAL := help
.NOTPARALLEL:
SHELL := /bin/bash

# The interpreters. The oldest supported JAX runs on the oldest supported Python, the newest on the newest.
PYTHON ?= python3
ifndef PYTHON_NEWEST
PYTHON_NEWEST := $(shell sh scripts/newest_python.sh 3.14 3.13)
endif
PYTHON_TENSORFLOW ?= $(PYTHON)
JAX_OLDEST ?= jax==0.10.2
TENSORFLOW_VERSION ?= tensorflow-cpu==2.21.*
# Arguments for pytest: make test PYTEST_ARGS="-k reduce"
PYTEST_ARGS ?=

# Before a program that computes with large buffers (docs/how-to/launch.md); `make LARGE_PAGES=` goes without. What the user
# has set stays. C libraries but that of Linux do not know the variable.
GLIBC := glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296
LARGE_PAGES ?= GLIBC_TUNABLES="$${GLIBC_TUNABLES:-$(GLIBC)}"

# Where Python may not keep what it compiles, each process would compile the sources anew, 0.1 to 0.2 s of its start.
unexport PYTHONDONTWRITEBYTECODE

DEMO := .venv
TEST := .venv-test
NEWEST := .venv-newest
TENSORFLOW := .venv-tensorflow
PLAN := .venv-plan
PLAN_GPU := .venv-plan-gpu
DOCS := .venv-docs
BUILD := .venv-dist

# What is installed is compiled as it is imported, since most of it never is.
PIP := -m pip --disable-pip-version-check install --quiet --quiet --no-compile
# The pip that comes with Python 3.11 takes twice as long as the newest.
new_environment = $(1) -m venv $(2) && $(2)/bin/python $(PIP) --upgrade pip
# Tests that run at a time: two more than two cores, since some wait for other processes more than they compute.
PYTEST_WORKERS ?= 4
PYTEST := -m pytest -n $(PYTEST_WORKERS) --dist worksteal --quiet --progress
STARTED := $(shell date +%s)
# With JAX 0.10, XLA's older emitters compile for the CPU in half the time. The tests' programs are too small to be split
# for parallel code generation. The newest XLA has no older emitters and refuses the flag.
OLDER_EMITTERS := --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1
QUICK_COMPILING = JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
    $(if $(filter 3.11,$(VERSION)),XLA_FLAGS="$${XLA_FLAGS:-$(OLDER_EMITTERS)}")
# What `make test-quick` runs, without the tests that start processes: the essentials, over one strategy.
QUICK := $(patsubst %,tests/%.py,test_layers engine/test_run engine/test_function values/test_per_replica_values \
    tracing/test_contexts variables/test_mirrored_variables collectives/test_collectives input/test_input_rules) \
    src/replicax/_strategies/strategy.py
# XLA's compilers for TPUs and GPUs, each in an environment of its own: libtpu and the plugin for GPUs change how JAX starts.
WITH_PLAN = pythons=; for one in $(PLAN) $(PLAN_GPU); do \
    if [ -e $$one/.installed ]; then pythons="$${pythons:+$$pythons:}$(CURDIR)/$$one/bin/python"; fi; done; \
    if [ -n "$$pythons" ]; then export REPLICAX_PLAN_PYTHON="$${REPLICAX_PLAN_PYTHON:-$$pythons}"; fi;
WITH_TENSORFLOW = if [ -e $(TENSORFLOW)/.installed ]; then \
    export REPLICAX_TENSORFLOW_PYTHON="$${REPLICAX_TENSORFLOW_PYTHON:-$(CURDIR)/$(TENSORFLOW)/bin/python}"; fi;
SAY_VERSIONS = -c 'import jax, sys; print("Testing on Python", sys.version.split()[0], "with JAX", jax.__version__)'

SAY_EXPECTED = echo "All of the tests that follow take about $(1) minutes on 2 idle cores."

version_of = $(if $(1),$(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null))
VERSION := $(call version_of,$(PYTHON))
VERSION_NEWEST := $(call version_of,$(PYTHON_NEWEST))

.PHONY: help demo demo-workers test check check-rest environments test-quick test-python test-thorough test-compilers test-newest injections record tensorflow plan interpreters lint format docs docs-browser docs-links bench dist faults clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	    printf '  make %-17s %s\n' "$$name" "$$text"; done

demo: $(DEMO)/.installed  ## train a small model on several virtual devices
	$(LARGE_PAGES) $(DEMO)/bin/python examples/digits.py

demo-workers: $(DEMO)/.installed  ## the same in two worker processes
	$(DEMO)/bin/replicax launch --workers 2 examples/digits.py --strategy multi_worker

SAY_TIME = seconds=$$(($$(date +%s) - $(STARTED))); \
    printf '$(1) passed, in %d:%02d minutes.\n' $$((seconds / 60)) $$((seconds % 60))

# While the types are checked, one process imports all tests, which compiles the sources: or each of the processes that
# run the tests would do so by itself.
test: interpreters $(TEST)/.installed  ## check style and types, and run the tests on python3
	@$(TEST)/bin/python -m pytest --collect-only --quiet >/dev/null 2>&1 & \
	    $(MAKE) --no-print-directory lint; status=$$?; wait; exit $$status
	@$(MAKE) --no-print-directory test-python
	@$(call SAY_TIME,Style$(comma) types and tests)

# `make test` comes first, so that the most likely faults are found first.
check: test check-rest  ## run every check: make test, then all cases, both ends of the versions, TensorFlow, TPUs, the site
	@$(call SAY_TIME,All checks)

# The site, which takes one core, is built beside the tests.
check-rest: environments  ## run what make check has beside make test
	@mkdir -p build; $(MAKE) --no-print-directory docs >build/docs.log 2>&1 & site=$$!; \
	    trap "kill $$site; exit 130" INT TERM; \
	    $(MAKE) --no-print-directory test-thorough && $(MAKE) --no-print-directory test-newest && \
	    $(MAKE) --no-print-directory injections; tests=$$?; \
	    wait $$site || { cat build/docs.log; exit 1; }; tail -n 1 build/docs.log; exit $$tests

interpreters:
ifeq ($(VERSION),)
	@echo "'$(PYTHON)' does not run. Name a Python, 3.11 or later, with PYTHON=..."; exit 1
else ifneq ($(filter 2.% 3.0 3.1 3.2 3.3 3.4 3.5 3.6 3.7 3.8 3.9 3.10,$(VERSION)),)
	@echo "'$(PYTHON)' is Python $(VERSION); replicax needs 3.11 or later. Name one with PYTHON=..."; exit 1
else ifeq ($(VERSION),3.11)
	@echo "Python $(VERSION) ($(PYTHON)) tests the oldest supported JAX, $(JAX_OLDEST)."
else
	@echo "Python $(VERSION) ($(PYTHON)) tests the newest JAX there is for it."
endif
ifeq ($(VERSION_NEWEST),)
	@echo "There is no Python 3.14 or 3.13 here: the newest JAX is not tested on it. Name one with PYTHON_NEWEST=..."
else ifeq ($(VERSION_NEWEST),$(VERSION))
	@echo "That is the newest Python here too, so make check runs the tests twice with it: without and with all optimizations."
else
	@echo "Python $(VERSION_NEWEST) ($(PYTHON_NEWEST)) tests the newest JAX."
endif

comma := ,

test-quick: $(TEST)/.installed  ## run the essentials in under a minute: one strategy, no processes
	REPLICAX_TEST_STRATEGIES=2 $(QUICK_COMPILING) $(TEST)/bin/python $(PYTEST) -m "not processes" $(QUICK)

# Here JAX compiles without the slow passes, since there is much to compile; with the newest JAX it compiles with all.
test-python: $(TEST)/.installed  ## run the tests on python3 (JAX 0.10.2 where that is Python 3.11)
	@$(TEST)/bin/python $(SAY_VERSIONS)
	@$(call SAY_EXPECTED,14)
	$(QUICK_COMPILING) $(TEST)/bin/python $(PYTEST) $(PYTEST_ARGS)

test-thorough: $(TEST)/.installed tensorflow plan  ## run the cases that make test leaves out, with TensorFlow and XLA's compilers for TPUs and GPUs
	@$(call SAY_EXPECTED,13)
	$(WITH_TENSORFLOW) $(WITH_PLAN) $(QUICK_COMPILING) $(TEST)/bin/python $(PYTEST) \
	    --thorough -m "thorough or tensorflow" $(PYTEST_ARGS)

RECORDED = $(shell grep -lrE "\b(from_tensorflow|expressions_of)\b" --include="test_*.py" tests)
# Name tests with PYTEST_ARGS; REPLICAX_RECORD=all also runs programs that have a valid record (see tests/recorded.py).
record: $(TEST)/.installed tensorflow  ## store TensorFlow's results of new and changed programs of the tests
	$(WITH_TENSORFLOW) REPLICAX_RECORD=$${REPLICAX_RECORD:-1} $(TEST)/bin/python -m pytest --quiet $(or $(PYTEST_ARGS),$(RECORDED))

faults: $(TEST)/.installed  ## plant faults in the source, one at a time, and list those that the tests miss; about an hour
	$(QUICK_COMPILING) $(TEST)/bin/python scripts/faults.py $(FAULTS_ARGS)

TIMES ?= 1
injections: $(TEST)/.installed  ## preempt a job at random moments, and kill and stop tasks of a cluster, TIMES times
	$(TEST)/bin/python scripts/preemption.py $$((5 * $(TIMES)))
	$(TEST)/bin/python scripts/parameter_servers.py $(TIMES) --closures $$((1000 * $(TIMES))) --slack 10

test-compilers: $(TEST)/.installed plan  ## run the tests that compile for TPUs and GPUs
	$(WITH_PLAN) $(TEST)/bin/python $(PYTEST) --thorough tests/plan/test_tpu_compiler.py tests/plan/test_gpu_compiler.py $(PYTEST_ARGS)

# The tests that depend on JAX, over one strategy, and the cases that are marked `numbers`, so that numbers are also
# compared with all optimizations. The files below run with the oldest JAX alone: they test logical devices, start many
# processes, or compile nothing.
OF_THE_OLDEST := job cluster commands launch transport rpc benchmark test_layers.py test_architecture.py \
    test_release.py test_repository.py test_selection.py engine/test_stress.py strategies/test_several_devices_workers.py \
    input/test_multi_worker_input.py variables/test_sharded_workers.py \
    $(patsubst %,data/test_%.py,data_files data_skipping data_state data_threads worker_processes) \
    $(patsubst %,base/test_%.py,atomic_files devices messages) \
    $(patsubst %,tf/test_%.py,check_tf compare compilation_cache dataset_processes evaluators_and_checkpoints \
        keras_parameter_servers keras_starts parameter_servers run_tf tf_devices tf_imports tf_names tpu_hosts) \
    $(patsubst %,parameter_server/test_%.py,faults bytes coordinator several_servers) \
    $(patsubst %,checkpoint/test_%.py,checkpoint_workers crash_points preemption_workers damage report) \
    $(patsubst %,conformance/test_%.py,multi_worker_suite examples exact_resume) \
    $(patsubst %,plan/test_%.py,abstract_variables tpu_compiler gpu_compiler)
WITH_THE_NEWEST := $(if $(filter-out $(VERSION),$(VERSION_NEWEST)),$(NEWEST),$(TEST))
test-newest: $(WITH_THE_NEWEST)/.installed  ## run the tests with the newest JAX, if there is Python 3.14 or 3.13, and all optimizations
	@$(WITH_THE_NEWEST)/bin/python $(SAY_VERSIONS)
	@$(call SAY_EXPECTED,22)
	REPLICAX_TEST_STRATEGIES=2 $(WITH_THE_NEWEST)/bin/python $(PYTEST) --numbers \
	    $(patsubst %,--ignore=tests/%,$(OF_THE_OLDEST)) $(PYTEST_ARGS)

# The comparison with TensorFlow runs where TensorFlow can be installed, and is skipped elsewhere.
tensorflow:
	@$(MAKE) --no-print-directory $(TENSORFLOW)/.installed \
	    || echo "$(TENSORFLOW_VERSION) does not install on '$(PYTHON_TENSORFLOW)': the comparison with it is skipped."

# The tests that compile for TPUs and GPUs run where the compiler can be installed (on Linux), and are skipped elsewhere.
plan:
	@$(MAKE) --no-print-directory $(PLAN)/.installed \
	    || echo "jax[tpu] does not install on '$(PYTHON)': nothing is compiled for TPUs."
	@$(MAKE) --no-print-directory $(PLAN_GPU)/.installed \
	    || echo "The compiler for GPUs does not install on '$(PYTHON)': nothing is compiled for them."

lint: $(TEST)/.installed  ## check style, format, types, and the sizes of modules, functions and classes
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	$(TEST)/bin/mypy --num-workers 2
	@$(TEST)/bin/python scripts/budget.py

format: $(TEST)/.installed  ## mend style and format
	$(TEST)/bin/ruff check --fix .
	$(TEST)/bin/ruff format .

docs: $(DOCS)/.installed  ## build the documentation site into build/site; every warning and broken link is an error
	$(DOCS)/bin/python site/build.py $(DOCS_ARGS)

docs-browser: $(DOCS)/.installed  ## open every page of the built site in a browser (Chromium), and check it
	$(DOCS)/bin/python site/browser.py

docs-links: $(DOCS)/.installed  ## ask for each address outside of the site that its pages link to
	$(DOCS)/bin/python site/build.py --builder linkcheck --fast

bench: $(TEST)/.installed  ## measure what a step costs
	$(TEST)/bin/python benchmarks/step.py

dist: interpreters $(BUILD)/.installed  ## build the sdist and the wheel, and check them on both ends
	$(BUILD)/bin/python scripts/dist.py $(PYTHON)$(if $(filter 3.11,$(VERSION)),=$(JAX_OLDEST)) \
	    $(if $(filter-out $(VERSION),$(VERSION_NEWEST)),$(PYTHON_NEWEST))

clean:  ## remove environments and what tools leave behind
	rm -rf $(DEMO) $(TEST) $(NEWEST) $(TENSORFLOW) $(PLAN) $(PLAN_GPU) $(DOCS) $(BUILD) $(BUILD)-* build dist .hypothesis .jax_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# All at once, since they wait for the index and the disk; whoever needs one makes it again where that failed.
OTHERS := tensorflow plan $(DOCS)/.installed $(if $(filter-out $(VERSION),$(VERSION_NEWEST)),$(NEWEST)/.installed)
environments:
	@for one in $(TEST)/.installed $(OTHERS); do $(MAKE) --no-print-directory $$one & done; wait

# Each environment has a stamp: it is installed again only when pyproject.toml has changed.
$(DEMO)/.installed: pyproject.toml
	$(call new_environment,$(PYTHON),$(DEMO))
	$(DEMO)/bin/python $(PIP) --editable '.[examples]'
	@touch $@

$(TEST)/.installed: pyproject.toml
	$(call new_environment,$(PYTHON),$(TEST))
	$(TEST)/bin/python $(PIP) --editable '.[test,test-tf]' $(if $(filter 3.11,$(VERSION)),'$(JAX_OLDEST)')
	@touch $@

$(NEWEST)/.installed: pyproject.toml
	$(call new_environment,$(PYTHON_NEWEST),$(NEWEST))
	$(NEWEST)/bin/python $(PIP) --upgrade --editable '.[test,test-tf]'
	@touch $@

$(DOCS)/.installed: pyproject.toml
	$(call new_environment,$(PYTHON),$(DOCS))
	$(DOCS)/bin/python $(PIP) --editable '.[all,docs,examples]'
	@touch $@

$(BUILD)/.installed:
	$(call new_environment,$(PYTHON),$(BUILD))
	$(BUILD)/bin/python $(PIP) build twine 'readme_renderer[md]'
	@touch $@

$(TENSORFLOW)/.installed:
	$(call new_environment,$(PYTHON_TENSORFLOW),$(TENSORFLOW))
	$(TENSORFLOW)/bin/python $(PIP) --only-binary :all: '$(TENSORFLOW_VERSION)' tensorboard  # for tf.summary
	@touch $@

$(PLAN)/.installed:
	$(call new_environment,$(PYTHON),$(PLAN))
	$(PLAN)/bin/python $(PIP) $(if $(filter 3.11,$(VERSION)),'$(subst jax==,jax[tpu]==,$(JAX_OLDEST))','jax[tpu]') flatbuffers
	@touch $@

# Without the 4 GB of CUDA's libraries, which only running programs need.
$(PLAN_GPU)/.installed:
	$(call new_environment,$(PYTHON),$(PLAN_GPU))
	$(PLAN_GPU)/bin/python $(PIP) $(if $(filter 3.11,$(VERSION)),'$(JAX_OLDEST)',jax) flatbuffers
	$(PLAN_GPU)/bin/python $(PIP) --no-deps nvidia-cuda-nvcc-cu12 $$($(PLAN_GPU)/bin/python -c \
	    'import jax; print(*(f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt")))')
	@touch $@
