# Everything a person does here, in one word. Needs make and a Python 3.11 or newer; the rest goes into .venv.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test confined check gates soak bench constraints clean run-venv dev-venv

PYTEST = .venv/bin/python -m pytest
CONFINED = tests/worker tests/sandbox tests/execution tests/tasks tests/server tests/client

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: run-venv  ## install carrel into .venv and take the tour, offline
	@.venv/bin/carrel demo

test: dev-venv  ## all tests but the soak tests and those of running code, in parallel
	@$(PYTEST) -n auto -m "not slow" $(patsubst %,--ignore=%,$(CONFINED))

confined: dev-venv  ## the tests of running code: worker, sandbox, executors; they need a machine that can confine
	@$(PYTEST) -n auto -m "not slow" $(CONFINED)

check: dev-venv  ## style, types, the order of the rooms, and the examples in the docs
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports
	$(PYTEST) -q -n auto tests/test_docs.py tests/cli/test_documented.py

gates: dev-venv  ## show that each check can fail: plant a violation for each and want a no
	@scripts/seed-violations

soak: dev-venv  ## the slow tests: crashes, full disks and big logs, many times over
	@$(PYTEST) -n auto -m slow

bench: dev-venv  ## how fast it is, against the plain way of doing the same
	@.venv/bin/python bench/run.py

constraints: dev-venv  ## renew constraints.txt: the newest versions that go together
	@.venv/bin/uv pip compile -q pyproject.toml --all-extras --group dev --python-version 3.11 --python-platform linux \
		--upgrade --no-header --no-annotate -o constraints.txt
	@git --no-pager diff --stat -- constraints.txt || true

clean:  ## remove .venv and everything else that was made here
	@rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis bench/results
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

run-venv:
	@scripts/bootstrap run

dev-venv:
	@scripts/bootstrap dev
