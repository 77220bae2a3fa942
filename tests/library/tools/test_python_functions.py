"""Python functions as tools: what their hints and docstrings say, and how they are called."""

import asyncio
import contextvars
import dataclasses
import datetime
import decimal
import functools
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from carrel.errors import ConfigurationError, ToolCallError, ToolNotFoundError, ToolTimeoutError
from carrel.library.tools.definition_files import parse_definition
from carrel.library.tools.definitions import PythonDefinition
from carrel.library.tools.python import ModuleProvider, register
from carrel.library.tools.registry import ToolRegistry
from tests.support.tools import callable_names


def mean(numbers: list[float], trim: int = 0) -> float:
    """The average of some numbers.

    Args:
        numbers: What to average.
        trim: How many to leave out at each end.
    """
    numbers = sorted(numbers)[trim : len(numbers) - trim]
    return sum(numbers) / len(numbers)


async def listed(function: Any, **settings: Any) -> dict[str, Any]:
    [one] = await ToolRegistry([register(function, **settings)]).list()
    return one


async def test_hints_and_docstring() -> None:
    one = await listed(mean, tags=["math"])
    assert one["name"] == "mean"
    assert one["description"] == "The average of some numbers."
    assert one["signature"] == "mean(numbers: list[float], trim: int = 0) -> float"
    assert one["tags"] == ["math"]
    assert one["parameters"] == [
        {
            "name": "numbers",
            "type": "list[float]",
            "description": "What to average.",
            "required": True,
            "default": None,
        },
        {
            "name": "trim",
            "type": "int",
            "description": "How many to leave out at each end.",
            "required": False,
            "default": 0,
        },
    ]


async def test_positional_and_named_arguments() -> None:
    tools = ToolRegistry([register(mean)])
    assert await tools.call("mean", {"numbers": [1, 2, 6]}) == 3
    assert await tools.handle("tools.mean", [[1, 2, 6, 100], 1], {}) == 4
    with pytest.raises(ToolCallError, match=r"mean: numbers\[1\] must be float, not str 'x'"):
        await tools.call("mean", {"numbers": [1, "x"]})
    with pytest.raises(ToolCallError, match=r"mean: numbers is missing \(What to average\.\)"):
        await tools.call("mean")


async def test_generators_return_lists() -> None:
    def count(upto: int) -> Iterator[int]:
        yield from range(upto)

    async def count_slowly(upto: int) -> AsyncIterator[int]:
        for number in range(upto):
            yield number

    tools = ToolRegistry([register(count), register(count_slowly)])
    for name in ("count", "count_slowly"):
        assert await tools.call(name, {"upto": 3}) == [0, 1, 2]
        with pytest.raises(ToolCallError, match="it yields more than 100,000 items"):
            await tools.call(name, {"upto": 2**62})


async def test_exceptions() -> None:
    tools = ToolRegistry([register(mean)])
    with pytest.raises(ToolCallError, match="mean failed: ZeroDivisionError: division by zero") as raised:
        await tools.call("mean", {"numbers": []})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)

    def stop() -> None:
        raise StopIteration("odd")

    with pytest.raises(ToolCallError, match="stop failed: RuntimeError"):
        await ToolRegistry([register(stop)]).call("stop")


async def test_arguments_are_converted_to_the_hints() -> None:
    class Point(BaseModel):
        x: int
        y: int = 0

    @dataclasses.dataclass
    class Size:
        w: int

    class Extra(TypedDict):
        note: str

    seen: list[Any] = []

    def place(
        at: Point,
        size: Size,
        when: datetime.date,
        file: Path,
        extra: Extra,
        how: Literal["in", "out"] = "in",
        count: Annotated[int, Field(ge=1, description="How many")] = 1,
    ) -> Point:
        seen.append((at, size, when, file, extra, how, count))
        return Point(x=at.x + 1)

    tools = ToolRegistry([register(place)])
    arguments = {
        "at": {"x": 1},
        "size": {"w": 2},
        "when": datetime.date(2024, 2, 29),
        "file": Path("/a"),
        "extra": {"note": "n"},
        "count": 3,
    }
    assert await tools.call("place", arguments) == {"x": 2, "y": 0}
    assert seen == [(Point(x=1), Size(2), datetime.date(2024, 2, 29), Path("/a"), {"note": "n"}, "in", 3)]
    with pytest.raises(ToolCallError, match="how must be one of 'in', 'out'"):
        await tools.call("place", {**arguments, "how": "up"})
    with pytest.raises(ToolCallError, match="count: 0 is less than the minimum of 1"):
        await tools.call("place", {**arguments, "count": 0})
    with pytest.raises(ToolCallError, match="place: when: "):
        await tools.call("place", {**arguments, "when": "yesterday"})


