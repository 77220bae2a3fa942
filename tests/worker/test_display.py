"""What a notebook would show of a value comes with the result, by MIME type."""

import base64

import pytest

from tests.worker.driver import Session

PNG = b"\x89PNG\r\n\x1a\n"


def png(bundle: dict[str, str]) -> bool:
    return base64.b64decode(bundle["image/png"]).startswith(PNG)


def test_a_data_frame_is_a_table(session: Session) -> None:
    outcome = session.run("import pandas as pd\npd.DataFrame({'a': [1, 2]})")
    (bundle,) = outcome.display
    assert "<table" in bundle["text/html"]
    assert "a" in outcome.value


def test_figures_are_pictures_once_each(session: Session) -> None:
    session.value("import matplotlib.pyplot as plt")
    (drawn,) = session.run("plt.plot([1, 2])\nplt.show()").display
    assert png(drawn)
    assert session.run("1").display == []
    (drawn,) = session.run("fig, ax = plt.subplots()\nax.plot([1])\nfig").display
    assert png(drawn)
    assert len(session.run("plt.figure()\nplt.plot([1])\nplt.figure()\nplt.plot([2])\nNone").display) == 2
    failed = session.run("plt.plot([1])\n1/0")
    assert failed.error_type == "ZeroDivisionError"
    assert len(failed.display) == 1


def test_an_image(session: Session) -> None:
    (bundle,) = session.run("from PIL import Image\nImage.new('RGB', (4, 4), 'red')").display
    assert png(bundle)
    assert "image/jpeg" not in bundle


def test_anything_with_a_rich_form(everywhere: Session) -> None:
    everywhere.value(
        "class H:\n    def _repr_html_(self): return '<b>h</b>'\n"
        "class M:\n    def _repr_mimebundle_(self, include=None, exclude=None):\n"
        "        return {'text/markdown': '*m*', 'x/y': {'a': 1}}, {}\n"
        "class P:\n    def _repr_png_(self): return b'\\x89PNG\\r\\n\\x1a\\n...'\n"
        "    def _repr_latex_(self): return '$x$'\n"
        "class J:\n    def _repr_json_(self): return {'a': [1, None]}\n"
    )
    assert everywhere.run("H()").display == [{"text/html": "<b>h</b>"}]
    assert everywhere.run("M()").display == [{"text/markdown": "*m*", "x/y": {"a": 1}}]
    (bundle,) = everywhere.run("P()").display
    assert png(bundle)
    assert bundle["text/latex"] == "$x$"
    assert everywhere.run("J()").display == [{"application/json": {"a": [1, None]}}]
    shown = everywhere.run("display(H(), 'text', J())\nH()")
    assert [sorted(bundle) for bundle in shown.display] == [["text/html"], ["application/json"], ["text/html"]]
    assert shown.stdout == "text\n"
    assert everywhere.run("H").display == []


@pytest.mark.parametrize(
    "body",
    [
        "def _repr_html_(self): 1/0",
        "def _repr_html_(self): return None",
        "def _repr_html_(self): return 5",
        "def _repr_html_(self): return 'x' * 100_000_000",
        "def _repr_json_(self): return {'a': object()}",
        "def _repr_json_(self):\n        a = []\n        a.append(a)\n        return a",
        "def _repr_png_(self): return b'x' * 100_000_000",
        "def _repr_mimebundle_(self): raise KeyError",
        "def __getattr__(self, name): return lambda *a, **k: 1/0",
        "_repr_html_ = 5",
    ],
)
def test_forms_that_fail_are_left_out(session: Session, body: str) -> None:
    outcome = session.run(f"class R:\n    {body}\nR()")
    assert outcome.display == []
    assert "R object" in outcome.value


def test_surrogates_and_much_of_it(session: Session) -> None:
    code = "class H:\n    def _repr_html_(self): return '\\ud800'\nH()"
    assert session.run(code).display == [{"text/html": "\ud800"}]
    code = "class H:\n    def _repr_html_(self): return 'x' * 8_000_000\nfor n in range(5): display(H())"
    shown = session.run(code).display
    assert [sorted(bundle) for bundle in shown] == [["text/html"]] * 2 + [["text/plain"]] * 3
