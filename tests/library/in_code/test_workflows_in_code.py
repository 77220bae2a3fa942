"""Workflows as code calls them, in every executor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.library.in_code.conftest import Begin, CodeSession


async def test_call_by_attribute_and_by_invoke(session: CodeSession) -> None:
    await session.workflows.add("area", "def run(width, height=2):\n    return width * height")
    assert await session.value("workflows.area(3, height=4)") == 12
    assert await session.value("workflows.area(width=3)") == 6
    assert await session.value("workflows.invoke('area', width=5)") == 10
    assert await session.value("workflows.invoke(name='area', width=5)") == 10
    assert await session.value("skills.area.call_sync(7)") == 14
    assert await session.value("getattr(workflows, 'area')(1)") == 2
    assert await session.value("skills is workflows")


async def test_a_parameter_may_be_called_name(session: CodeSession) -> None:
    await session.workflows.add("greet", "def run(name): return f'hello {name}'")
    assert await session.value("workflows.invoke('greet', name='you')") == "hello you"


@pytest.mark.parametrize("form", ["def", "async def"])
async def test_plain_and_async_workflows_in_both_ways(session: CodeSession, form: str) -> None:
    await session.workflows.add("double", f"import asyncio\n{form} run(x):\n    return 2 * x")
    assert await session.value("workflows.double(4)") == 8
    assert await session.value("await workflows.double.call_async(4)") == 8
    assert await session.value("await workflows.invoke.call_async('double', x=4)") == 8
    assert await session.value("import asyncio\nawait asyncio.sleep(0)\nworkflows.double(4)") == 8
    inner = "async def f():\n    return workflows.double(5)\n"
    assert await session.value(inner + "await f()") == 10
    assert await session.value(inner + "import asyncio\nasyncio.run(f())") == 10
    assert await session.value("await asyncio.gather(*[workflows.double.call_async(n) for n in range(5)])") == [
        0,
        2,
        4,
        6,
        8,
    ]


@pytest.mark.parametrize("form", ["def", "async def"])
async def test_many_run_at_once(begin: Begin, form: str) -> None:
    started, all_started = 0, asyncio.Event()

    async def together(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Answers only when all eight have called."""
        nonlocal started
        started += 1
        if started == 8:
            all_started.set()
        await all_started.wait()
        return args[0]

    session = begin(tools=together)
    call = "tools.wait(n)" if form == "def" else "await tools.wait.call_async(n)"
    await session.workflows.add("meet", f"{form} run(n):\n    return {call}")
    code = "import asyncio\nawait asyncio.gather(*[workflows.meet.call_async(n=n) for n in range(8)])"
    assert await session.value(code) == list(range(8))
    assert (await session.run("x = 1\nx")).state == "kept"


async def test_output_of_a_workflow_is_output_of_the_run(session: CodeSession) -> None:
    await session.workflows.add("say", "def run(word):\n    print('saying', word)\n    return word")
    assert (await session.run("workflows.say('a')")).stdout == "saying a\n"
    assert (await session.run("await workflows.say.call_async('b')")).stdout == "saying b\n"