async def test_a_plain_function_may_block() -> None:
    """Each waits for the other at a barrier, on no thread of the loop's."""
    barrier = threading.Barrier(30, timeout=60)
    loop_thread = threading.get_ident()

    def meet() -> bool:
        barrier.wait()
        return threading.get_ident() != loop_thread

    tools = ToolRegistry([register(meet)])
    assert all(await asyncio.gather(*(tools.call("meet") for _ in range(30))))


async def test_an_async_function_is_cancelled_with_its_caller() -> None:
    ended = asyncio.Event()
    began = asyncio.Event()

    async def wait(seconds: float) -> str:
        began.set()
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.set()
            raise
        return "done"

    tools = ToolRegistry([register(wait, timeout=0.05)])
    patient = ToolRegistry([register(wait, timeout=None)])
    assert await patient.call("wait", {"seconds": 0}) == "done"
    with pytest.raises(ToolTimeoutError, match=r"wait took longer than 0\.05 s"):
        await tools.call("wait", {"seconds": 60})
    assert ended.is_set()
    ended.clear()
    began.clear()
    call = asyncio.create_task(patient.call("wait", {"seconds": 60}))
    await began.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()


async def test_a_plain_function_that_never_ends() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    with pytest.raises(ToolTimeoutError, match="hang took longer"):
        await ToolRegistry([register(hang, timeout=0.05)]).call("hang")
    release.set()


async def test_a_timeout_error_of_the_function_itself() -> None:
    def fetch() -> None:
        raise TimeoutError("the other side is slow")

    with pytest.raises(ToolCallError, match="fetch failed: TimeoutError: the other side is slow") as raised:
        await ToolRegistry([register(fetch)]).call("fetch")
    assert not isinstance(raised.value, ToolTimeoutError)


async def test_methods_partials_and_callable_objects() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def add(self, by: int = 1) -> int:
            """Count on."""
            self.count += by
            return self.count

        async def __call__(self, by: int) -> int:
            return by

    counter = Counter()
    tools = ToolRegistry(
        [
            register(counter.add),
            register(counter, name="counter"),
            register(functools.partial(mean, trim=1), name="inner_mean"),
            register(lambda text: text.upper(), name="text.upper", description="In capitals"),
        ]
    )
    assert await tools.call("add", {"by": 2}) == 2
    assert await tools.call("counter", {"by": 3}) == 3
    assert await tools.call("inner_mean", {"numbers": [0, 5, 100]}) == 5
    assert await tools.call("text.upper", {"text": "a"}) == "A"
    assert (await tools.list("text"))[0]["description"] == "In capitals"
    with pytest.raises(ConfigurationError, match="'<lambda>' cannot be the name of a tool"):
        register(lambda: 1)


async def test_unusual_parameters() -> None:
    def odd(first: int, /, copy: str = "c", *, class_: str = "k", **more: Any) -> list[Any]:
        return [first, copy, class_, more]

    tools = ToolRegistry([register(odd)])
    assert await tools.call("odd", {"first": 1, "schema": 2}) == [1, "c", "k", {"schema": 2}]
    assert await tools.handle("tools.odd", [5, "d"], {"class_": "x"}) == [5, "d", "x", {}]


def test_hints_that_are_not_data_are_refused() -> None:
    def lock(it: threading.Lock) -> None: ...

    with pytest.raises(ConfigurationError, match="lock: its type hints do not describe data"):
        register(lock)


async def test_context_variables_in_the_thread() -> None:
    user = contextvars.ContextVar("user", default="unknown")

    def who() -> str:
        return user.get()

    user.set("me")
    assert await ToolRegistry([register(who)]).call("who") == "me"


# --- modules ----------------------------------------------------------------------------------------------------------

MODULE = '''
from os.path import join

LIMIT = 5

def double(n: int) -> int:
    """Twice."""
    return 2 * n

async def later(n: int) -> int:
    return n

def _hidden() -> None: ...

class Thing: ...
'''


