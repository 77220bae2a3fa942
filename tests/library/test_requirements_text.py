"""A requirements.txt stays as a person wrote it, whatever is added and removed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from carrel.errors import DependencyError, RequirementRefused
from carrel.library.requirements_text import checked, name_of, read, with_requirement, without_requirement

FILE = """# What the reports need.

pandas>=2   # tables
Requests[socks] == 2.32.3

# drawing
matplotlib
"""


def test_what_is_written_is_read_in_its_order() -> None:
    assert [(entry.first, entry.text, entry.name) for entry in read(FILE)] == [
        (2, "pandas>=2", "pandas"),
        (3, "Requests[socks] == 2.32.3", "requests"),
        (6, "matplotlib", "matplotlib"),
    ]
    assert read("") == read("# only words\n\n") == []


def test_a_line_may_go_on_in_the_next() -> None:
    text = "pandas \\\n    >=2, \\\n    <3\nnumpy\n"
    assert [(entry.first, entry.after, entry.name) for entry in read(text)] == [(0, 3, "pandas"), (3, 4, "numpy")]
    assert without_requirement(text, "pandas") == "numpy\n"
    assert with_requirement(text, "pandas==2.2") == "pandas==2.2\nnumpy\n"
    assert [entry.text for entry in read("a\\\n")] == ["a\\"]


def test_lines_that_are_no_requirement_have_their_problem_and_stay() -> None:
    text = "-r other.txt\nnumpy\nthing @ https://example.com/thing.whl\n"
    found = read(text)
    assert [bool(entry.problem) for entry in found] == [True, False, True]
    assert found[2].problem.startswith("line 3: ")
    assert without_requirement(text, "numpy") == "-r other.txt\nthing @ https://example.com/thing.whl\n"


def test_who_may_read_the_list_does_not_learn_the_password_of_an_index() -> None:
    text = "--index-url https://me:s3cret@example.com/simple\nthing @ git+https://t0ken-s3cret@example.com/thing\nred\n"
    found = read(text)
    assert "s3cret" not in str(found)
    assert found[0].text == "--index-url https://***@example.com/simple"
    assert with_requirement(text, "blue") == text + "blue\n"
    assert without_requirement(text, "red") == text.removesuffix("red\n")


@pytest.mark.parametrize(
    ("requirement", "complaint"),
    [
        ("", "an empty requirement"),
        ("   ", "an empty requirement"),
        ("--index-url=http://x", "an option of the installer"),
        ("-e .", "an option of the installer"),
        ("pandas --pre", "is no requirement"),
        ("https://example.com/x.whl", "an address or a path"),
        ("git+https://example.com/x", "an address or a path"),
        ("./here", "an address or a path"),
        ("/there/x", "an address or a path"),
        ("~/x", "an address or a path"),
        ("x-1.0-py3-none-any.whl", "an address or a path"),
        ("x.tar.gz", "an address or a path"),
        ("x.ZIP", "an address or a path"),
        ("pandas @ https://example.com/x.whl", "names an address"),
        ("pandas @ file:///x", "names an address"),
        ("pandas; python_version > '3'", "a condition"),
        ("pandas\nnumpy", "control characters"),
        ("pandas\x00", "control characters"),
        ("pandas numpy", "is no requirement"),
        ("pandas>=", "is no requirement"),
        ("pandas_ >= 1", "ends with a letter or a digit"),
        ("pandas-", "is no requirement"),
        ("pandas $(reboot)", "is no requirement"),
        ("a" * 501, "longer than 500"),
        (5, "is a text, not int"),
    ],
)
def test_what_is_no_plain_requirement_is_refused(requirement: str, complaint: str) -> None:
    with pytest.raises(RequirementRefused, match=complaint.replace("(", r"\(")) as refused:
        checked(requirement)
    assert isinstance(refused.value, ValueError | DependencyError)


@pytest.mark.parametrize("spelling", ["Foo.Bar_baz", "foo-bar-baz", "FOO__bar.baz>=1", " foo_bar-baz[x] "])
def test_all_spellings_of_a_name_are_one(spelling: str) -> None:
    assert name_of(spelling) == "foo-bar-baz"


def test_a_requirement_takes_the_place_of_its_line_and_keeps_the_comment() -> None:
    assert with_requirement(FILE, "pandas==2.1") == FILE.replace("pandas>=2   #", "pandas==2.1   #")
    assert with_requirement(FILE, "PANDAS >=2.2").count("PANDAS >=2.2   # tables\n") == 1


def test_a_bare_name_leaves_the_line_alone() -> None:
    assert with_requirement(FILE, "pandas") == with_requirement(FILE, "requests") == FILE
    assert with_requirement(FILE, "matplotlib>=3").endswith("# drawing\nmatplotlib>=3\n")


def test_a_new_one_comes_last_with_the_files_own_line_end() -> None:
    assert with_requirement("", "numpy") == "numpy\n"
    assert with_requirement("a\r\nb", "numpy") == "a\r\nb\r\nnumpy\r\n"
    assert with_requirement("\ufeffpandas\n", "pandas<3") == "\ufeffpandas<3\n"
    assert with_requirement("# note", "numpy") == "# note\nnumpy\n"


def test_one_that_stands_twice_stands_once_after_a_change_and_not_at_all_after_removal() -> None:
    assert with_requirement("a>=1\nb\nA<9\n", "a==2") == "a==2\nb\n"
    assert without_requirement("a>=1\nb\nA<9\n", "a") == "b\n"


NAMES = some.sampled_from(["pandas", "numpy", "Foo.Bar", "foo-baz", "x1"])
REQUIREMENTS = some.builds(lambda name, rest: name + rest, NAMES, some.sampled_from(["", ">=1", "==2.0 ", "[x]<3"]))
LINES = some.one_of(
    REQUIREMENTS,
    some.builds(lambda requirement, note: f"{requirement} # {note}", REQUIREMENTS, some.text("ab #", max_size=5)),
    some.sampled_from(["", "   ", "# a note", "-r more.txt", "thing @ https://example.com/a.whl"]),
)
FILES = some.builds(lambda lines, end, last: end.join(lines) + last, some.lists(LINES), *[some.just("\n")] * 2)


@given(FILES, REQUIREMENTS)
def test_other_lines_stay_as_they_were_whatever_is_added(text: str, requirement: str) -> None:
    name = name_of(requirement)
    after = with_requirement(text, requirement)
    others = [line for line in text.splitlines() if not any(entry.name == name for entry in read(line))]
    assert [line for line in after.splitlines() if not any(entry.name == name for entry in read(line))] == others
    assert sum(entry.name == name for entry in read(after)) >= 1
    assert with_requirement(after, requirement) == after


@given(FILES, NAMES)
def test_other_lines_stay_as_they_were_whatever_is_removed(text: str, package: str) -> None:
    name = name_of(package)
    after = without_requirement(text, name)
    assert not any(entry.name == name for entry in read(after))
    others = [line for line in text.splitlines() if not any(entry.name == name for entry in read(line))]
    assert after.splitlines() == others
