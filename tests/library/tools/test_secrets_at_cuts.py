"""What is cut is cleared first: no padding makes half a secret come through."""

import base64
import sys

import pytest

from carrel.errors import ToolCallError
from carrel.library.tools.secrets import Secrets
from tests.library.tools.making import catalog

KEY = "sk-LIVE-0123456789abcdefXYZ"
LOUD = f"""
name: prog
command:
  - {sys.executable}
  - -c
  - "import os,sys; sys.%s.write('Authorization: '+os.environ['T']+'~'*int(sys.argv[1])); sys.exit(3)"
env: {{T: "${{TOK}}"}}
schema: {{positional: [{{name: v, type: integer}}]}}
"""


def parts_of(text: str, least: int = 4) -> list[str]:
    """The pieces of the secret that stand in a text."""
    pieces = {KEY[at : at + least] for at in range(len(KEY) - least + 1)}
    return sorted(piece for piece in pieces if piece in text)


@pytest.mark.parametrize(("stream", "shown"), [("stderr", 4000), ("stderr", 32 * 1024), ("stdout", 2000)])
async def test_an_error_that_is_cut_has_no_rest_of_a_secret(stream: str, shown: int) -> None:
    tools = catalog(LOUD % stream, environment={"TOK": KEY})
    for padding in (shown - len(KEY) + 1, shown - len(KEY) // 2, shown - 5):
        with pytest.raises(ToolCallError) as failed:
            await tools.call("prog", {"v": padding})
        assert parts_of(str(failed.value)) == []
        assert parts_of(failed.value.stderr or "") == []


async def test_neither_side_of_the_gap_in_long_output_has_a_part_of_a_secret() -> None:
    half = 5 * 1024 * 1024
    code = f"import os; t=os.environ['T']; print('a'*({half}-9)+t+'b'*{half + 99}+t+'c'*({half}-10))"
    tools = catalog(
        f'name: prog\ncommand: [{sys.executable}, -c, "{code}"]\nenv: {{T: "${{TOK}}"}}', environment={"TOK": KEY}
    )
    text = await tools.call("prog")
    assert "bytes left out" in text
    assert parts_of(text) == []
    assert text.startswith("aaaa")
    assert text.rstrip().endswith("cccc")


def test_at_a_cut_goes_what_may_be_a_part_and_nothing_else() -> None:
    secrets = Secrets({"KEY": KEY})
    secrets.fill("${KEY}")
    for length in range(1, len(KEY)):
        assert secrets.hide_cut(f"{KEY[-length:]} and more".encode(), start=True) == b" and more"
        assert secrets.hide_cut(f"see {KEY[:length]}".encode(), end=True) == b"see "
    assert secrets.hide_cut(KEY[3:].encode(), start=True) == b""
    assert secrets.hide_cut(b"!? plain !?", start=True, end=True) == b"!? plain !?"


@pytest.mark.parametrize("before", ["", "u", "us", "user:", "alice@example.com:"])
@pytest.mark.parametrize("after", ["", "!", "!!", "\n"])
def test_a_secret_amid_other_text_in_base64_is_hidden(before: str, after: str) -> None:
    secrets = Secrets({"KEY": KEY})
    secrets.fill("${KEY}")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        written = encode(f"{before}{KEY}{after}".encode()).decode()
        hidden = secrets.hide(f"Basic {written} …")
        assert "${KEY}" in hidden
        left = hidden.removeprefix("Basic ").split("${KEY}")
        assert len(left[0]) <= (len(before) * 8 + 5) // 6 + 1
        assert len(left[1]) <= len(after) * 2 + 6


def test_a_secret_in_hex_and_quoted_is_hidden() -> None:
    secrets = Secrets({"KEY": "p&ss/wörd <x>"})
    secrets.fill("${KEY}")
    data = "p&ss/wörd <x>".encode()
    for written in (
        data.hex(),
        data.hex().upper(),
        "p%26ss%2fw%c3%b6rd%20%3cx%3e",
        "p%26ss/w%C3%B6rd%20%3Cx%3E",
        "p&amp;ss/wörd &lt;x&gt;",
        "p&ss/w\\u00f6rd <x>",
    ):
        assert secrets.hide(f"[{written}]") == "[${KEY}]"
