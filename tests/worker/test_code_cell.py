"""Code runs in names that last, its last expression is its value, and whatever it does has an outcome."""

import linecache

import pytest

from carrel.guest.worker import code_cell
from tests.worker.driver import Session


def test_names_last_and_the_last_expression_is_the_value(everywhere: Session) -> None:
    assert everywhere.value("x = 5") is None
    assert everywhere.value("def double(n):\n    return 2 * n\nx += 1\ndouble(x)") == 12
    assert everywhere.value("x; y = x") is None
    assert everywhere.value("y") == 6
    assert everywhere.value("") is None
    assert everywhere.value("class A:\n    b: int = 1\nimport pickle\npickle.loads(pickle.dumps(A())).b") == 1
    assert everywhere.value("__name__") == "__main__"


def test_await_async_for_and_async_with_at_the_top_level(everywhere: Session) -> None:
    everywhere.value(
        "import asyncio, contextlib\n"
        "async def numbers():\n    for n in range(3):\n        await asyncio.sleep(0)\n        yield n\n"
        "@contextlib.asynccontextmanager\n"
        "async def opened():\n    await asyncio.sleep(0)\n    yield 'open'\n"
    )
    assert everywhere.value("got = []\nasync for n in numbers():\n    got.append(n)\ngot") == [0, 1, 2]
    assert everywhere.value("async with opened() as what:\n    pass\nwhat") == "open"
    assert everywhere.value("[n async for n in numbers()]") == [0, 1, 2]
    assert everywhere.value("await asyncio.sleep(0, 'last')") == "last"


def test_a_task_of_one_cell_ends_in_another(everywhere: Session) -> None:
    everywhere.value("import asyncio\nasync def slow():\n    await asyncio.sleep(0.01)\n    return 7")
    everywhere.value("task = asyncio.create_task(slow())\nawait asyncio.sleep(0)")
    assert everywhere.value("await task") == 7


def test_asyncio_run_works_beside_await(everywhere: Session) -> None:
    everywhere.value("import asyncio\nasync def one():\n    await asyncio.sleep(0)\n    return 1")
    assert everywhere.value("asyncio.run(one())") == 1
    assert everywhere.value("await one()") == 1


def test_a_traceback_has_the_users_lines_and_no_others(everywhere: Session) -> None:
    everywhere.value("import json\ndef read(text):\n    return json.loads(text)")
    outcome = everywhere.run("a = 1\nread('[')")
    assert outcome.error_type == "JSONDecodeError"
    assert outcome.error is not None
    shown = [line.strip() for line in outcome.error.splitlines() if line.strip().strip("^~")]
    assert shown == [
        "Traceback (most recent call last):",
        'File "<cell 2>", line 2, in <module>',
        "read('[')",
        'File "<cell 1>", line 3, in read',
        "return json.loads(text)",
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 2 (char 1)",
    ]


def test_a_traceback_of_code_that_awaits(everywhere: Session) -> None:
    everywhere.value("import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    raise LookupError('none')")
    error = everywhere.run("await asyncio.gather(f())").error or ""
    assert "raise LookupError('none')" in error
    assert "await asyncio.gather(f())" in error
    assert "asyncio/" not in error
    assert "code_cell.py" not in error


@pytest.mark.parametrize("code", ["1/0", "1/0\n", "a = '\u2028 \x0c'\n1/0"])
def test_a_traceback_points_at_what_it_means(everywhere: Session, code: str) -> None:
    lines = (everywhere.run(code).error or "").splitlines()
    assert lines[2] == "    1/0"
    # Python 3.9 and 3.10 do not point.
    assert lines[3] in ("    ~^~", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("code", "instead"),
    [
        ("```python\nx = 1\n```", "leave out the ```"),
        ("x = 1\n!pip install pandas", "deps.add("),
        ("%pip install pandas", "deps.add("),
        ("?print", "help("),
        ("import no_such_module", "deps.add('no_such_module')"),
        ("breakpoint()", "print what you want to see"),
    ],
)
def test_what_stands_in_notebooks_and_is_no_python_has_a_word_beside(session: Session, code: str, instead: str) -> None:
    assert instead in (session.run(code).error or "").splitlines()[-1]


def test_a_thread_that_ends_by_an_exception_tells_its_own_lines(everywhere: Session) -> None:
    code = "import threading\ndef f():\n    int('x')\nt = threading.Thread(target=f)\nt.start()\nt.join()"
    printed = everywhere.run(code).stderr
    assert "Exception in thread" in printed
    assert "    int('x')\n" in printed
    assert "threading.py" not in printed
    assert everywhere.run(code.replace("int('x')", "raise SystemExit")).stderr == ""


