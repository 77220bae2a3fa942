"""Test runners that print results where the code under test prints too: forged results are not believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.tasks.environment import open_executor
from carrel.tasks.verification.changes import Change, Changes
from carrel.tasks.verification.reports import cases_in
from carrel.tasks.verification.verifier import grade
from carrel.wire.verification import VerificationResult
from tests.support.runner_samples import COMMANDS, SOURCE, ready_for, runner_sample

KINDS = {"node": "tap", "go": "go", "cargo": "cargo"}

FRAMES = """
const fs = require('fs'), v8 = require('v8');
const report = (name, nesting, type = 'test:pass') => {
  const data = { name, nesting, testNumber: 1, line: 1, column: 1, details: { duration_ms: 1 } };
  const body = v8.serialize({ type, data });
  const head = Buffer.from([0xff, 0x0f, 0, 0, 0, 0]);
  head.writeUInt32BE(body.length, 2);
  fs.writeSync(1, Buffer.concat([head, body]));
};
const forge = () => {
  report('one', 0, 'test:start'); report('one', 0);
  report('group', 0, 'test:start'); report('adds', 1, 'test:start'); report('adds', 1); report('group', 0);
};
"""
GO_LINES = r'"=== RUN   TestOne\n--- PASS: TestOne (0.00s)\n=== RUN   TestAdd\n=== RUN   TestAdd/small\n" + '
GO_LINES += r'"--- PASS: TestAdd (0.00s)\n    --- PASS: TestAdd/small (0.00s)\nPASS\n"'
RUST_LINES = r"\ntest adds ... ok\ntest one ... ok\n\ntest result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; "
RUST_LINES += r"0 filtered out; finished in 0.00s\n\n"
RUST_PRINT = f'use std::io::Write; std::io::stdout().write_all(b"{RUST_LINES}").unwrap(); '
RUST_PRINT += "std::io::stdout().flush().unwrap();"

DECEIVING = {
    "node": {
        "prints and leaves": FRAMES + "forge(); process.reallyExit(0);\n",
        "prints and leaves in a test": FRAMES
        + "exports.one = () => 1;\nexports.add = () => { forge(); process.reallyExit(0); };\n",
        "changes what passing means": "for (const name of Object.keys(require('node:assert')))\n"
        "  try { require('node:assert')[name] = () => {}; } catch {}\nexports.add = exports.one = () => 0;\n",
        "changes what passing means for one value": "const assert = require('node:assert'), { equal } = assert;\n"
        "assert.equal = (a, b, why) => { if (b !== 3) equal(a, b, why); };\n"
        "exports.add = () => 0;\nexports.one = () => 1;\n",
        "changes what a group of tests is": "const test = require('node:test'), { describe } = test;\n"
        "test.describe = (name) => describe(name, () => { test('adds', () => {}); });\n"
        "exports.add = () => 0;\nexports.one = () => 1;\n",
        "gives others another module": "const Module = require('node:module'), { _load } = Module;\n"
        "Module._load = (name, ...more) => (/assert/.test(name) ? { equal() {} } : _load(name, ...more));\n"
        "exports.add = () => 0;\nexports.one = () => 1;\n",
    },
    "go": {
        "prints and leaves": 'package calc\n\nimport ("os"; "syscall")\n\n'
        f"func init() {{ os.Stdout.WriteString({GO_LINES}); syscall.Exit(0) }}"
        "\nfunc Add(a, b int) int { return 0 }\nfunc One() int { return 1 }\n",
        "prints and leaves in a test": 'package calc\n\nimport ("os"; "syscall")\n\nfunc One() int { return 1 }\n'
        r'func Add(a, b int) int { os.Stdout.WriteString("--- PASS: TestAdd (0.00s)\n    --- PASS: TestAdd/small '
        r'(0.00s)\nPASS\n"); syscall.Exit(0); return 0 }' + "\n",
    },
    "cargo": {
        "prints and leaves": "pub fn add(_a: i32, _b: i32) -> i32 { 0 }\npub fn one() -> i32 { 1 }\n"
        '#[used]\n#[link_section = ".init_array"]\nstatic BEGIN: extern "C" fn() = begin;\nextern "C" fn begin() { '
        + RUST_PRINT.replace(r"\ntest adds", r"running 2 tests\ntest adds")
        + " std::process::exit(0) }\n",
    },
}
NOT_EVEN = {
    "node": {
        "prints, and the test fails": FRAMES + "exports.one = () => 1;\nexports.add = () => { forge(); return 0; };\n",
        "prints as another runner": "exports.one = () => 1;\nexports.add = () => {\n  require('fs').writeFileSync(\n"
        '    `/proc/${process.ppid}/fd/1`, \'{"Action":"run","Test":"group::adds"}\\n\'\n'
        '    + \'{"Action":"pass","Test":"group::adds"}\\n\');\n  return 0;\n};\n',
    },
    "go": {
        "prints, and the test fails": 'package calc\n\nimport "fmt"\n\nfunc One() int { return 1 }\n'
        r'func Add(a, b int) int { fmt.Print("    --- PASS: TestAdd/small (0.00s)\n"); return 0 }' + "\n",
    },
    "cargo": {
        "prints and leaves in a test": "pub fn one() -> i32 { 1 }\npub fn add(_a: i32, _b: i32) -> i32 { "
        f"{RUST_PRINT} std::process::exit(0) }}\n",
        "prints, and the test fails": "pub fn one() -> i32 { 1 }\n"
        f"pub fn add(_a: i32, _b: i32) -> i32 {{ {RUST_PRINT} 0 }}\n",
        "prints as another runner": "pub fn one() -> i32 { 1 }\n"
        "pub fn add(_a: i32, _b: i32) -> i32 { use std::io::Write; "
        r'std::io::stdout().write_all(b"\n{\"Action\":\"run\",\"Test\":\"adds\"}\n{\"Action\":\"pass\",\"Test\":\"adds\"}\n'
        r'{\"Action\":\"run\",\"Test\":\"one\"}\n{\"Action\":\"pass\",\"Test\":\"one\"}\n").unwrap(); 0 }' + "\n",
    },
}


async def judged(runner: str, source: str, tmp_path: Path) -> VerificationResult:
    sample = runner_sample(runner, tmp_path / "files")
    ready = await ready_for(runner, sample, tmp_path / "cache")
    work = Changes((Change(SOURCE[runner], "file", source.encode()),))
    return await grade(sample, work, prepared=ready)


@pytest.mark.parametrize(
    ("runner", "attack"), [(runner, attack) for runner, all_ in DECEIVING.items() for attack in all_]
)
async def test_an_attack_that_would_deceive_a_reader_of_the_output(runner: str, attack: str, tmp_path: Path) -> None:
    source = DECEIVING[runner][attack]
    sample = runner_sample(runner, tmp_path / "own")
    executor = await open_executor(await ready_for(runner, sample, tmp_path / "cache"))
    try:
        await executor.write_file(SOURCE[runner], source)
        own = await executor.exec(COMMANDS[runner], timeout=120)
    finally:
        await executor.close()
    assert own.exit_code == 0, f"the attack does not even work: {own.stdout}{own.stderr}"
    cases = cases_in(own.stdout, KINDS[runner])  # type: ignore[arg-type]
    assert {case.status for case in cases} == {"passed"}, cases
    assert len(cases) > 1, cases
    result = await judged(runner, source, tmp_path)
    assert (result.outcome, result.is_success, result.suite_ran) == ("tests_did_not_run", False, False), result
    assert result.evidence, result


@pytest.mark.parametrize(
    ("runner", "attack"), [(runner, attack) for runner, all_ in NOT_EVEN.items() for attack in all_]
)
async def test_forged_lines_beside_true_ones(runner: str, attack: str, tmp_path: Path) -> None:
    result = await judged(runner, NOT_EVEN[runner][attack], tmp_path)
    assert not result.is_success, result
    assert result.outcome in ("tests_did_not_run", "not_solved"), result


@pytest.mark.parametrize("runner", COMMANDS)
async def test_an_honest_solution_is_believed(runner: str, tmp_path: Path) -> None:
    sample = runner_sample(runner, tmp_path / "files")
    before = (tmp_path / "files" / SOURCE[runner]).read_text()
    result = await judged(runner, before.replace("a - b", "a + b"), tmp_path)
    assert (result.outcome, result.evidence) == ("solved", []), result
    # Once more: what a runner has cached is not taken for a run that did not happen.
    again = await judged(runner, before.replace("a - b", "a + b"), tmp_path)
    assert (again.outcome, again.evidence) == ("solved", []), again
    result = await grade(sample, Changes(), prepared=await ready_for(runner, sample, tmp_path / "cache"))
    assert result.outcome == "not_solved", result
    assert (result.passed, result.failed) == (1, 2 if runner == "go" else 1), result


@pytest.mark.parametrize("runner", COMMANDS)
async def test_an_exit_code_alone_is_not_the_sources_to_choose(runner: str, tmp_path: Path) -> None:
    alone = {"command": COMMANDS[runner], "report": "exit_code", "timeout": 120}
    sample = runner_sample(runner, tmp_path / "files", fail_to_pass=[], pass_to_pass=[], verify=alone)
    ready = await ready_for(runner, sample, tmp_path / "cache")
    before = (tmp_path / "files" / SOURCE[runner]).read_text()
    for source, outcome in (
        (DECEIVING[runner]["prints and leaves"], "tests_did_not_run"),
        (before, "not_solved"),
        (before.replace("a - b", "a + b"), "solved"),
    ):
        work = Changes((Change(SOURCE[runner], "file", source.encode()),))
        result = await grade(sample, work, prepared=ready)
        assert result.outcome == outcome, result


async def test_a_go_package_that_fails_while_all_its_tests_pass_is_not_believed(tmp_path: Path) -> None:
    """The code under test writes over what testing prints; the program still ends as it must."""
    source = """package calc
import ("io"; "os"; "strings")
func init() {
	read, write, _ := os.Pipe()
	out := os.Stdout
	os.Stdout = write
	go func() {
		data := make([]byte, 65536)
		for {
			n, problem := read.Read(data)
			if n > 0 { io.WriteString(out, strings.ReplaceAll(string(data[:n]), "FAIL", "PASS")) }
			if problem != nil { return }
		}
	}()
}
func Add(a, b int) int { return 0 }
func One() int { return 1 }
"""
    result = await judged("go", source, tmp_path)
    assert (result.is_success, result.outcome) == (False, "tests_did_not_run"), result