async def test_a_workflow_uses_the_namespaces_and_calls_others(begin: Begin) -> None:
    async def echo(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return [name, args, kwargs]

    session = begin(tools=echo)
    await session.workflows.add("inner", "def run(x):\n    return tools.curl.get(x)")
    outer = "async def run(x):\n    artifacts.save('kept', x)\n    found = workflows.inner(x)\n"
    await session.workflows.add("outer", outer + "    return found, skills.inner(x=x), artifacts.load('kept')")
    expected = ["tools.curl.get", ["u"], {}]
    assert await session.value("workflows.outer('u')") == (expected, expected, "u")
    assert await session.value("await workflows.outer.call_async('u')") == (expected, expected, "u")


async def test_each_call_has_new_globals(session: CodeSession) -> None:
    source = "seen = []\ndef run(x):\n    seen.append(x)\n    return seen, 'secret' in globals(), __name__"
    await session.workflows.add("once", source)
    code = "secret = 1\n[workflows.once(n) for n in range(2)]"
    assert await session.value(code) == [([0], False, "workflow_once"), ([1], False, "workflow_once")]
    assert await session.value("'seen' in globals()") is False


async def test_dataclasses_with_deferred_annotations_work_in_a_workflow(session: CodeSession) -> None:
    source = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\n"
    await session.workflows.add("typed", source + "def run():\n    return A(3)")
    assert await session.value("workflows.typed()") == {"x": 3}


async def test_an_edit_is_seen_by_the_next_call_and_the_source_is_sent_once(session: CodeSession) -> None:
    await session.workflows.add("x", "def run(): return 1")
    assert await session.value("workflows.x(), workflows.x()") == (1, 1)
    await session.workflows.add("x", "def run(): return 2")
    assert await session.value("workflows.x()") == 2
    assert session.calls == ["workflows.begin", "workflows.ended"] * 3


async def test_code_adds_finds_and_removes_workflows(session: CodeSession) -> None:
    source = '"""Add up."""\ndef run(a: int, b: int = 1) -> int:\n    return a + b\n'
    made = await session.value(f"workflows.create('add_up', {source!r}, 'Adds two numbers')")
    assert (made["name"], made["description"]) == ("add_up", "Adds two numbers")
    assert [w["name"] for w in await session.value("workflows.list()")] == ["add_up"]
    assert (await session.value("skills.get('add_up')"))["source"] == source
    assert (await session.value("workflows.search('numbers', limit=1)"))[0]["name"] == "add_up"
    assert await session.value("workflows.add_up(2)") == 3
    assert len(await session.value("workflows.history('add_up')")) == 1
    assert await session.value("workflows.get('missing')") is None
    assert await session.value("workflows.delete('add_up'), workflows.delete('add_up')") == (True, False)
    for code, error in (("'a b', 'def run(): pass'", "ValueError"), ("'x', 'def run(:'", "SyntaxError")):
        result = await session.run(
            f"try:\n    workflows.create({code})\nexcept {error} as e:\n    found = e\nstr(found)"
        )
        assert result.error is None, result.error


async def test_an_error_has_the_lines_of_the_workflow(session: CodeSession) -> None:
    await session.workflows.add("fails", "def helper(x):\n    return 1 / x\n\ndef run(x):\n    return helper(x)\n")
    result = await session.run("workflows.fails(x=0)")
    assert result.error_type == "ZeroDivisionError"
    assert 'File "<workflow fails>", line 2, in helper' in (result.error or "")
    assert "return 1 / x" in (result.error or "")
    assert "workflows.py" not in (result.error or "")
    awaited = await session.run("await workflows.fails.call_async(x=0)")
    assert 'File "<workflow fails>", line 2, in helper' in (awaited.error or "")
    caught = "try:\n    workflows.fails(0)\nexcept ZeroDivisionError as e:\n    found = str(e)\nfound"
    assert await session.value(caught) == "division by zero"
    await session.workflows.close()
    usage = ((await session.workflows.get("fails")) or {})["usage"]
    assert (usage["calls"], usage["failures"]) == (3, 3)
    assert usage["last_error"]["message"] == "ZeroDivisionError: division by zero"


async def test_an_error_of_the_host_shows_only_the_codes_own_lines(session: CodeSession) -> None:
    await session.workflows.add("fetch", "def run():\n    return artifacts.load('nothing')")
    result = await session.run("workflows.fetch()")
    files = [line.strip() for line in (result.error or "").splitlines() if line.startswith("  File ")]
    assert [line.split(",")[0] for line in files] == ['File "<cell 1>"', 'File "<workflow fetch>"']


async def test_a_failing_import_does_not_affect_others(session: CodeSession) -> None:
    await session.workflows.add("broken", "import not_a_module_at_all\ndef run(): pass")
    await session.workflows.add("fine", "def run(): return 'fine'")
    result = await session.run("workflows.broken()")
    assert result.error_type == "ModuleNotFoundError"
    assert '"<workflow broken>", line 1' in (result.error or "")
    assert await session.value("workflows.fine()") == "fine"


@pytest.mark.parametrize("form", ["def", "async def"])
async def test_endless_recursion_is_a_clear_error(session: CodeSession, form: str) -> None:
    await session.workflows.add("ping", f"{form} run():\n    return workflows.pong()")
    await session.workflows.add("pong", f"{form} run():\n    return workflows.ping()")
    result = await session.run("workflows.ping()")
    assert result.error_type == "WorkflowRecursionError"
    assert "ping → pong → ping" in (result.error or "")
    assert result.state == "kept"
    caught = "try:\n    workflows.ping()\nexcept RecursionError as e:\n    found = type(e).__name__\nfound"
    assert await session.value(caught) == "WorkflowRecursionError"
    assert (
        await session.value(caught.replace("RecursionError", "WorkflowExecutionError", 1)) == "WorkflowRecursionError"
    )


async def test_endless_recursion_that_awaits_is_a_clear_error_too(session: CodeSession) -> None:
    await session.workflows.add("again", "async def run():\n    return await workflows.again.call_async()")
    assert (await session.run("await workflows.again.call_async()")).error_type == "WorkflowRecursionError"
    await session.workflows.add("thrice", "def run(n): return 0 if n == 0 else 1 + workflows.thrice(n - 1)")
    assert await session.value("workflows.thrice(30)") == 30


async def test_wrong_names_and_wrong_arguments(session: CodeSession) -> None:
    await session.workflows.add("fetch_json", "def run(url): return url")
    result = await session.run("workflows.fetch_jsn(url=1)")
    assert result.error_type == "WorkflowNotFoundError"
    assert "did you mean fetch_json" in (result.error or "")
    assert await session.value("try:\n    workflows.nope()\nexcept KeyError:\n    found = 1\nfound") == 1
    result = await session.run("workflows.fetch_json(uri=1)")
    assert result.error_type == "TypeError"
    assert "uri" in (result.error or "")
    assert (await session.run("workflows.invoke()")).error_type == "TypeError"


async def test_a_skill_with_a_folder(session: CodeSession, tmp_path: Path) -> None:
    folder = tmp_path / "base" / "skills" / "pdf-forms"
    (folder / "scripts").mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: pdf-forms\ndescription: Fill forms\n---\nRead forms.md first.\n")
    (folder / "forms.md").write_text("about forms")
    (folder / "scripts" / "fill.py").write_text("def run(path): return 'filled ' + path")
    assert await session.value("skills.get('pdf-forms')['source']") == "Read forms.md first."
    assert await session.value("skills.read('pdf-forms', 'forms.md')") == "about forms"
    assert await session.value("skills.pdf_forms.fill('a.pdf')") == "filled a.pdf"
    result = await session.run("skills.pdf_forms()")
    assert result.error_type == "WorkflowExecutionError"
    assert "cannot be called" in (result.error or "")


@pytest.mark.parametrize("call", ["workflows.hang()", "await workflows.hang.call_async()"])
@pytest.mark.parametrize("form", ["def", "async def"])
async def test_a_workflow_that_hangs_ends_with_its_run(session: CodeSession, form: str, call: str) -> None:
    wait = "while True: time.sleep(0.01)" if form == "def" else "await asyncio.sleep(1000)"
    await session.workflows.add("hang", f"import asyncio, time\n{form} run():\n    {wait}")
    await session.run("x = 7")
    result = await session.run(call, timeout=0.5)
    assert (result.error_type, result.state) == ("Timeout", "kept")
    assert await session.value("x") == 7
    await session.workflows.add("fine", "def run(): return 'fine'")
    assert await session.value("workflows.fine()") == "fine"


async def test_a_reset_keeps_the_namespaces(session: CodeSession) -> None:
    await session.workflows.add("x", "def run(): return 1")
    assert await session.value("workflows.x()") == 1
    await session.value("workflows = 5")
    await session.executor.reset()
    assert await session.value("workflows.x()") == 1
    assert await session.value("repr(workflows)[:11], repr(workflows.x)") == ("<workflows:", "<workflow x>")


async def test_a_name_of_the_host_in_another_thread(session: CodeSession) -> None:
    await session.workflows.add("twice", "def run(n): return 2 * n")
    code = "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
    code += "    found = list(pool.map(workflows.twice, range(8)))\nfound"
    assert await session.value(code) == [0, 2, 4, 6, 8, 10, 12, 14]


async def test_a_syntax_error_has_its_line_in_the_traceback(session: CodeSession) -> None:
    result = await session.run("workflows.create('w', 'def run(:', 'd')")
    assert result.error_type == "WorkflowSyntaxError"
    assert "the source of w is not valid Python: line 1" in (result.error or "")
    code = "try:\n    workflows.create('w', 'def run(:', 'd')\nexcept SyntaxError as e:\n    x = e.msg, str(e)\nx"
    message, text = await session.value(code)
    assert message == text
    assert message.startswith("the source of w is not valid Python: line 1")


async def test_an_error_with_half_of_a_surrogate_pair(session: CodeSession) -> None:
    await session.workflows.add("half", "def run(): raise ValueError(chr(0xd83d))")
    assert (await session.run("workflows.half()")).error_type == "ValueError"
    assert ((await session.workflows.get("half")) or {})["usage"]["failures"] == 1