def test_causes_and_groups_are_shown(session: Session) -> None:
    error = session.run("try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e").error or ""
    assert "ZeroDivisionError" in error
    assert "direct cause" in error
    error = session.run("raise ExceptionGroup('both', [ValueError(1), TypeError(2)])").error or ""
    assert "ValueError: 1" in error
    assert "TypeError: 2" in error


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        ("1 +", "SyntaxError", "1 +"),
        ("  x", "IndentationError", "unexpected indent"),
        ("a\0b", None, "null bytes"),
        ("x = '\ud800'", "UnicodeEncodeError", "surrogates"),
        ("import sys; sys.exit(3)", "SystemExit", "SystemExit: 3"),
        ("quit()", "SystemExit", "SystemExit"),
        ("exit('bye')", "SystemExit", "SystemExit: bye"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "raise KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit", "raise GeneratorExit"),
        ("raise BaseException('base')", "BaseException", "base"),
        ("import asyncio\nawait asyncio.sleep(0)\nraise GeneratorExit", "GeneratorExit", "raise GeneratorExit"),
        ("import asyncio, sys\nawait asyncio.sleep(0)\nsys.exit(4)", "SystemExit", "SystemExit: 4"),
        ("import asyncio\nawait asyncio.sleep(0)\nraise KeyboardInterrupt", "KeyboardInterrupt", "raise Key"),
        ("import asyncio\nraise asyncio.CancelledError", "CancelledError", "raise asyncio.CancelledError"),
        ("input('5')", "EOFError", "cannot be used"),
        ("import sys; sys.stdin.read()", "EOFError", "no standard input"),
        ("import sys\nfor line in sys.stdin: pass", "EOFError", "no standard input"),
        ("def f(): f()\nf()", "RecursionError", "maximum recursion"),
        ("class E(Exception):\n    def __str__(self): raise OSError\nraise E", "E", "E"),
        ("class E(Exception):\n    def __str__(self): return 'x' * 50_000_000\nraise E", "E", "characters left out"),
        ("raise StopIteration", "StopIteration", "raise StopIteration"),
        ("nonsense", "NameError", "nonsense"),
    ],
)
def test_every_end_is_a_result_and_the_session_goes_on(
    everywhere: Session, code: str, name: str | None, words: str
) -> None:
    everywhere.value("kept = 1")
    outcome = everywhere.run(code)
    assert outcome.error is not None
    assert words in outcome.error
    assert outcome.error_type == name or (name is None and outcome.error_type in ("ValueError", "SyntaxError"))
    assert len(outcome.error) < 50_000
    assert everywhere.value("kept") == 1
    assert everywhere.run("print('on')").stdout == "on\n"


def test_exit_codes_are_reported(session: Session) -> None:
    codes = [session.run(f"raise SystemExit({code})").record["exit_code"] for code in ("", "0", "3", "'no'", "True")]
    assert codes == [0, 0, 3, 1, 1]


@pytest.mark.parametrize(
    "code",
    [
        "json = sys = print = tools = os = len = None",
        "import sys, json\nsys.modules.clear()\njson.dumps = json.loads = None",
        "import builtins\nbuiltins.__dict__.clear()",
        "del __builtins__",
        "__builtins__ = {}",
        "import builtins\ndel builtins.isinstance, builtins.len, builtins.str",
        "import linecache, traceback\nlinecache.cache = None\ntraceback.TracebackException = None",
        "import sys\nsys.stdout = sys.stderr = sys.__stdout__ = None",
        "import sys\nsys.excepthook = sys.displayhook = None\nsys.path.clear()",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.alarm(0)",
        "globals().clear()",
        "import sys\nsys.setrecursionlimit(60)",
        "import gc\ngc.disable()\ngc.set_threshold(1)",
        "import warnings\nwarnings.simplefilter('error')",
        "import os\nos.environ.clear()\nos.chdir('/')\nos.umask(0o777)",
    ],
)
def test_code_that_breaks_its_own_world_breaks_nothing_else(everywhere: Session, code: str) -> None:
    everywhere.run(code)
    assert everywhere.value("1 + 1") == 2
    assert everywhere.value("[str(n) for n in range(3)]") == ["0", "1", "2"]
    error = everywhere.run("1 / 0").error or ""
    assert error.endswith("ZeroDivisionError: division by zero")


def test_names_that_were_taken_can_be_given_back(session: Session) -> None:
    session.value("print = tools = 5")
    assert session.run("print('x')").error_type == "TypeError"
    session.value("del print")
    assert session.run("print('x')").stdout == "x\n"


