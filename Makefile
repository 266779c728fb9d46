# One target per row. Every recipe is a thin call of lanekit; plain `make` prints this help.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
VENV := .venv
LANEKIT := $(VENV)/bin/lanekit
STAMP := $(VENV)/.stamp
TOOLS := $(VENV)/.tools
INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# An option is passed on only where it is given: the harness chooses the rest and says so.
option = $(if $(strip $($(1))),$(2)='$(subst ','\'',$($(1)))')
# A switch is on for 1 and off for 0, or where it is not given.
switch = $(if $(filter-out 0,$(strip $($(1)))),$(2))

.PHONY: bundle doctor plots help setup lanes logs reproduce lint test test-all test-hosts bench report readme verify-logs triage redact clean

##@ Run
help: ## Print this help
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-zA-Z%_-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nOptions of a lane: PROFILE= ARM= CELLS= MODEL= PORT= HOSTS= LAUNCHER= RESULTS= TORCH_INDEX= ENV= COHERENCE_FROM=\n'
	@printf '  SERVER_PYTHON= AIPERF_PYTHON= PLAN=1 REDACT=1\n'

lane-%: setup ## Run a lane (lane-vllm): serve, sweep, keep the drop, judge it, print the row
	@exec $(LANEKIT) run $* $(call option,PROFILE,--profile) $(call option,ARM,--arm) \
	  $(call option,CELLS,--cells) $(call option,MODEL,--model) $(call option,PORT,--port) \
	  $(call option,LAUNCHER,--launcher) $(call option,HOSTS,--hosts) $(call option,RESULTS,--results) \
	  $(call option,TORCH_INDEX,--torch-index) $(call option,ENV,--env) \
	  $(call option,SERVER_PYTHON,--server-python) $(call option,AIPERF_PYTHON,--aiperf-python) \
	  $(call option,COHERENCE_FROM,--coherence-from) $(call switch,PLAN,--plan) $(call switch,REDACT,--redact)

reproduce: setup ## Run one row again, by digest, and say how far it is from the published: ROW=vllm/epnc8/c32 [RESULTS=DIR]
	@test -n "$(ROW)" || { echo "error: say which row: make reproduce ROW=lane/arm/cell" >&2; exit 2; }
	@exec $(LANEKIT) reproduce '$(ROW)' $(call option,PROFILE,--profile) $(call option,RESULTS,--drop) \
	  $(call option,MODEL,--model) $(call option,PORT,--port) $(call option,LAUNCHER,--launcher) \
	  $(call option,HOSTS,--hosts) $(call option,TORCH_INDEX,--torch-index) $(call option,ENV,--env) \
	  $(call option,REGISTRY,--registry) $(call option,SERVER_PYTHON,--server-python) \
	  $(call option,AIPERF_PYTHON,--aiperf-python) $(call switch,PLAN,--plan)

doctor: setup ## Is this machine fit? PROFILE= [HOSTS= LANE= ARM= PORTS= JSON=1 REAP=1 PIDS=]
	@exec $(LANEKIT) doctor $(call option,PROFILE,--profile) $(call option,LANE,--lane) \
	  $(call option,ARM,--arm) $(call option,HOSTS,--hosts) \
	  $(call option,LAUNCHER,--launcher) $(call option,PORTS,--ports) $(call option,RESULTS,--results) \
	  $(call switch,JSON,--json) $(call switch,REAP,--reap) $(call option,PIDS,--pids)

bundle: setup ## Pack a lane for a machine without network: LANE= PROFILE= [PART_MIB= DEEPEP_WHEEL= PRESENT= OUT= PLAN=1]
	@test -n "$(LANE)" -a -n "$(PROFILE)" || { echo "error: make bundle LANE= PROFILE=" >&2; exit 2; }
	@exec $(LANEKIT) bundle '$(LANE)' --profile '$(PROFILE)' $(call option,PART_MIB,--part-mib) \
	  $(call option,DEEPEP_WHEEL,--deepep-wheel) $(call option,PRESENT,--present) $(call option,OUT,--out) \
	  $(call switch,PLAN,--plan)

lanes: setup ## List every row with its state: run here (drop, verdict), what it needs, known failing
	@$(LANEKIT) lanes

