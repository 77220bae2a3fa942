"""Collects the tests of the adapters only where their frameworks are wanted: by `make test-real`."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if "not real" in config.option.markexpr and collection_path.name.startswith("test_") else None
