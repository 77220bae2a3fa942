"""Artifacts that code saves and loads, in every executor."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.errors import ArtifactNotFoundError
from tests.library.in_code.conftest import CodeSession

DATA = ["''", "'text'", "'a\\ud800b'", "b''", "b'\\x00\\xff'", "0", "10**40", "1.5", "True", "None", "[]", "{}"]
DATA += ["{'a': [1, None, {'b': 'c'}]}", "float('inf')", "'null'", "b'text'", "'{}'"]


async def test_data_are_loaded_as_they_were_saved(session: CodeSession) -> None:
    for number, data in enumerate(DATA):
        name = f"deep/{number} ü.json"
        saved = await session.value(f"artifacts.save({name!r}, {data}, 'about', {{'n': {number}}})")
        assert (saved["name"], saved["description"], saved["metadata"]) == (name, "about", {"n": number})
        code = f"back = artifacts.load({name!r})\nback == {data} and type(back) is type({data})"
        assert await session.value(code), data
        expected = eval(data)
        assert await session.artifacts.load(name) == expected
        assert type(await session.artifacts.load(name)) is type(expected)


async def test_artifacts_of_the_host(session: CodeSession) -> None:
    for data in ("text", b"\x00\xff", {"a": [1, None]}, 7, None):
        await session.artifacts.save("x", data)
        assert await session.value("artifacts.load('x')") == data
        assert await session.value("await artifacts.load.call_async('x')") == data


async def test_other_methods(session: CodeSession) -> None:
    await session.value("artifacts.save('a/x', 1, description='one')\nartifacts.save(name='b', data=2)\nNone")
    assert [found["name"] for found in await session.value("artifacts.list()")] == ["a/x", "b"]
    assert (await session.value("artifacts.get('a/x')"))["description"] == "one"
    assert await session.value("artifacts.get('c'), artifacts.exists('b'), artifacts.exists('c')") == (
        None,
        True,
        False,
    )
    assert await session.value("artifacts.delete('b'), artifacts.delete('b'), artifacts.exists('b')") == (
        None,
        None,
        False,
    )
    assert (await session.value("await artifacts.list.call_async()"))[0]["name"] == "a/x"
    result = await session.run("artifacts.load('a/y')")
    assert result.error_type == "ArtifactNotFoundError"
    assert "did you mean a/x" in (result.error or "")
    caught = "try:\n    artifacts.load('y')\nexcept {} as e:\n    found = 1\nfound"
    for error in ("KeyError", "FileNotFoundError", "ArtifactNotFoundError"):
        assert await session.value(caught.format(error)) == 1


async def test_invalid_names_and_data(session: CodeSession) -> None:
    for name in ("../x", "/etc/x", "a\\nb", ""):
        result = await session.run(f'artifacts.save("{name}", 1)')
        assert result.error_type == "ArtifactNameRefused", name
        code = f'try:\n    artifacts.load("{name}")\nexcept ValueError as e:\n    found = 1\nfound'
        assert await session.value(code) == 1
    for data, where in (("{1, 2}", "data is a set"), ("[object()]", "data[0]"), ("{1: 2}", "has the key 1")):
        result = await session.run(f"artifacts.save('x', {data})")
        assert result.error_type == "ArtifactWriteError"
        assert where in (result.error or "")
    assert await session.artifacts.list() == []


async def test_a_data_frame_is_saved_as_parquet(session: CodeSession) -> None:
    make = "import pandas as pd\nframe = pd.DataFrame({'a': [1, 2], 'b': ['x', None]})\n"
    await session.value(make + "artifacts.save('table', frame)\nartifacts.save('t/table.parquet', frame)\nNone")
    for name in ("table", "t/table.parquet"):
        data = await session.artifacts.load(name)
        assert data[:4] == data[-4:] == b"PAR1"
        assert await session.value(f"frame.equals(artifacts.load({name!r}))")
    await session.value("artifacts.save('table.csv', frame[['a']])\nartifacts.save('table.json', frame)\nNone")
    assert await session.artifacts.load("table.csv") == "a\n1\n2\n"
    assert await session.artifacts.load("table.json") == [{"a": 1, "b": "x"}, {"a": 2, "b": None}]
    assert await session.value("list(artifacts.save('column', frame['a']))[0], artifacts.load('column').shape") == (
        "name",
        (2, 1),
    )


async def test_without_pyarrow_the_error_says_what_to_install(session: CodeSession) -> None:
    code = "import pandas as pd, sys\nframe = pd.DataFrame({'a': [1]})\nartifacts.save('kept', frame)\n"
    code += "names = [n for n in sys.modules if n.partition('.')[0] == 'pyarrow']\n"
    code += "before = {n: sys.modules.pop(n) for n in names}\n"
    code += "sys.modules |= {'pyarrow': None, 'fastparquet': None}\nfound = []\n"
    code += "for ask in (lambda: artifacts.save('t.parquet', frame), lambda: artifacts.load('kept')):\n"
    code += "    try:\n        ask()\n    except OSError as e:\n        found.append((type(e).__name__, str(e)))\n"
    code += "del sys.modules['pyarrow'], sys.modules['fastparquet']\nsys.modules |= before\nfound"
    saved, loaded = await session.value(code)
    why = 'tables are saved as Parquet, for which pandas needs pyarrow; deps.add("pyarrow") installs it'
    assert saved == ("ArtifactWriteError", f"t.parquet was not saved: {why}")
    assert loaded == ("ArtifactReadError", f"it was not loaded: {why}")
    assert [kept["name"] for kept in await session.artifacts.list()] == ["kept"]


async def test_numpy_numbers(session: CodeSession) -> None:
    code = """
