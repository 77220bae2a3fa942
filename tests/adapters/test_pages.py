"""The examples of the pages about adapters work, with the real frameworks."""

from pathlib import Path

import pytest

from tests.test_docs import ROOT, name_of, run_page

pytestmark = pytest.mark.real

PAGES = sorted(page for page in (ROOT / "docs" / "adapters").glob("*.md") if page.name != "index.md")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_examples_of_a_page_work(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 0


def test_every_adapter_has_a_page() -> None:
    adapters = {path.stem.replace("_", "-") for path in (ROOT / "src" / "carrel" / "adapters").glob("*.py")}
    assert adapters - {"--init--", "sessions"} == {page.stem for page in PAGES}
