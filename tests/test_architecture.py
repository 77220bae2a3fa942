"""The architecture: packages in their layers, public names, requirements, cheap imports, one version, a typed wheel."""

import ast
import functools
import inspect
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import carrel
from carrel import errors

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "carrel"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RECORDER = PACKAGE / "tasks" / "recorder"
"""Runs in the Python of a sample, which has its own pytest."""
CEILING = 550
"""Lines of a module."""
CEILINGS = {"session/session.py": 750}
"""Of modules that have to be longer, or still are."""
IMPURE = {"os", "time", "asyncio", "pathlib", "threading", "subprocess", "socket", "sqlite3", "random", "shutil"}
HEAVY = {
    "numpy",
    "tokenizers",
    "redis",
    "psycopg",
    "jinja2",
    "rich",
    "typer",
    "sqlite3",
    "pydantic",
    "orjson",
    "asyncio",
}


def packages() -> set[str]:
    """The packages and modules that `ls src/carrel` shows."""
    return {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} - {
        "__init__",
        "__main__",
    }


def layers() -> list[set[str]]:
    """The same as pyproject.toml lists them, from the top."""
    contract = next(part for part in PROJECT["tool"]["importlinter"]["contracts"] if part["type"] == "layers")
    return [set(re.findall(r"carrel\.(\w+)", line)) for line in contract["layers"]]


def test_every_package_is_in_a_layer() -> None:
    assert packages() == set().union(*layers())


def test_every_package_is_on_the_architecture_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [name for name in packages() if not re.search(rf"\b{name}(\.py|/)", page)] == []


def test_modules_are_short() -> None:
    """A module that grows past the ceiling has more than one subject."""
    generated = ["sync_session.py", "_sync"]
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
        if not set(generated) & set(path.parts)
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > CEILINGS.get(name, CEILING)}
    assert too_long == {}, "move one subject of each into a module of its own"


def requirement_names(*groups: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for group in groups for line in group}


def late_own_imports(path: Path) -> list[ast.ImportFrom | ast.Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tops = set(map(id, tree.body)) | {id(part) for node in tree.body if isinstance(node, ast.If) for part in node.body}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import) and id(node) not in tops]
    lines = path.read_text(encoding="utf-8").splitlines()
    explained = "noqa: PLC0415 -- "
    return [node for node in found if "carrel" in ast.unparse(node) and explained not in lines[node.lineno - 1]]


def test_own_modules_are_imported_at_the_top_of_a_file() -> None:
    late = {str(path.relative_to(ROOT)): late_own_imports(path) for path in PACKAGE.rglob("*.py")}
    assert [f"{name}:{node.lineno}" for name, nodes in late.items() for node in nodes] == []


def modules_imported_by(*paths: Path) -> set[str]:
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
    return found


def test_pure_modules_import_no_clock_disk_or_event_loop() -> None:
    pure = [path for path in PACKAGE.rglob("*.py") if path.read_text(encoding="utf-8").startswith('"""Pure')]
    assert pure
    impure = {str(path.relative_to(ROOT)): modules_imported_by(path) & IMPURE for path in pure}
    assert {name: found for name, found in impure.items() if found} == {}


distributions = functools.cache(packages_distributions)


def not_required(required: set[str], *folders: Path, without: Path = RECORDER) -> set[str]:
    """Third-party packages that the Python files of some folders import and that are not among the requirements."""
    installed = distributions()
    ours = [path for folder in folders for path in folder.rglob("*.py") if not {RECORDER, without} & {*path.parents}]
    modules = modules_imported_by(*ours)
    foreign = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"carrel"}
    # Several packages may share a name (google); one of them is enough. What is not installed is a file of the tests.
    return {name for name in foreign if name in installed and not requirement_names(installed[name]) & required}


