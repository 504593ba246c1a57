# The one front door. Every target creates what it needs; `make help` lists them.
#
#   make run                     compare stock vLLM and the plugin on one workload (tiny model)
#   make run MODEL=PATH          the same with any model on the installed engine
#   make run QUICK=1             a quarter of the sessions
#   make test                    all checks; TIER=unit runs one of lint, unit, contracts, engine,
#                                sglang
#   make test-lmcache            the tests that need LMCache, which is laid into .lmcache (4 s, 94 MB)
#   make bench                   all benchmarks; BENCH=retention runs one, QUICK=1 shortens it;
#                                those that need a GPU (gpu_…) or SGLang's environment (sglang_…)
#                                run by name only
#   make tiny-trained            train the tiny model of tools/tiny_trained again (ten minutes), in
#                                out/tiny-trained; ARGS=tools/tiny_trained replaces the committed one
#   make setup-all               both environments: .venv-vllm and .venv-sglang
#   make … PY=/path/to/python    use this environment as it is instead of .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help setup setup-sglang setup-all run test test-lmcache lint bench tiny-trained doctor clean

VENV := .venv-vllm
PY ?=
ARGS ?=
ifeq ($(PY),)
PYTHON := $(VENV)/bin/python
READY := setup
else
PYTHON := $(PY)
READY :=
endif
SGLANG_PYTHON := .venv-sglang/bin/python
# An engine's processes import twice as fast from compiled files, which the first of them writes.
unexport PYTHONDONTWRITEBYTECODE
# The tests of all tiers, and of SGLang's, need its environment too.
TEST_READY := $(READY) $(if $(or $(filter sglang,$(TIER)),$(if $(TIER),,all)),setup-sglang)
BENCH ?= $(filter-out _% gpu_% sglang_%,$(basename $(notdir $(shell grep -l -- '"--json"' benchmarks/*.py 2>/dev/null))))

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' $(MAKEFILE_LIST)
	@echo "Targets: setup setup-sglang setup-all run test test-lmcache lint bench tiny-trained doctor clean"

setup:
	@python3 -m tools.setup_vllm $(if $(FORCE),--force)

setup-sglang:
	@python3 -m tools.setup_sglang $(if $(FORCE),--force)

setup-all: setup setup-sglang

run: $(READY)
	@$(PYTHON) -m tools.run $(if $(MODEL),--model "$(MODEL)") $(if $(QUICK),--quick) $(ARGS)

test: $(TEST_READY)
	@$(PYTHON) -m tools.tiers $(foreach tier,$(TIER),--tier $(tier)) $(ARGS)

LMCACHE := lmcache==0.5.6 opentelemetry-exporter-prometheus==0.60b1
LMCACHE_TESTS := tests/tiers/test_lmcache_adapter.py tests/patches/test_lmcache_patches.py \
  integration_tests/test_vllm_lmcache.py

test-lmcache: $(READY)
	@test -d .lmcache/lmcache || $(PYTHON) -m pip install -q --no-deps --target .lmcache $(LMCACHE)
	@MIMO_LMCACHE=$(CURDIR)/.lmcache $(PYTHON) -m pytest $(LMCACHE_TESTS) $(ARGS)

lint: $(READY)
	@$(PYTHON) -m tools.tiers --tier lint

bench: $(READY) $(if $(filter sglang_%,$(BENCH)),setup-sglang)
	@mkdir -p out/bench
	@set -e; for name in $(BENCH); do \
	  echo "=== benchmarks/$$name.py"; \
	  case $$name in sglang_*) python=$(SGLANG_PYTHON);; *) python=$(PYTHON);; esac; \
	  $$python -m benchmarks.$$name --json out/bench/$$name.json $(if $(QUICK),--quick) $(ARGS); \
	done

tiny-trained: $(READY)
	@$(PYTHON) -m tools.tiny_trained $(ARGS)

doctor: $(READY)
	@$(PYTHON) -m mimo_plugin.cli doctor $(ARGS)

clean:
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@echo "kept the environments .venv-*; remove one by hand to install its engine again"
