"""Code calls the host by name: waiting, awaiting, from threads, many at once; errors come back as what they are."""

import os
import signal
import threading
import time
from typing import Any

import pytest

from tests.worker.driver import HostError, Session


def test_a_call_returns_its_value_everywhere(everywhere: Session) -> None:
    assert everywhere.value("tools.curl.get(url='u', n=2**70)") == ["tools.curl.get", [], {"url": "u", "n": 2**70}]
    assert everywhere.value("tools.a.call_sync(b'x')") == ["tools.a", [b"x"], {}]
    assert everywhere.value("await tools.a.call_async({1, 2})") == ["tools.a", [{1, 2}], {}]
    assert everywhere.value("async def f():\n    return tools.a(1)\nawait f()") == ["tools.a", [1], {}]
    assert everywhere.value("import asyncio\nasyncio.run(tools.a.call_async(2))") == ["tools.a", [2], {}]
    assert everywhere.value("repr(tools.a)") == "<tools.a, on the host>"
    assert everywhere.value("tools") == "<tools: list(), search(query), describe(task), NAME(…)>"
    assert everywhere.run("tools.a = 1").error_type == "AttributeError"


def test_many_at_once_whatever_the_order_of_the_answers(everywhere: Session) -> None:
    number = everywhere.ask(
        op="run", code="import asyncio\nawait asyncio.gather(*[tools.n.call_async(i) for i in range(50)])"
    )
    everywhere.answer = lambda name, args, kwargs: NotImplemented
    calls: list[Any] = []
    while len(calls) < 50:
        calls.append(everywhere.until(lambda record: record.get("op") == "call"))
    for call in reversed(calls):
        everywhere.line.send({"op": "answer", "call": call["call"], "value": call["arguments"]["args"][0] * 10})
    assert everywhere.ran(number).value == [i * 10 for i in range(50)]


def test_from_threads_and_the_main_thread_at_once(everywhere: Session) -> None:
    assert (
        everywhere.value(
            "from concurrent.futures import ThreadPoolExecutor\n"
            "with ThreadPoolExecutor(8) as pool:\n"
            "    later = [pool.submit(tools.t, n) for n in range(200)]\n"
            "    own = [tools.m(n) for n in range(200)]\n"
            "    got = [f.result() for f in later]\n"
            "got == [['tools.t', [n], {}] for n in range(200)] and own == [['tools.m', [n], {}] for n in range(200)]"
        )
        is True
    )


def test_threads_and_loops_mixed(everywhere: Session) -> None:
    code = (
        "import asyncio, threading\n"
        "async def many(k):\n    return await asyncio.gather(*[tools.x.call_async(k, n) for n in range(40)])\n"
        "out = {}\n"
        "def other(): out['thread'] = asyncio.run(many('t'))\n"
        "def plain(): out['plain'] = [tools.x('p', n) for n in range(40)]\n"
        "ts = [threading.Thread(target=other), threading.Thread(target=plain)]\n"
        "for t in ts: t.start()\n"
        "out['main'] = await many('m')\n"
        "for t in ts: t.join()\n"
        "[len(v) for v in out.values()], out['plain'][39]"
    )
    assert everywhere.value(code) == ([40, 40, 40], ["tools.x", ["p", 39], {}])


def test_a_thread_left_running_calls_between_cells(session: Session) -> None:
    session.run(
        "import threading, time\nstop = False\ncount = 0\n"
        "def work():\n    global count\n    while not stop:\n        tools.tick()\n        count += 1\n"
        "t = threading.Thread(target=work)\nt.start()"
    )
    ticks = 0
    while ticks < 50:
        session.until(lambda record: record.get("op") == "call")
        ticks += 1
    assert session.value("1 + 1") == 2
    assert session.value("stop = True\nt.join()\ncount") >= 50


