"""`deps` in code: after a call that installs, Python searches its folders again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.library.in_code.conftest import Begin


@pytest.mark.parametrize("call", ["deps.add('made')", "await deps.sync.call_async()", "deps.remove('other')"])
async def test_installed_packages_can_be_imported_at_once(begin: Begin, call: str) -> None:
    async def installed(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return [name, args]

    session = begin(deps=installed)
    # Python remembers what is in a folder for as long as the folder's time stays the same.
    code = "import os, sys, tempfile\nfolder = tempfile.mkdtemp()\nsys.path.append(folder)\n"
    code += "try:\n    import made_by_this_test\nexcept ImportError:\n    before = os.stat(folder)\n"
    code += "with open(folder + '/made_by_this_test.py', 'w') as f:\n    f.write('here = 7')\n"
    code += "os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))\n"
    code += "try:\n    import made_by_this_test\n    early = True\nexcept ImportError:\n    early = False\n"
    try:
        assert await session.value(
            f"{code}answer = {call}\nimport made_by_this_test\nearly, made_by_this_test.here"
        ) == (
            False,
            7,
        )
        assert (await session.value("answer"))[0].startswith("deps.")
    finally:
        await session.run("sys.path.remove(folder)\nsys.modules.pop('made_by_this_test', None)")
    assert await session.value("deps.list()") == ["deps.list", []]
