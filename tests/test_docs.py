"""The documentation is correct: its examples run, its links have targets, and every public name is in it."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import carrel
from tests.support.missing_parts import skip_without

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
WITH_EXAMPLES = [
    page
    for page in PAGES
    if re.search(r"^```(python|console)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    and page.parent.name != "adapters"  # tests/adapters/test_pages.py runs them
]
WITH_ENGINE = {"docs/tasks-as-images.md"}
"""Pages whose examples need a container engine: they run by `make test-real`."""
RUNNER = Path(__file__).parent / "support" / "page_runner.py"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the page's examples in an empty folder, with an empty home and this Python's `carrel` first on the path."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    programs = str(Path(sys.executable).parent)
    return subprocess.run(
        [sys.executable, RUNNER, page],
        cwd=work,
        env=os.environ | {"CARREL_HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.parametrize("page", [page for page in WITH_EXAMPLES if name_of(page) not in WITH_ENGINE], ids=name_of)
def test_the_examples_of_a_page_work(page: Path, tmp_path: Path) -> None:
    check_page(page, tmp_path)


@pytest.mark.real
@pytest.mark.parametrize("page", [ROOT / name for name in sorted(WITH_ENGINE)], ids=name_of)
def test_the_examples_of_a_page_work_with_an_engine(
    page: Path, tmp_path: Path, docker_engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_engine)
    check_page(page, tmp_path)


def check_page(page: Path, tmp_path: Path) -> None:
    if "\n$ curl" in page.read_text("utf-8") and shutil.which("curl") is None:
        skip_without("curl is missing")
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nassert 1 == 2\n```\n", "AssertionError"),
        ("```python\nx = 1\n```\n\n```python\nawait y\n```\n", "NameError"),
        ("```python\nprint('one')\n```\n\n```text\ntwo\n```\n", "line 2: the page says it prints"),
        ("```console\n$ false\n```\n", "line 2: `false` ended with 1"),
        ("```console\n$ true\n$ echo one\ntwo\n```\n", "line 3: the page says it prints"),
    ],
)
def test_a_wrong_example_is_found(text: str, complaint: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    done = run_page(page, tmp_path)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_the_examples_of_a_page_share_their_names(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport asyncio\nx = 20\nasync def add():\n    return x + 1\nasyncio.run(add())\n```\n"
        "```python\nx = await add()\nprint('it is', x, 'today')\n```\n\n```text\nit … 21 today\n```\n"
    )
    done = run_page(page, tmp_path)
    assert (done.stdout, done.stderr) == ("2\n", "")


def text_of_all_pages() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_every_public_name_is_in_the_docs() -> None:
    text = text_of_all_pages()
    assert [name for name in carrel.__all__ if not re.search(rf"\b{re.escape(name)}\b", text)] == []


def test_every_public_name_has_a_docstring() -> None:
    """The reference of the Python API shows only these."""
    names = [name for name in carrel.__all__ if name != "__version__"]
    assert [name for name in names if not inspect.getdoc(getattr(carrel, name))] == []


def test_every_environment_variable_is_in_the_docs() -> None:
    sources = [path for path in (ROOT / "src").rglob("*.py") if "recorder" not in path.parts]
    names = {name for path in sources for name in re.findall(r"\bCARREL_[A-Z_]+[A-Z]\b", path.read_text("utf-8"))}
    page = (ROOT / "docs" / "environment-variables.md").read_text("utf-8")
    assert sorted(name for name in names if name not in page and not name.startswith("CARREL_RECORDER")) == []


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def local_links(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href|srcset)="([^"]+)"', text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_have_targets(page: Path) -> None:
    broken = []
    for link in local_links(page):
        path, _, section = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (section and section not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached_from_the_index() -> None:
    listed = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in local_links(ROOT / "docs" / "README.md")}
    assert [name_of(page) for page in DOCS if page.name != "README.md" and page not in listed] == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in DOCS)
