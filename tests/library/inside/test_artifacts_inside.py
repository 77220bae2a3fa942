"""Artifacts as code saves and loads them, in every executor."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.errors import ArtifactNotFoundError
from tests.library.inside.conftest import Inside

DATA = ["''", "'text'", "'a\\ud800b'", "b''", "b'\\x00\\xff'", "0", "10**40", "1.5", "True", "None", "[]", "{}"]
DATA += ["{'a': [1, None, {'b': 'c'}]}", "float('inf')", "'null'", "b'text'", "'{}'"]


async def test_data_comes_back_as_it_was_saved_here_and_on_the_host(inside: Inside) -> None:
    for number, data in enumerate(DATA):
        name = f"deep/{number} ü.json"
        saved = await inside.value(f"artifacts.save({name!r}, {data}, 'about', {{'n': {number}}})")
        assert (saved["name"], saved["description"], saved["metadata"]) == (name, "about", {"n": number})
        code = f"back = artifacts.load({name!r})\nback == {data} and type(back) is type({data})"
        assert await inside.value(code), data
        expected = eval(data)
        assert await inside.artifacts.load(name) == expected
        assert type(await inside.artifacts.load(name)) is type(expected)


async def test_what_the_host_saves_is_loaded_inside(inside: Inside) -> None:
    for data in ("text", b"\x00\xff", {"a": [1, None]}, 7, None):
        await inside.artifacts.save("x", data)
        assert await inside.value("artifacts.load('x')") == data
        assert await inside.value("await artifacts.load.call_async('x')") == data


async def test_the_other_verbs(inside: Inside) -> None:
    await inside.value("artifacts.save('a/x', 1, description='one')\nartifacts.save(name='b', data=2)\nNone")
    assert [found["name"] for found in await inside.value("artifacts.list()")] == ["a/x", "b"]
    assert (await inside.value("artifacts.get('a/x')"))["description"] == "one"
    assert await inside.value("artifacts.get('c'), artifacts.exists('b'), artifacts.exists('c')") == (None, True, False)
    assert await inside.value("artifacts.delete('b'), artifacts.delete('b'), artifacts.exists('b')") == (
        None,
        None,
        False,
    )
    assert (await inside.value("await artifacts.list.call_async()"))[0]["name"] == "a/x"
    result = await inside.run("artifacts.load('a/y')")
    assert result.error_type == "ArtifactNotFoundError"
    assert "did you mean a/x" in (result.error or "")
    caught = "try:\n    artifacts.load('y')\nexcept {} as e:\n    found = 1\nfound"
    for error in ("KeyError", "FileNotFoundError", "ArtifactNotFoundError"):
        assert await inside.value(caught.format(error)) == 1


async def test_names_that_lead_elsewhere_and_odd_data_are_refused(inside: Inside) -> None:
    for name in ("../x", "/etc/x", "a\\nb", ""):
        result = await inside.run(f'artifacts.save("{name}", 1)')
        assert result.error_type == "ArtifactNameRefused", name
        code = f'try:\n    artifacts.load("{name}")\nexcept ValueError as e:\n    found = 1\nfound'
        assert await inside.value(code) == 1
    for data, where in (("{1, 2}", "data is a set"), ("[object()]", "data[0]"), ("{1: 2}", "has the key 1")):
        result = await inside.run(f"artifacts.save('x', {data})")
        assert result.error_type == "ArtifactWriteError"
        assert where in (result.error or "")
    assert await inside.artifacts.list() == []


async def test_a_frame_becomes_parquet_and_comes_back_as_a_frame(inside: Inside) -> None:
    make = "import pandas as pd\nframe = pd.DataFrame({'a': [1, 2], 'b': ['x', None]})\n"
    await inside.value(make + "artifacts.save('table', frame)\nartifacts.save('t/table.parquet', frame)\nNone")
    for name in ("table", "t/table.parquet"):
        data = await inside.artifacts.load(name)
        assert data[:4] == data[-4:] == b"PAR1"
        assert await inside.value(f"frame.equals(artifacts.load({name!r}))")
    await inside.value("artifacts.save('table.csv', frame[['a']])\nartifacts.save('table.json', frame)\nNone")
    assert await inside.artifacts.load("table.csv") == "a\n1\n2\n"
    assert await inside.artifacts.load("table.json") == [{"a": 1, "b": "x"}, {"a": 2, "b": None}]
    assert await inside.value("list(artifacts.save('column', frame['a']))[0], artifacts.load('column').shape") == (
        "name",
        (2, 1),
    )


async def test_without_pyarrow_it_is_said_what_to_install(inside: Inside) -> None:
    code = "import pandas as pd, sys\nframe = pd.DataFrame({'a': [1]})\nartifacts.save('kept', frame)\n"
    code += "names = [n for n in sys.modules if n.partition('.')[0] == 'pyarrow']\n"
    code += "before = {n: sys.modules.pop(n) for n in names}\n"
    code += "sys.modules |= {'pyarrow': None, 'fastparquet': None}\nfound = []\n"
    code += "for ask in (lambda: artifacts.save('t.parquet', frame), lambda: artifacts.load('kept')):\n"
    code += "    try:\n        ask()\n    except OSError as e:\n        found.append((type(e).__name__, str(e)))\n"
    code += "del sys.modules['pyarrow'], sys.modules['fastparquet']\nsys.modules |= before\nfound"
    saved, loaded = await inside.value(code)
    why = 'pandas needs pyarrow for that; deps.add("pyarrow") installs it'
    assert saved == ("ArtifactWriteError", f"t.parquet was not saved: a table is kept as Parquet, and {why}")
    assert loaded == ("ArtifactReadError", f"it was not loaded: a table is kept as Parquet, and {why}")
    assert [kept["name"] for kept in await inside.artifacts.list()] == ["kept"]


async def test_numbers_of_a_table_are_numbers(inside: Inside) -> None:
    code = """