def test_imported_packages_are_required() -> None:
    required = requirement_names(
        PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()
    )
    assert not_required(required, PACKAGE, without=PACKAGE / "adapters") == set()
    required |= requirement_names(PROJECT["dependency-groups"]["adapters"])
    also = requirement_names(PROJECT["dependency-groups"]["dev"])  # It has another package of the name `google`.
    assert not_required(required | also, PACKAGE / "adapters") == set()
    required |= requirement_names(PROJECT["dependency-groups"]["dev"])
    assert not_required(required, ROOT / "tests", ROOT / "bench") == set()


def loaded_by(statement: str) -> set[str]:
    """The packages that a statement in a new Python imports."""
    script = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_importing_carrel_loads_nothing_heavy() -> None:
    assert loaded_by("import carrel") & HEAVY == set()


def test_a_conversation_loads_only_what_it_needs() -> None:
    unneeded = HEAVY - {"orjson", "pydantic", "asyncio"}
    assert loaded_by("from carrel import SessionStore, user_text_message") & unneeded == set()


def test_the_session_class_loads_only_what_it_needs() -> None:
    """Loading the tools and the conversations as well would triple the time."""
    assert loaded_by("import carrel; carrel.Session") & (HEAVY - {"orjson", "asyncio"}) == set()


def test_every_public_name_exists() -> None:
    assert [name for name in carrel.__all__ if not hasattr(carrel, name)] == []
    assert set(carrel.__all__) <= set(dir(carrel))
    assert len(carrel.__all__) == len(set(carrel.__all__))


def test_public_names_are_the_same_for_type_checkers_and_at_run_time() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    guarded = [part for node in tree.body if isinstance(node, ast.If) for part in node.body]
    typed = {name.name: part.module for part in guarded if isinstance(part, ast.ImportFrom) for name in part.names}
    assert typed == carrel._MODULE_OF
    assert set(carrel.__all__) <= {*typed, "__version__"}


def test_the_public_names_are_few_enough_to_read() -> None:
    assert len(carrel.__all__) <= 70


def test_every_error_is_public() -> None:
    known = {name for name, thing in inspect.getmembers(errors, inspect.isclass) if issubclass(thing, Exception)}
    assert [name for name in known if not hasattr(carrel, name)] == []


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Sesion'"):
        carrel.Sesion  # noqa: B018
    with pytest.raises(ImportError):
        from carrel import Sesion  # noqa: F401, PLC0415


def test_the_version_is_written_once() -> None:
    assert "version" not in PROJECT["project"]
    literal = f'"{carrel.__version__}"'
    assert [path.name for path in PACKAGE.rglob("*.py") if literal in path.read_text(encoding="utf-8")] == [
        "version.py"
    ]


def test_the_changelog_has_this_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(carrel.__version__)}\b", changes, re.MULTILINE)


def test_constraints_are_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line)] == []
    extras = PROJECT["project"]["optional-dependencies"].values()
    named = requirement_names(PROJECT["project"]["dependencies"], PROJECT["dependency-groups"]["dev"], *extras)
    named.discard(PROJECT["project"]["name"])  # The extra `all` is made of the others.
    assert named - {line.partition("==")[0] for line in lines} == set()


def test_nothing_that_records_download_addresses_is_tracked() -> None:
    listing = (
        ["git", "ls-files"] if (ROOT / ".git").exists() else ["find", ".", "-name", ".venv", "-prune", "-o", "-print"]
    )
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {Path(name).name for name in names} & {"uv.lock", "poetry.lock", "pdm.lock", "pylock.toml"} == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_is_typed_and_complete(wheel: zipfile.ZipFile) -> None:
    shipped = set(wheel.namelist())
    sources = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {str(path.relative_to(PACKAGE.parent)) for path in sources} <= shipped
    assert "carrel/py.typed" in shipped


def test_the_wheel_names_its_version_and_licence(wheel: zipfile.ZipFile) -> None:
    folder = f"carrel_sessions-{carrel.__version__}.dist-info"
    assert f"Version: {carrel.__version__}\n" in wheel.read(f"{folder}/METADATA").decode()
    assert f"{folder}/licenses/LICENSE" in wheel.namelist()
