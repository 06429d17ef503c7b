# make demo      install, train a digits CNN with two DDP ranks, show what came out
# make test      install, run the tests, but for those of more than two seconds each
# make test-long  those; in sixteen parts, as CI does, another one after each commit: make test-long ARGS="--part 1/16"
# make test-slow-part  one of 120 parts of the slow tests, another one after each commit: make test-slow-part PART=3
# make test-unit those that start no Python of their own
# make test-docs all examples, and every block of code in the documentation
# make test-bench-part  one of the eleven parts of the benchmarks with a few steps, another one after each commit
# make test-hosts  those that make networks of their own; need root and iproute2
# make test-all  the slow ones and those that need root, too; ranks from a fork server, then each a fresh interpreter
# make test-simulated-gpu  tests/gpu on two simulated GPUs, in an environment of their own (4.8 GB at first)
# make test-ecosystem  other projects' models, optimizers and loaders in every mode (large downloads at first)
# make test-ecosystem-part  a tenth of their libraries but Ray once, in ddp and resumed; another one after the next commit
# make test-platforms  each mode once and a part of tests/unit on a pretended macOS and Windows
# make test-versions  a part of the tests with each Python here, with its oldest and newest torch (hours): ARGS=--dry-run lists them
# make check     what CI runs: tests, lint, types, documentation
# make docs      build docs/_build/html
# make dist      build sdist and wheel of the last commit twice, compare and check them, try the wheel; they are in dist/
# make soak      disturb hundreds of short trainings at random: make soak ARGS='--trials 300 --seed 1'
# make soak-restarts  strike runs that have to survive: make soak-restarts ARGS='--failures 1000 --seed 1'
# make bench     run the benchmarks, write benchmarks/RESULTS.rst, the picture and README's table; benchmarks/__main__.py names the others
# make gpu       on a machine with a GPU, with its own python3: the plan of the first day (benchmarks/gpu_plan.py), ten minutes
# make clean     remove what these made
#
# Every target starts from nothing but Python; a second run installs nothing. Another interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV   ?= .venv
VENV_SIMULATED_GPU ?= .venv-simulated-gpu
BIN    := $(VENV)/bin
# The versions that the project is tested with. Without, the newest ones: make test CONSTRAINTS=
CONSTRAINTS ?= constraints.txt
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
ARGS   ?=
# Tests run in three processes, since they often wait for processes that start, hang or end: a file at a time, in the
# order in which they are collected. tests/unit, whose files are short, comes last, so that all end together. In one
# process: make test WORKERS=0, or ARGS='-p no:xdist', as for --pdb.
WORKERS ?= 3
# To read all files of tests takes half a minute; few have a mark.
with_mark = $$(grep -rl 'mark\.$(1)' tests --include='test_*.py')
PYTEST = $(BIN)/python -m pytest $(if $(findstring no:xdist,$(ARGS)),,-n $(WORKERS) --dist loadfile --no-loadscope-reorder)

# One stamp for each set of requirements, inside the environment that it describes.
define install
$(VENV)/$(1).stamp: setup.cfg setup.py pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing tt-trainloop[$(1)] into $(VENV) ..."
	@$(PIP) -e ".[$(1)]"
	@touch $$@
endef

# Where Python may not write bytecode, each process of a test compiles the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help ci-environment demo test test-long test-slow-part test-unit test-docs test-bench-part test-hosts test-all test-simulated-gpu test-ecosystem test-ecosystem-part test-platforms test-versions lint types docs dist check bench gpu soak soak-restarts clean
help:
	@sed -n '1,/^PYTHON/{/^# make/s/^# //p}' Makefile

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "trainloop needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(eval $(call install,examples))
$(eval $(call install,test))
$(eval $(call install,test-all))
$(eval $(call install,test-ecosystem))
$(eval $(call install,test-ecosystem-part))
$(eval $(call install,lint))
$(eval $(call install,docs))
$(eval $(call install,bench))