def test_ten_megabytes_of_code(session: Session) -> None:
    assert session.value("x = '" + "a" * 10_000_000 + "'\nlen(x)") == 10_000_000
    functions = "".join(f"def f{n}(a):\n    '''\nx = {n}\n'''\n    return (a,\n{n})\n\n" for n in range(20_000))
    long = functions + "if x:\n    pass\nelse:\n    x = 1\n" + "# " + "c" * 9_000_000 + "\nf19999(1)"
    assert session.value(long) == (1, 19_999)
    error = session.run(functions + "\n1 / 0").error or ""
    assert f"line {functions.count(chr(10)) + 2}," in error
    assert session.run(functions + "\n1 /").error_type == "SyntaxError"
    assert session.value("import asyncio") is None
    assert session.value(functions + "\nawait asyncio.sleep(0, 'waited')") == "waited"


def test_values_that_are_no_data_or_too_much(session: Session) -> None:
    assert "generator object" in session.value("(n for n in range(3))")
    assert "whose repr raised" in session.value("class R:\n    def __repr__(self): 1/0\nR()")
    assert "object" in session.value("class R:\n    def __repr__(self): return 5\nR()")
    assert session.value("list(range(100_000))") == list(range(100_000))
    assert "items in all" in session.value("list(range(10_000_000))")
    shared = "a = [1] * 10\nfor _ in range(30): a = [a] * 10\na"
    assert "items in all" in session.value(shared)
    assert session.value("class L(list):\n    def __iter__(self):\n        while True: yield 1\nL([1, 2])") == [1, 2]
    assert "too large" in session.run("'\\0' * 30_000_000").record["value"]["why"]
    assert session.value("2 ** 100_000") == 2**100_000


def test_a_value_of_a_gigabyte_costs_no_second_one(session: Session) -> None:
    before = session.run("import resource\nbig = 'x' * (1 << 30)\nlen(big)").record["usage"]["max_rss_bytes"]
    outcome = session.run("big")
    assert outcome.value.endswith(f"({1 << 30} characters in all)")
    assert outcome.record["usage"]["max_rss_bytes"] < before + (200 << 20)
    session.value("big = big.encode()")
    assert session.value("big").endswith(f"({1 << 30} bytes in all)")


def test_reset_forgets_names_and_keeps_files(everywhere: Session) -> None:
    everywhere.value("import os\nx = 1\nos.mkdir('f')\nos.chdir('f')\nopen('kept', 'w').write('k')")
    everywhere.value("import asyncio\ntask = asyncio.create_task(asyncio.sleep(100))\nawait asyncio.sleep(0)")
    everywhere.request(op="reset")
    assert everywhere.run("x").error_type == "NameError"
    assert everywhere.value("open('f/kept').read()") == "k"
    assert everywhere.value("import asyncio\nawait asyncio.sleep(0, 'again')") == "again"
    assert everywhere.value("tools.a(1)") == ["tools.a", [1], {}]


def test_usage_is_what_the_cell_used(session: Session) -> None:
    busy = session.run("import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass")
    assert busy.record["usage"]["cpu_seconds"] >= 0.2
    assert busy.record["usage"]["max_rss_bytes"] > 1 << 20
    assert session.run("1").record["usage"]["cpu_seconds"] < 0.2
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'for n in range(3_000_000): pass'])"
    assert session.run(code).record["usage"]["cpu_seconds"] > 0.02


def test_unknown_requests_are_answered(session: Session) -> None:
    assert "no request" in session.request(op="dance")["error"]
    assert session.value("1") == 1


def test_the_oldest_sources_go_and_no_newer_one_of_the_same_name() -> None:
    for _ in range(600):
        code_cell.Cell("1", "<cell of many>")
        code_cell.Cell("2", "<cell of another>")
    assert linecache.getline("<cell of many>", 1) == "1\n"
    for number in range(600):
        code_cell.Cell("3", f"<cell {number} of a third>")
    assert linecache.getline("<cell of many>", 1) == ""
    assert linecache.getline("<cell 599 of a third>", 1) == "3\n"


@pytest.mark.parametrize(
    ("code", "harmless"),
    [
        ("1 + 1", True),
        ("('text', 2.5)", True),
        ("name", False),
        ("[a, b]", False),
        ("name = 5", False),
        ("call(name)", False),
        ("(*name,)", False),
        ("[*name]", False),
        ("(name).field", False),
        ("(name + 1)", False),
        ("(name, call())[0]", False),
    ],
)
def test_only_literals_and_their_sums_can_do_no_harm(code: str, harmless: bool) -> None:
    assert code_cell.Cell(code, "<cell>").harmless is harmless


def test_an_expression_is_read_as_a_statement_would_be(everywhere: Session) -> None:
    assert everywhere.run(" 1").error_type == "IndentationError"
    assert everywhere.value("(  # one\n    1\n)") == 1
    assert everywhere.value("'a\\tb'  # a tab") == "a\tb"
    assert everywhere.value("7;") == 7
    outcome = everywhere.run("(1).missing()")
    assert outcome.error is not None
    assert "(1).missing()" in outcome.error