import numpy as np
artifacts.save("sums.json", {"n": np.int64(5), "all": [np.bool_(True), np.float32(0.5), np.float64(1.5)]})
artifacts.save("one", np.int8(-3))
"""
    assert (await inside.run(code)).error is None
    assert await inside.artifacts.load("sums.json") == {"n": 5, "all": [True, 0.5, 1.5]}
    assert await inside.artifacts.load("one") == -3
    for odd, said in (("np.arange(3)", "save its .tolist()"), ("np.datetime64('2026-01-01')", "numpy.datetime64")):
        result = await inside.run(f"artifacts.save('odd', [{odd}])")
        assert result.error_type == "ArtifactWriteError"
        assert said in (result.error or "")


async def test_a_figure_becomes_png(inside: Inside) -> None:
    make = "import matplotlib\nmatplotlib.use('agg')\nfrom matplotlib.figure import Figure\nfigure = Figure()\n"
    await inside.value(make + "axes = figure.subplots()\naxes.plot([1, 2])\nartifacts.save('plot.png', figure)\nNone")
    assert (await inside.artifacts.load("plot.png")).startswith(b"\x89PNG\r\n")
    await inside.value("artifacts.save('axes', axes)\nartifacts.save('plot.svg', figure)\nNone")
    assert (await inside.artifacts.load("axes")).startswith(b"\x89PNG\r\n")
    assert b"<svg" in await inside.artifacts.load("plot.svg")
    image = "from PIL import Image\nartifacts.save('i.jpg', Image.new('RGB', (2, 2)))\nartifacts.load('i.jpg')[:3]"
    assert await inside.value(image) == b"\xff\xd8\xff"


async def test_files_are_kept_in_pieces_and_come_back_in_pieces(inside: Inside) -> None:
    code = "import os, pathlib, tempfile\nfolder = pathlib.Path(tempfile.mkdtemp())\n"
    code += "with open(folder / 'big', 'wb') as f:\n    for n in range(12): f.write(bytes([n]) * 1_000_000)\n"
    code += "artifacts.save('big', folder / 'big')['size']"
    assert await inside.value(code) == 12_000_000
    assert "artifacts.upload" in inside.calls
    pieces = [piece async for piece in inside.artifacts.pieces("big")]
    assert b"".join(pieces) == b"".join(bytes([n]) * 1_000_000 for n in range(12))
    assert await inside.value("artifacts.load('big') == (folder / 'big').read_bytes()")
    assert await inside.value("artifacts.copy_to('big', folder / 'new' / 'copy').name") == "copy"
    same = "(folder / 'new' / 'copy').read_bytes() == (folder / 'big').read_bytes()"
    assert await inside.value(same)
    assert await inside.value("(await artifacts.copy_to.call_async('big', folder / 'new')).name") == "big"
    opened = "with open(folder / 'big', 'rb') as f:\n    size = artifacts.save('opened', f)['size']\nsize"
    assert await inside.value(opened) == 12_000_000
    text = "(folder / 't').write_text('ü' * 5)\nartifacts.save('t', open(folder / 't'))\nartifacts.load('t')"
    assert await inside.value(text) == "üüüüü"


async def test_large_values_of_every_kind_cross_whole(inside: Inside) -> None:
    code = "big = {'text': 'ü' * 3_000_000, 'bytes': b'\\xff' * 33_000_000, 'json': ['x' * 50] * 90_000}\n"
    code += "for name, data in big.items(): artifacts.save(name, data)\n"
    code += "[artifacts.load(name) == data for name, data in big.items()]"
    assert await inside.value(code) == [True, True, True]
    assert await inside.value("await artifacts.load.call_async('text') == big['text']")
    assert (await inside.artifacts.get("bytes") or {})["size"] == 33_000_000
    assert len(await inside.artifacts.load("json")) == 90_000


async def test_a_file_that_breaks_on_the_way_leaves_what_was_there(inside: Inside) -> None:
    await inside.artifacts.save("x", "before")
    code = "class Breaks:\n    left = 3\n    def read(self, size):\n        self.left -= 1\n"
    code += "        if not self.left: raise OSError('gone')\n        return b'x' * size\nartifacts.save('x', Breaks())"
    result = await inside.run(code)
    assert result.error_type == "OSError"
    assert inside.calls[-1] == "artifacts.drop_upload"
    assert await inside.artifacts.load("x") == "before"
    result = await inside.run("import pathlib\nartifacts.save('x', pathlib.Path('not there'))")
    assert result.error_type == "FileNotFoundError"
    assert await inside.artifacts.load("x") == "before"


async def test_an_interrupted_upload_leaves_what_was_there(inside: Inside, tmp_path: Path) -> None:
    await inside.artifacts.save("x", "before")
    code = (
        "import time\nclass Slow:\n    def read(self, size):\n        time.sleep(0.05)\n        return b'half' * 1000\n"
    )
    result = await inside.run(code + "artifacts.save('x', Slow())", timeout=0.7)
    assert (result.error_type, result.state) == ("Timeout", "kept")
    await inside.artifacts.close()
    assert await inside.artifacts.load("x") == "before"
    left = [path for path in (tmp_path / "base").rglob("*") if path.is_file() and b"half" in path.read_bytes()]
    assert left == []


async def test_one_that_is_gone_meanwhile_is_an_error(inside: Inside) -> None:
    with pytest.raises(ArtifactNotFoundError):
        await inside.artifacts.load("x")
    await inside.value("artifacts.save('x', 'y')\nNone")
    await inside.artifacts.delete("x")
    assert (await inside.run("artifacts.load('x')")).error_type == "ArtifactNotFoundError"
