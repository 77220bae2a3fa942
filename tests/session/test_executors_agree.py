"""The same expression gives the same value of the same type in every executor."""

from pathlib import Path
from typing import Any

import pytest

from carrel import ExecutionResult, MemoryStorage, Session

from .conftest import KINDS, executor_of

BEFORE = """
import array, collections, dataclasses, datetime, decimal, enum, fractions, pathlib, re, uuid
@dataclasses.dataclass
class Point:
    x: int
    y: object = None
class Color(enum.Enum):
    RED = 'red'
class Level(enum.IntEnum):
    LOW = 1
class Mine:
    def __repr__(self): return 'Mine()'
class MyInt(int): pass
class MyStr(str): pass
class MyDict(dict): pass
class MyList(list): pass
Pair = collections.namedtuple('Pair', 'a b')
"""

EXPRESSIONS = """
None
True
7
2**200
-1.5
float('inf')
float('nan')
1e400
2+3j
'text'
'\\ud800'
b'\\x00\\xff'
bytearray(b'ab')
memoryview(b'ab')
[1, [2, (3,)]]
(1, (2,))
()
{'a': 1, 2: 'b', (1, 2): None, None: 0, b'k': 1, 1.5: 2, True: 3}
{1, 2}
frozenset({1})
set()
{}
datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
datetime.date(2026, 1, 2)
datetime.time(1, 2)
datetime.timedelta(days=1, seconds=2)
decimal.Decimal('1.10')
uuid.UUID(int=5)
pathlib.Path('a/b')
pathlib.PurePosixPath('a/b')
Color.RED
Level.LOW
Point(1, Point(2))
[Point(1), Color.RED, {'k': Level.LOW}]
Mine()
[Mine(), {'m': Mine()}]
Mine
MyInt(7)
MyStr('x')
MyDict(a=1)
MyList([1])
Pair(1, 2)
collections.OrderedDict(a=1)
collections.defaultdict(int, a=1)
collections.Counter('aab')
collections.deque([1, 2])
range(3)
slice(1, 2)
...
NotImplemented
len
lambda: 0
(i for i in range(2))
fractions.Fraction(1, 2)
array.array('i', [1])
re.compile('a')
ValueError('x')
{'a': 1}.items()
type
x = 5
print('only')
"""


def comparable(result: ExecutionResult) -> Any:
    """Value and type, all the way down; addresses in memory are no part of it."""

    def shape(value: Any) -> Any:
        match value:
            case dict():
                return type(value).__name__, [(shape(key), shape(each)) for key, each in value.items()]
            case list() | tuple():
                return type(value).__name__, [shape(each) for each in value]
            case set() | frozenset():
                return type(value).__name__, sorted(map(repr, value))
            case str():
                return type(value).__name__, "…".join(value.split("0x")[:1])
            case _:
                return type(value).__name__, repr(value)

    return shape(value=result.value), result.error_type, result.stdout


async def answers(kind: str, codes: list[str]) -> list[Any]:
    async with Session(MemoryStorage(), executor_of(kind)) as session:
        assert (await session.run(BEFORE)).error is None
        return [comparable(await session.run(code)) for code in codes]


async def test_the_same_expression_gives_the_same_type_everywhere() -> None:
    codes = EXPRESSIONS.strip().splitlines()
    found = {kind: await answers(kind, codes) for kind in KINDS}
    for code, *got in zip(codes, *found.values(), strict=True):
        assert all(each == got[0] for each in got), f"{code}: {dict(zip(KINDS, got, strict=True))}"


async def test_errors_are_the_same_too() -> None:
    codes = ["1/0", "missing", "import nowhere", "raise KeyError('k')", "def f(:", "exit(3)", "raise SystemExit", "x ="]
    codes += ["assert False", "raise type('Own', (Exception,), {})('mine')", "raise KeyboardInterrupt", "[][1]"]
    found = {kind: await answers(kind, codes) for kind in KINDS}
    for code, *got in zip(codes, *found.values(), strict=True):
        assert all(each == got[0] for each in got), f"{code}: {dict(zip(KINDS, got, strict=True))}"


CALLS = [
    "tools.list()",
    "[{**found, 'score': type(found['score'])} for found in tools.search('twice')]",
    "tools.twice(4)",
    "tools.twice.call_sync(number=4)",
    "await tools.twice.call_async(4)",
    "tools.twice('x', 'y')",
    "tools.missing()",
    "workflows.list()",
    "workflows.create('w', 'def run(a, b=2): return {1: (a, b)}', 'Pairs')",
    "workflows.w(1)",
    "workflows.w(a=1, b={3})",
    "await workflows.w.call_async(1)",
    "workflows.invoke('w', a=1)",
    "workflows.get('w')['source']",
    "workflows.get('missing')",
    "workflows.missing()",
    "workflows.w()",
    "workflows.search('pairs')[0]['name']",
    "skills is workflows",
    "workflows.delete('w')",
    "workflows.delete('w')",
    "artifacts.save('a', {'x': 1})['name']",
    "artifacts.load('a')",
    "artifacts.exists('a'), artifacts.exists('b')",
    "artifacts.get('a')['name']",
    "artifacts.get('b')",
    "artifacts.load('b')",
    "artifacts.save('../x', 1)",
    "artifacts.save('odd', object())",
    "artifacts.delete('a')",
    "artifacts.list()",
    "deps.list()",
    "deps.sync()",
    "deps.add('https://x')",
]


async def test_calls_of_the_namespaces_return_the_same(tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {}
    for kind in KINDS:
        async with Session(MemoryStorage(), executor_of(kind)) as session:

            def twice(number: int) -> int:
                """Twice a number."""
                return number * 2

            session.register_tool(twice)
            found[kind] = [comparable(await session.run(code)) for code in CALLS]
    for code, *got in zip(CALLS, *found.values(), strict=True):
        assert all(each == got[0] for each in got), f"{code}: {dict(zip(KINDS, got, strict=True))}"
    by_code = dict(zip(CALLS, found["sandboxed"], strict=True))
    failed = {code: error for code, (_, error, _) in by_code.items() if error is not None}
    assert failed == {
        "tools.twice('x', 'y')": "ToolCallError",
        "tools.missing()": "ToolNotFoundError",
        "workflows.missing()": "WorkflowNotFoundError",
        "workflows.w()": "TypeError",
        "artifacts.load('b')": "ArtifactNotFoundError",
        "artifacts.save('../x', 1)": "ArtifactNameRefused",
        "artifacts.save('odd', object())": "ArtifactWriteError",
        "deps.add('https://x')": "RequirementRefused",
    }


@pytest.mark.parametrize("kind_of", KINDS)
async def test_too_deep_values_and_failing_reprs_are_results(kind_of: str) -> None:
    async with Session(MemoryStorage(), executor_of(kind_of)) as session:
        result = await session.run("deep = []\nfor _ in range(100000): deep = [deep]\ndeep")
        assert result.error is None or result.error_type == "RecursionError"
        result = await session.run("class Bad:\n    def __repr__(self): raise ValueError('no')\nBad()")
        assert result.error_type is None
        result = await session.run("loop = []\nloop.append(loop)\nloop")
        assert result.error_type is None
        assert (await session.run("1 + 1")).value == 2
