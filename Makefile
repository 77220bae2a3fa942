# Needs make and Python 3.11 or newer; everything else is installed into .venv.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-quick test-real coverage check generate gates soak bench bench-cluster screenshots docs release \
	constraints clean run-venv dev-venv

# The tests start hundreds of programs; without cached bytecode each of them would compile everything again.
export PYTHONDONTWRITEBYTECODE =

PYTEST = .venv/bin/python -m pytest
CHECKS = tests/test_docs.py tests/cli/test_reference.py tests/test_vocabulary.py
QUICK = tests/formats tests/importers tests/conversation tests/storage tests/test_text.py tests/test_events.py
# A test spends half of its time waiting for a process or a server, so run two per processor.
PARALLEL = -n $(shell expr 2 \* $$(nproc)) --dist worksteal

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: run-venv  ## install carrel into .venv and take the tour, offline
	@.venv/bin/carrel demo

test: dev-venv  ## all tests except the soak tests and those that `make check` runs
	@$(PYTEST) $(PARALLEL) -m "not slow and not real" $(patsubst %,--ignore=%,$(CHECKS))

test-quick: dev-venv  ## the tests of the log, the storage and the formats, in less than a minute
	@$(PYTEST) -q $(PARALLEL) -m "not slow and not real" -k "not redis" $(QUICK)

test-real: dev-venv  ## the tests with other programs: engines, databases, a browser, Ray, frameworks, originals of carrel.compat
	@.venv/bin/uv pip install -q -p .venv -c constraints.txt --group adapters
	@$(PYTEST) -m "real and not slow"

coverage: dev-venv  ## which lines the tests run, without those inside sandboxes; a page in .coverage-report/
	@$(PYTEST) $(PARALLEL) -m "not slow" --cov=carrel --cov-report=html:.coverage-report --cov-report=term:skip-covered $(TESTS)

check: dev-venv  ## style, types, layers, generated code, vocabulary, and the examples in the docs
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports
	@.venv/bin/python scripts/generate-sync --check
	@.venv/bin/python scripts/generate-command-line --check
	@.venv/bin/python scripts/generate-http-reference --check
	$(PYTEST) -q $(PARALLEL) $(CHECKS)

generate: dev-venv  ## generate the synchronous modules and the references of the command line and the HTTP API
	@.venv/bin/python scripts/generate-sync
	@.venv/bin/python scripts/generate-command-line
	@.venv/bin/python scripts/generate-http-reference

gates: dev-venv  ## show that each check can fail: plant a violation for each
	@scripts/seed-violations

soak: dev-venv  ## the slow tests: crashes, full disks and big logs, many times over
	@$(PYTEST) $(PARALLEL) -m slow

bench: dev-venv  ## benchmarks against plain Python, ipykernel, and docker where an engine answers
	@.venv/bin/python bench/run.py
	@.venv/bin/python bench/execution.py

screenshots: dev-venv  ## take the screenshots of the docs again, with Chromium
	@.venv/bin/python scripts/screenshots

# Once its packages are installed, this needs no network.
docs: dev-venv  ## build the documentation into site/
	@.venv/bin/uv pip install -q --offline -p .venv -c constraints.txt --group docs 2>/dev/null || \
		.venv/bin/uv pip install -q -p .venv -c constraints.txt --group docs
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict -q && echo "site/index.html"

release: check test  ## build wheel and sdist, try both in empty environments, tag the commit
	@.venv/bin/python scripts/release

bench-cluster: dev-venv  ## a cluster on this machine: gateway, 1,000 sessions, Postgres; and the simulation
	@.venv/bin/python bench/cluster.py
	@.venv/bin/python bench/simulation.py

constraints: dev-venv  ## update constraints.txt to the newest compatible versions
	@.venv/bin/uv pip compile -q pyproject.toml --all-extras --group dev --group docs --group adapters --python-version 3.11 --python-platform linux \
		--upgrade --no-header --no-annotate -o constraints.txt
	@git --no-pager diff --stat -- constraints.txt || true

clean:  ## remove .venv and all generated files
	@rm -rf .venv dist build site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis bench/results
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

run-venv:
	@scripts/bootstrap run

dev-venv:
	@scripts/bootstrap dev
