"""Real test runners, where this machine has them: what each is called, and small samples that it runs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from carrel.execution.config import Mount
from carrel.execution.subprocess_executor import SYSTEM_PATH
from carrel.tasks.environment import PreparedSample, prepare_sample
from carrel.tasks.sample import Sample
from tests.support.missing_parts import skip_without
from tests.support.samples import written

RUST_AT = "/opt/rust"
GO_CACHE_AT = "/opt/go-build"

NODE = {
    "calc.js": "exports.add = (a, b) => a - b;\nexports.one = () => 1;\n",
    "calc.test.js": "const test = require('node:test');\nconst { add, one } = require('./calc.js');\n"
    "const assert = require('node:assert');\n\n"
    "test('one', () => assert.equal(one(), 1));\n"
    "test.describe('group', () => { test('adds', () => assert.equal(add(1, 2), 3)); });\n",
}
GO = {
    "go.mod": "module calc\n\ngo 1.19\n",
    "calc.go": "package calc\n\nfunc Add(a, b int) int { return a - b }\nfunc One() int { return 1 }\n",
    "calc_test.go": 'package calc\n\nimport "testing"\n\n'
    'func TestOne(t *testing.T) { if One() != 1 { t.Fatal("wrong") } }\n'
    'func TestAdd(t *testing.T) { t.Run("small", func(t *testing.T) { if Add(1, 2) != 3 { t.Fatal("wrong") } }) }\n',
}
CARGO = {
    "Cargo.toml": '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n',
    "Cargo.lock": 'version = 3\n\n[[package]]\nname = "calc"\nversion = "0.1.0"\n',
    "src/lib.rs": "pub fn add(a: i32, b: i32) -> i32 { a - b }\npub fn one() -> i32 { 1 }\n",
    "tests/calc.rs": "#[test]\nfn one() { assert_eq!(calc::one(), 1); }\n"
    "#[test]\nfn adds() { assert_eq!(calc::add(1, 2), 3); }\n#[test]\n#[ignore]\nfn later() {}\n",
}
CTEST = {
    "CMakeLists.txt": "cmake_minimum_required(VERSION 3.13)\nproject(calc C)\nenable_testing()\n"
    "add_executable(check check.c calc.c)\nadd_test(NAME one COMMAND check one)\n"
    "add_test(NAME adds COMMAND check adds)\n"
    "add_test(NAME later COMMAND check later)\nset_tests_properties(later PROPERTIES SKIP_RETURN_CODE 77)\n",
    "calc.c": "int add(int a, int b) { return a - b; }\nint one(void) { return 1; }\n",
    "check.c": "#include <string.h>\nint add(int a, int b);\nint one(void);\nint main(int count, char **words) {\n"
    '    if (!strcmp(words[1], "later")) return 77;\n    if (!strcmp(words[1], "one")) return one() != 1;\n'
    "    return add(1, 2) != 3;\n}\n",
}
COMMANDS = {
    "node": "node --test --test-reporter=tap",
    "go": "go test -json ./...",
    "cargo": "cargo test --offline --test calc",
}
LISTS: dict[str, dict[str, list[str]]] = {
    "node": {"fail_to_pass": ["group::adds"], "pass_to_pass": ["one"]},
    "go": {"fail_to_pass": ["calc::TestAdd/small"], "pass_to_pass": ["calc::TestOne"]},
    "cargo": {"fail_to_pass": ["adds"], "pass_to_pass": ["one"]},
}
ENV = {
    "cargo": {"PATH": f"{RUST_AT}/bin:{SYSTEM_PATH}", "CARGO_TERM_COLOR": "never"},
    "go": {"GOCACHE": GO_CACHE_AT},
}
SOURCE = {"node": "calc.js", "go": "calc.go", "cargo": "src/lib.rs"}
FILES = {"node": NODE, "go": GO, "cargo": CARGO}


def program(name: str) -> str:
    """The path of a program in sessions; skips the test when it is missing."""
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        skip_without(f"no {name} on this machine")
    return found


def runner_sample(name: str, folder: Path, **more: Any) -> Sample:
    """`add` subtracts; one test is right and one is not."""
    fields: dict[str, Any] = {
        "sample_id": f"{name}-1",
        "files": written(folder, FILES[name]),
        "environment": {"env": ENV.get(name, {})},
        "verify": {"command": COMMANDS[name], "timeout": 120},
        **LISTS[name],
    }
    return Sample(**{**fields, **more})


async def ready_for(name: str, sample: Sample, cache: Path) -> PreparedSample:
    """Prepare a sample whose sandbox has its test runner; Rust is mounted, since it may be in a home folder."""
    shown: tuple[Mount, ...] = ()
    if name == "cargo":
        shown = (Mount(source=_rust(), at=RUST_AT),)
    else:
        program(name)
    if name == "go":
        # Otherwise every sandbox builds Go's own library again.
        built = cache.parent.parent / "go-build"
        built.mkdir(exist_ok=True)
        shown = (Mount(source=built, at=GO_CACHE_AT, mode="rw"),)
    ready = await prepare_sample(sample, cache)
    return replace(ready, config=replace(ready.config, mounts=shown))


def _rust() -> Path:
    if shutil.which("cargo") is None or shutil.which("rustc") is None or shutil.which("gcc") is None:
        pytest.skip("no cargo, rustc and gcc on this machine")
    done = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, timeout=60)
    folder = Path(done.stdout.strip())
    if not (folder / "bin" / "cargo").exists():
        pytest.skip(f"no cargo in {folder}")
    return folder