@pytest.mark.parametrize(
    ("name", "also", "caught"),
    [
        ("KeyError", [], "KeyError"),
        ("TimeoutError", [], "OSError"),
        ("ToolTimeoutError", ["CarrelError", "TimeoutError"], "TimeoutError"),
        ("ToolCallError", ["RuntimeError", "Exception"], "ToolCallError"),
        ("ArtifactNotFoundError", ["KeyError", "FileNotFoundError"], "KeyError"),
        ("UnicodeDecodeError", [], "Exception"),
        ("StopIteration", [], "Exception"),
        ("SystemExit", [], "Exception"),
        ("no name", [], "Exception"),
        ("__import__", [], "Exception"),
    ],
)
def test_errors_come_back_as_their_classes(name: str, also: list[str], caught: str) -> None:
    with Session(errors={"CarrelError": [], "ToolCallError": ["CarrelError", "RuntimeError"]}) as session:
        session.answer = lambda call, args, kwargs: _raise(HostError(name, "it failed", tuple(also), exit_code=3))
        code = f"try:\n    CALL\nexcept {caught} as e:\n    got = str(e), e.exit_code, isinstance(e, Exception)\ngot"
        for call in ("tools.a()", "await tools.a.call_async()"):
            text, exit_code, standard = session.value(code.replace("CALL", call))
            assert "it failed" in text
            assert (exit_code, standard) == (3, True)
        assert session.run("tools.a()").error_type in (name, "HostCallError")
        session.answer = lambda name, args, kwargs: _raise(HostError("ToolCallError", "as named"))
        assert session.value("try: tools.a()\nexcept CarrelError as e: got = str(e)\ngot") == "as named"


def _raise(problem: Exception) -> None:
    raise problem


def test_a_cancelled_call_is_reported_and_its_answer_harmless(session: Session) -> None:
    session.answer = lambda name, args, kwargs: NotImplemented
    outcome = session.run("import asyncio\nawait asyncio.wait_for(tools.slow.call_async(), 0.05)")
    assert outcome.error_type == "TimeoutError"
    (call,) = [record["call"] for record in session.records if record.get("op") == "call"]
    assert {"op": "cancel", "call": call} in session.records
    session.line.send({"op": "answer", "call": call, "value": "too late"})
    session.answer = lambda name, args, kwargs: name
    assert session.value("tools.b()") == "tools.b"
    assert session.value("await tools.c.call_async()") == "tools.c"


def test_answers_without_a_call_are_dropped(session: Session) -> None:
    for call in (99, -1, None, "x", [1], 2.5):
        session.line.send({"op": "answer", "call": call, "value": 1})
    assert session.value("tools.b(1)") == ["tools.b", [1], {}]


def test_large_arguments_and_answers(session: Session) -> None:
    session.answer = lambda name, args, kwargs: args[0]
    assert session.value("len(tools.echo('x' * 20_000_000))") == 20_000_000
    code = (
        "import asyncio\nsum(map(len, await asyncio.gather(*[tools.e.call_async('x' * 1_000_000) for n in range(20)])))"
    )
    assert session.value(code) == 20_000_000


def test_an_interrupt_stops_a_call_and_the_line_stays_whole(session: Session) -> None:
    pressing = threading.Event()

    def answer(name: str, args: list[object], kwargs: dict[str, object]) -> object:
        if name != "tools.slow":
            return name
        pressing.set()
        return NotImplemented

    session.answer = answer
    for code in ("tools.slow()", "await tools.slow.call_async()"):
        pressing.clear()
        number = session.ask(op="run", code=code)
        # Only when the call has come is it a call that is interrupted.
        with session.pressing(pressing):
            outcome = session.ran(number)
        assert outcome.error_type == "KeyboardInterrupt"
        assert "slow" in (outcome.error or "")
        assert session.value("tools.next()") == "tools.next"
    assert len([record for record in session.records if record.get("op") == "cancel"]) == 2


def test_interrupts_at_any_moment_of_many_calls(session: Session) -> None:
    session.answer = lambda name, args, kwargs: args[0]
    session.value("import asyncio\nkept = 0")
    for code in (
        "for n in range(10**6): kept = tools.a(n)",
        "for n in range(10**5): kept = await asyncio.gather(*[tools.a.call_async(n) for _ in range(5)])",
    ):
        for moment in range(8):
            number = session.ask(op="run", code=f"print('go')\n{code}")
            timer = threading.Thread(target=_press, args=(session, 0.01 + moment * 0.007))
            timer.start()
            outcome = session.ran(number)
            timer.join()
            assert outcome.error_type == "KeyboardInterrupt"
            for whole in ("tools.a('whole')", "await tools.a.call_async('whole')"):
                later = session.run(f"import gc; gc.collect(); {whole}" if "await" not in whole else whole)
                assert (later.value, later.stderr) == ("whole", "")


def _press(session: Session, after: float) -> None:
    # The driver reads records meanwhile; the word has been printed long before.
    time.sleep(after)
    session.wait_for_output("go")
    os.kill(session.pid, signal.SIGINT)
