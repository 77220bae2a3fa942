# Everything a person does here, in one word. Needs make and a Python 3.11 or newer; the rest goes into .venv.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check generate gates soak bench constraints clean run-venv dev-venv

# The tests start hundreds of programs; where bytecode may not be kept each of them compiles everything again.
export PYTHONDONTWRITEBYTECODE =

PYTEST = .venv/bin/python -m pytest
DOCS = tests/test_docs.py tests/cli/test_documented.py
# Half of the time a test waits for a process or a server: twice as many as there are processors keep them busy.
PARALLEL = -n $(shell expr 2 \* $$(nproc)) --dist worksteal

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: run-venv  ## install carrel into .venv and take the tour, offline
	@.venv/bin/carrel demo

test: dev-venv  ## all tests but the soak tests, and the docs' examples, which `make check` runs
	@$(PYTEST) $(PARALLEL) -m "not slow" $(patsubst %,--ignore=%,$(DOCS))

check: dev-venv  ## style, types, the order of the rooms, and the examples in the docs
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports
	@.venv/bin/python scripts/generate-sync --check
	$(PYTEST) -q $(PARALLEL) $(DOCS)

generate: dev-venv  ## generate the synchronous modules from the asynchronous ones
	@.venv/bin/python scripts/generate-sync

gates: dev-venv  ## show that each check can fail: plant a violation for each and want a no
	@scripts/seed-violations

soak: dev-venv  ## the slow tests: crashes, full disks and big logs, many times over
	@$(PYTEST) $(PARALLEL) -m slow

bench: dev-venv  ## how fast it is, against the plain way, ipykernel, and docker where an engine answers
	@.venv/bin/python bench/run.py
	@.venv/bin/python bench/execution.py

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