import numpy as np
artifacts.save("sums.json", {"n": np.int64(5), "all": [np.bool_(True), np.float32(0.5), np.float64(1.5)]})
artifacts.save("one", np.int8(-3))
"""
    assert (await session.run(code)).error is None
    assert await session.artifacts.load("sums.json") == {"n": 5, "all": [True, 0.5, 1.5]}
    assert await session.artifacts.load("one") == -3
    for value, reason in (("np.arange(3)", "save its .tolist()"), ("np.datetime64('2026-01-01')", "numpy.datetime64")):
        result = await session.run(f"artifacts.save('odd', [{value}])")
        assert result.error_type == "ArtifactWriteError"
        assert reason in (result.error or "")


async def test_a_figure_is_saved_as_png(session: CodeSession) -> None:
    make = "import matplotlib\nmatplotlib.use('agg')\nfrom matplotlib.figure import Figure\nfigure = Figure()\n"
    await session.value(make + "axes = figure.subplots()\naxes.plot([1, 2])\nartifacts.save('plot.png', figure)\nNone")
    assert (await session.artifacts.load("plot.png")).startswith(b"\x89PNG\r\n")
    await session.value("artifacts.save('axes', axes)\nartifacts.save('plot.svg', figure)\nNone")
    assert (await session.artifacts.load("axes")).startswith(b"\x89PNG\r\n")
    assert b"<svg" in await session.artifacts.load("plot.svg")
    image = "from PIL import Image\nartifacts.save('i.jpg', Image.new('RGB', (2, 2)))\nartifacts.load('i.jpg')[:3]"
    assert await session.value(image) == b"\xff\xd8\xff"


async def test_files_are_saved_and_loaded_in_pieces(session: CodeSession) -> None:
    code = "import os, pathlib, tempfile\nfolder = pathlib.Path(tempfile.mkdtemp())\n"
    code += "with open(folder / 'big', 'wb') as f:\n    for n in range(12): f.write(bytes([n]) * 1_000_000)\n"
    code += "artifacts.save('big', folder / 'big')['size']"
    assert await session.value(code) == 12_000_000
    assert "artifacts.upload" in session.calls
    pieces = [piece async for piece in session.artifacts.pieces("big")]
    assert b"".join(pieces) == b"".join(bytes([n]) * 1_000_000 for n in range(12))
    assert await session.value("artifacts.load('big') == (folder / 'big').read_bytes()")
    assert await session.value("artifacts.copy_to('big', folder / 'new' / 'copy').name") == "copy"
    same = "(folder / 'new' / 'copy').read_bytes() == (folder / 'big').read_bytes()"
    assert await session.value(same)
    assert await session.value("(await artifacts.copy_to.call_async('big', folder / 'new')).name") == "big"
    opened = "with open(folder / 'big', 'rb') as f:\n    size = artifacts.save('opened', f)['size']\nsize"
    assert await session.value(opened) == 12_000_000
    text = "(folder / 't').write_text('ü' * 5)\nartifacts.save('t', open(folder / 't'))\nartifacts.load('t')"
    assert await session.value(text) == "üüüüü"


async def test_large_values_of_every_kind(session: CodeSession) -> None:
    code = "big = {'text': 'ü' * 3_000_000, 'bytes': b'\\xff' * 33_000_000, 'json': ['x' * 50] * 90_000}\n"
    code += "for name, data in big.items(): artifacts.save(name, data)\n"
    code += "[artifacts.load(name) == data for name, data in big.items()]"
    assert await session.value(code) == [True, True, True]
    assert await session.value("await artifacts.load.call_async('text') == big['text']")
    assert (await session.artifacts.get("bytes") or {})["size"] == 33_000_000
    assert len(await session.artifacts.load("json")) == 90_000


async def test_a_file_that_cannot_be_read_to_its_end_changes_nothing(session: CodeSession) -> None:
    await session.artifacts.save("x", "before")
    code = "class Breaks:\n    left = 3\n    def read(self, size):\n        self.left -= 1\n"
    code += "        if not self.left: raise OSError('gone')\n        return b'x' * size\nartifacts.save('x', Breaks())"
    result = await session.run(code)
    assert result.error_type == "OSError"
    assert session.calls[-1] == "artifacts.drop_upload"
    assert await session.artifacts.load("x") == "before"
    result = await session.run("import pathlib\nartifacts.save('x', pathlib.Path('not there'))")
    assert result.error_type == "FileNotFoundError"
    assert await session.artifacts.load("x") == "before"


async def test_an_interrupted_upload_changes_nothing(session: CodeSession, tmp_path: Path) -> None:
    await session.artifacts.save("x", "before")
    code = (
        "import time\nclass Slow:\n    def read(self, size):\n        time.sleep(0.05)\n        return b'half' * 1000\n"
    )
    result = await session.run(code + "artifacts.save('x', Slow())", timeout=0.7)
    assert (result.error_type, result.state) == ("Timeout", "kept")
    await session.artifacts.close()
    assert await session.artifacts.load("x") == "before"
    left = [path for path in (tmp_path / "base").rglob("*") if path.is_file() and b"half" in path.read_bytes()]
    assert left == []


async def test_a_deleted_artifact_is_an_error(session: CodeSession) -> None:
    with pytest.raises(ArtifactNotFoundError):
        await session.artifacts.load("x")
    await session.value("artifacts.save('x', 'y')\nNone")
    await session.artifacts.delete("x")
    assert (await session.run("artifacts.load('x')")).error_type == "ArtifactNotFoundError"