include images/*.mk patches/*.mk

##@ Judge
verify-logs: setup ## Judge a drop or a stranger's logs: RESULTS=DIR [LANE= ARM= PROFILE= JSON=FILE JUNIT=FILE]
	@test -n "$(RESULTS)" || { echo "error: say which drop: make verify-logs RESULTS=DIR" >&2; exit 2; }
	@exec $(LANEKIT) verify '$(RESULTS)' $(call option,LANE,--lane) $(call option,ARM,--arm) \
	  $(call option,PROFILE,--profile) $(call option,JSON,--json) $(call option,JUNIT,--junit)

logs: setup ## Follow the logs of all hosts, host and ranks in front: [RESULTS=DIR] (the newest drop)
	@exec $(LANEKIT) logs $(if $(RESULTS),'$(RESULTS)') --follow

triage: setup ## Name the first rank that died, and why: RESULTS=DIR (a drop or a log)
	@test -n "$(RESULTS)" || { echo "error: say which drop: make triage RESULTS=DIR" >&2; exit 2; }
	@exec $(LANEKIT) triage '$(RESULTS)'

redact: setup ## Copy a drop without what names its machine, same verdict: RESULTS=DIR OUT=DIR
	@test -n "$(RESULTS)" -a -n "$(OUT)" || { echo "error: make redact RESULTS=DIR OUT=DIR" >&2; exit 2; }
	@exec $(LANEKIT) redact '$(RESULTS)' --out '$(OUT)'

report: setup ## Write results/RESULTS.md from the drops
	@$(LANEKIT) report

plots: $(TOOLS) ## Draw results/plots/ from the proven drops
	@$(VENV)/bin/python scripts/plots.py

##@ Work on it
setup: $(STAMP) ## Make .venv with the command lanekit, from its hashed lock

$(STAMP): locks/lanekit.txt pyproject.toml
	@$(PYTHON) -c 'import sys, venv; sys.exit(7 if (3, 11) <= sys.version_info[:2] <= (3, 13) else 1)' \
	  2>/dev/null || [ $$? = 7 ] || { echo "error: $(PYTHON) is no Python 3.11, 3.12 or 3.13 with venv" >&2; \
	  echo "  Install one (Debian: python3-venv), or name one with PYTHON=." >&2; exit 2; }
	@echo "setup: $(VENV) from locks/lanekit.txt"
	@$(PYTHON) -m venv --clear $(VENV)  # over one of another Python it dies in ensurepip
	@$(INSTALL) --require-hashes -r locks/lanekit.txt
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# What tests, linters and pictures need: nobody who runs a lane waits for it.
$(TOOLS): locks/dev.txt $(STAMP)
	@echo "tools: $(VENV) from locks/dev.txt"
	@$(INSTALL) --require-hashes -r locks/dev.txt
	@touch $@

lint: $(TOOLS) ## ruff, mypy strict, shellcheck
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@git ls-files -z '*.sh' .ci/run | xargs -0 -r $(VENV)/bin/shellcheck

test: $(TOOLS) ## Unit tests: a few minutes, no Docker, no GPU, no network
	@$(VENV)/bin/python -m pytest tests/unit

test-all: $(TOOLS) ## Unit tests, then the real CPU lane end to end and a real Slurm (minutes)
	@$(VENV)/bin/python -m pytest tests/unit tests/lanes tests/slurm

test-hosts: $(TOOLS) ## Two Docker hosts on this machine under faults: root, Docker, images vllm-cpu and aiperf [QUICK=1]
	@$(VENV)/bin/python -m pytest tests/hosts $(call switch,QUICK,-m quick)

bench: setup ## Measure the harness against its bars, as ratios: [LANE=1 SIMULATE=1 IMAGES=STACK GIB=4]
	@$(VENV)/bin/python scripts/bench.py $(call switch,LANE,--lane) $(call switch,SIMULATE,--hosts) \
	  $(call option,IMAGES,--images) $(if $(GIB),--gib $(GIB))

readme: setup ## Renew the generated parts of READMEs
	@$(LANEKIT) lanes --readme

clean: ## Remove environments, models and caches (never a drop)
	@rm -rf $(VENV) .cache