@pytest.fixture
def module(tmp_path: Path) -> Iterator[str]:
    """A module that can be imported while the test runs."""
    name = f"tools_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    sys.path.insert(0, str(tmp_path))
    yield name
    sys.path.remove(str(tmp_path))
    sys.modules.pop(name, None)


def module_tools(text: str) -> ToolRegistry:
    definition = parse_definition(text.encode(), "tools/stats.yaml")
    assert isinstance(definition, PythonDefinition)
    return ToolRegistry([ModuleProvider(definition)])


async def test_the_public_functions_of_a_module_are_tools(module: str) -> None:
    tools = module_tools(f"name: stats\ntype: python\nmodule: {module}\ntags: [math]\napproval: ask\n")
    assert module not in sys.modules
    listed = await tools.list()
    assert callable_names(listed) == ["stats.double", "stats.later"]
    assert listed[0]["tags"] == ["math"]
    assert listed[0]["recipes"][0]["approval"] == "ask"


async def test_functions_of_a_module_are_called(module: str) -> None:
    tools = module_tools(f"name: stats\ntype: python\nmodule: {module}\nfunctions: [double]\n")
    assert await tools.call("stats.double", {"n": 4}) == 8
    with pytest.raises(ToolNotFoundError, match="there is no later in stats"):
        await tools.call("stats.later", {"n": 4})


async def test_a_module_that_cannot_be_imported_affects_only_its_tools(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("import no_such_package_here\n")
    tools = module_tools(f"name: stats\ntype: python\nmodule: {module}\n")
    tools.add(register(mean))
    listed = await tools.list()
    assert [one["name"] for one in listed] == ["mean", "stats"]
    assert "No module named 'no_such_package_here'" in listed[1]["error"]
    with pytest.raises(ToolCallError, match=r"stats cannot be used: .*No module named"):
        await tools.call("stats.double", {"n": 1})
    assert await tools.call("mean", {"numbers": [1]}) == 1


async def test_a_missing_function_is_named(module: str) -> None:
    tools = module_tools(f"name: stats\ntype: python\nmodule: {module}\nfunctions: [duoble]\n")
    with pytest.raises(ToolCallError, match="has no function duoble; did you mean double"):
        await tools.call("stats.duoble")


async def test_values_without_hints_are_unchanged() -> None:
    got: list[Any] = []

    def take(value, text: str = "", exact: decimal.Decimal | None = None, numbers: list[int] | None = None, **more):
        got.append((value, text, exact, numbers, more))

    tools = ToolRegistry([register(take)])
    day = datetime.date(2026, 2, 3)
    for value in (
        (1, (2,)),
        {3},
        frozenset({4}),
        day,
        datetime.timedelta(1),
        b"\xff",
        {5: "five"},
        decimal.Decimal("0.1"),
    ):
        await tools.call("take", {"value": value, "other": value})
        assert got[-1][0] == value
        assert type(got[-1][0]) is type(value)
        assert got[-1][4] == {"other": value}
    exact = decimal.Decimal("0.12345678901234567890123")
    await tools.call("take", {"value": (1,), "text": day, "exact": exact, "numbers": (1, 2)})
    assert got[-1] == ((1,), "2026-02-03", exact, [1, 2], {})
    with pytest.raises(ToolCallError, match=r"take: numbers\[0\] must be int"):
        await tools.call("take", {"value": 1, "numbers": ("x",)})


async def test_a_plain_function_that_wraps_an_async_one() -> None:
    async def double(x: int) -> int:
        return 2 * x

    @functools.wraps(double)
    def cached(x: int) -> int:
        return 41

    @functools.wraps(double)
    def passed_on(x: int) -> Any:
        return double(x)

    @functools.wraps(double)
    def waited_for(x: int) -> int:
        return asyncio.run(double(x))

    tools = ToolRegistry()
    for name, function in {"cached": cached, "passed_on": passed_on, "waited_for": waited_for}.items():
        tools.add(register(function, name=name))
    assert await tools.call("cached", {"x": 1}) == 41
    assert await tools.call("passed_on", {"x": 21}) == 42
    assert await tools.call("waited_for", {"x": 21}) == 42


@pytest.mark.parametrize("name", ["list", "search", "describe", "describe.more"])
async def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="is a function of tools itself"):
        register(mean, name=name)
