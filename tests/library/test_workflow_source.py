"""A workflow's outline from its source alone: literals in, literals out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import WorkflowSyntaxError, WorkflowValidationError
from carrel.library.docstrings import read_docstring
from carrel.library.workflows.source import (
    LARGEST_SOURCE,
    WorkflowParameter,
    read_signature,
    validate_name,
    with_description,
    without_description,
)

FETCH = '''
"""Fetch JSON from a URL."""
import no_such_package

async def run(url: str, tries: int = 3, *, headers: "dict[str, str] | None" = None, wait=BASE * 2) -> dict:
    """Get it.

    Args:
        url: Where it is,
            on two lines.
        tries (int): How often.

    Returns:
        dict: What was there.
    """
'''


def test_parameters_come_from_the_signature_and_the_docstring() -> None:
    found = read_signature("fetch", FETCH)
    assert found.description == "Fetch JSON from a URL."
    assert found.is_async
    assert found.returns == "dict"
    assert found.parameters == (
        WorkflowParameter("url", "str", "Where it is, on two lines.", True, None),
        WorkflowParameter("tries", "int", "How often.", False, 3),
        WorkflowParameter("headers", "dict[str, str] | None", "", False, None),
        WorkflowParameter("wait", "Any", "", False, "BASE * 2"),
    )


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("", []),
        ("a, /, b=(1, 2)", [("a", True, None), ("b", False, "(1, 2)")]),
        ("*paths: str, **rest", [("*paths", False, None), ("**rest", False, None)]),
        ("*, a, b=None", [("a", True, None), ("b", False, None)]),
        ("a=-1, b='x', c={'k': [1]}", [("a", False, -1), ("b", False, "x"), ("c", False, {"k": [1]})]),
        ("a=b'x', b={1, 2}, c=1j", [("a", False, "b'x'"), ("b", False, "{1, 2}"), ("c", False, "1j")]),
    ],
)
def test_every_kind_of_parameter(signature: str, expected: list[tuple[str, bool, object]]) -> None:
    found = read_signature("x", f"def run({signature}): pass").parameters
    assert [(p.name, p.required, p.default) for p in found] == expected


def test_the_description_is_the_given_one_or_the_modules_or_that_of_run() -> None:
    both = '"""Of the file.\n\nMore."""\ndef run():\n    """Of run."""'
    assert read_signature("x", both).description == "Of the file."
    assert read_signature("x", both, "given").description == "given"
    assert read_signature("x", 'def run():\n    """Of\n    run."""').description == "Of run."
    assert read_signature("x", "def run(): pass").description == ""
    assert read_signature("x", both).doc == "Of the file.\n\nMore.\n\nOf run."


@pytest.mark.parametrize(
    "source",
    ["", "x = 1", "class run: pass", "run = lambda: 1", "def runs(): pass", "if True:\n    def run(): pass"],
)
def test_a_source_without_run_is_refused(source: str) -> None:
    with pytest.raises(WorkflowValidationError, match="no function 'run'"):
        read_signature("x", source)


def test_the_last_run_counts() -> None:
    assert [p.name for p in read_signature("x", "def run(a): pass\ndef run(b): pass").parameters] == ["b"]


@pytest.mark.parametrize("source", ["def run(:", "def run(): pass\n  x", "\0", "(" * 5000])
def test_what_is_no_python_is_a_syntax_error_and_a_value_error(source: str) -> None:
    with pytest.raises(SyntaxError, match="the source of odd is not valid Python"):
        read_signature("odd", source)
    with pytest.raises(ValueError, match="odd"):
        read_signature("odd", source)


def test_a_syntax_error_says_where() -> None:
    with pytest.raises(WorkflowSyntaxError, match=r"line 2: .*: y ="):
        read_signature("x", "def run(): pass\ny = = 2")


def test_return_outside_of_a_function_is_a_syntax_error() -> None:
    with pytest.raises(SyntaxError, match="line 2: 'return' outside function") as raised:
        read_signature("x", "def run(): pass\nreturn 1")
    assert raised.value.lineno == 2


def test_a_source_that_takes_minutes_to_compile_is_only_parsed() -> None:
    depth = 19
    blocks = "".join(f"{' ' * n}try:\n{' ' * (n + 1)}pass\n{' ' * n}finally:\n" for n in range(1, depth))
    source = f"def run():\n{blocks}{' ' * depth}pass\n" * 20
    assert read_signature("x", source).parameters == ()


def test_a_source_that_is_too_long_is_refused() -> None:
    assert read_signature("x", FETCH.ljust(LARGEST_SOURCE, "#")).is_async
    with pytest.raises(WorkflowValidationError, match="the source of x is longer than"):
        read_signature("x", FETCH.ljust(LARGEST_SOURCE + 1, "#"))


@pytest.mark.parametrize("name", ["fetch_json", "A1", "über", "x" * 200])
def test_a_name_is_an_identifier(name: str) -> None:
    assert validate_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "a b", "a-b", "1a", "a.b", "../a", "class", "_a", "__init__", "list", "ﬁx", None, 3, "x" * 201],
)
def test_other_names_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match="name"):
        validate_name(name)


@given(source=st.text(), description=st.text(min_size=1).map(str.strip).filter(bool))
def test_a_description_kept_in_the_source_comes_out_again(source: str, description: str) -> None:
    before, _ = without_description(source)
    assert without_description(with_description(before, description)) == (before, description)


def test_a_description_is_a_comment_that_a_person_can_read() -> None:
    assert with_description("def run(): pass\n", "Does it") == "def run(): pass\n# description: Does it\n"
    assert with_description("def run(): pass", "Does it") == "def run(): pass\n# description: Does it"
    assert without_description("def run(): pass\n#  description: no\n") == ("def run(): pass\n#  description: no\n", "")
    assert without_description('x\n# description: "odd\n') == ("x\n", '"odd')


NUMPY = """Do it.

Well.

Parameters
----------
a : int
    The first,
    in two lines.
b, c
    Both.

Returns
-------
str
    The answer.

Notes
-----
Nothing here: at all
"""

SPHINX = """Do it.

:param a: the first,
    in two lines
:param int b: the second
:type b: int
:returns: the answer
:raises ValueError: never
"""


def test_docstrings_in_three_manners() -> None:
    numpy = read_docstring(NUMPY)
    assert (numpy.summary, numpy.text, numpy.returns) == ("Do it.", "Do it.\n\nWell.", "The answer.")
    assert numpy.parameters == {"a": "The first, in two lines.", "b": "Both.", "c": "Both."}
    sphinx = read_docstring(SPHINX)
    assert (sphinx.text, sphinx.returns) == ("Do it.", "the answer")
    assert sphinx.parameters == {"a": "the first, in two lines", "b": "the second"}
    google = read_docstring(
        "Do it.\n\nWell.\n\nReturns:\n    dict[str, int]: The answer.\n\nRaises:\n    ValueError: No."
    )
    assert (google.text, google.returns) == ("Do it.\n\nWell.", "The answer.")
    assert read_docstring("\n    Args:\n        url: Where.\n    ").parameters == {"url": "Where."}
    assert read_docstring(None).summary == ""
    assert read_docstring("Note:\nprose goes on").text == "Note:\nprose goes on"


@given(text=st.text(alphabet=":-= \n\tabArgsReturns*(),", max_size=200))
def test_no_docstring_breaks_the_reader(text: str) -> None:
    read_docstring(text)