# All that CI needs, at once. uv takes a quarter of pip's time; pip stays, for where uv doesn't find what pip does.
EXTRAS_OF_CI := test docs examples lint test-ecosystem-part
comma := ,
space := $() $()
ci-environment: $(VENV)/ci.stamp
$(VENV)/ci.stamp: PACKAGE := ".[$(subst $(space),$(comma),$(EXTRAS_OF_CI))]"
$(VENV)/ci.stamp: setup.cfg setup.py pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing tt-trainloop$(PACKAGE:".%"=%) into $(VENV) ..."
	@$(PIP) uv && UV_SYSTEM_CERTS=1 UV_FIND_LINKS=$$($(BIN)/python -m pip config get global.find-links 2>/dev/null) \
		$(BIN)/uv pip install -q --python $(BIN)/python $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e $(PACKAGE) \
		|| $(PIP) --no-compile -e $(PACKAGE)
	@touch $(EXTRAS_OF_CI:%=$(VENV)/%.stamp) $@

demo: $(VENV)/examples.stamp
	$(BIN)/python examples/ddp_training.py $(ARGS)

test: $(VENV)/test.stamp
	$(PYTEST) $(ARGS)

test-long: $(VENV)/test.stamp
	$(PYTEST) -m "long and not slow and not hosts and not ecosystem" -o faulthandler_timeout=300 \
		$(call with_mark,long) $(ARGS)

# In CI, so that no slow test stays broken for long.
PART ?= $(shell git rev-list --count HEAD 2>/dev/null || echo 0)
test-slow-part: $(VENV)/test.stamp
	$(PYTEST) -m "slow and not hosts and not ecosystem" --part $(PART)/240 -o faulthandler_timeout=600 \
		tests/unit tests/ranks tests/faults $(ARGS)

test-unit: $(VENV)/test.stamp
	$(PYTEST) tests/unit $(ARGS)

test-docs: $(VENV)/test.stamp
	$(PYTEST) tests/docs -m "not hosts" --ignore=tests/docs/test_benchmarks_run.py $(ARGS)

test-bench-part: $(VENV)/test.stamp
	$(BIN)/python -m pytest tests/docs/test_benchmarks_run.py -m slow --part $(PART)/11 -o faulthandler_timeout=600 $(ARGS)

test-hosts: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m "hosts and not slow" $(call with_mark,hosts) $(ARGS)

test-all: $(VENV)/test-all.stamp
	$(BIN)/python -m pytest -m "" -o faulthandler_timeout=300 $(ARGS)
	TRAINLOOP_START_METHOD=spawn $(BIN)/python -m pytest -m "" -o faulthandler_timeout=300 tests/ranks tests/faults tests/gpu $(ARGS)

test-simulated-gpu:
	PYTHON=$(PYTHON) bash tests/simulated_cuda/run.sh $(VENV_SIMULATED_GPU) \
		python -m pytest -m gpu -o faulthandler_timeout=300 tests/simulated_cuda tests/gpu \
		$$(grep -rl 'mark\.gpu' tests/unit) $(ARGS)

test-ecosystem: $(VENV)/test-ecosystem.stamp
	$(BIN)/python -m pytest tests/ecosystem -m ecosystem -o faulthandler_timeout=600 $(ARGS)

# One entry for each library; lora is of transformers and peft.
ECOSYSTEM_PART := test_submitit or (test_ddp and (iterable or torch_geometric or StatefulDataLoader or webdataset \
	or lora or MONAI or schedule-free or AdamW8bit or torchmetrics))
test-ecosystem-part: $(VENV)/test-ecosystem-part.stamp
	$(PYTEST) tests/ecosystem -m ecosystem -k "$(ECOSYSTEM_PART)" --part $(PART)/10 -o faulthandler_timeout=600 $(ARGS)

test-platforms: $(VENV)/test.stamp
	bash tests/pretended/run.sh $(BIN)/python $(PLATFORMS)

test-versions:
	$(PYTHON) tests/kit/versions.py $(ARGS)

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/lint.stamp $(VENV)/examples.stamp
	$(BIN)/mypy

docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

dist: $(VENV)/docs.stamp
	$(BIN)/python .ci/dist.py

check:
	bash .ci/run

soak: $(VENV)/test.stamp
	$(BIN)/python tests/faults/soak.py $(ARGS)

soak-restarts: $(VENV)/test.stamp
	PYTHONPATH=tests $(BIN)/python tests/faults/soak_restarts.py $(ARGS)

bench: $(VENV)/examples.stamp $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks $(ARGS)

gpu:
	$(PYTHON) -m benchmarks.gpu $(ARGS)

clean:
	rm -rf $(VENV) $(VENV_SIMULATED_GPU) build dist *.egg-info docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
