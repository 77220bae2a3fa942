"""Small real packages, built here: nothing is fetched."""

from __future__ import annotations

import zipfile
from pathlib import Path


def build_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    source: str = "",
    needs: tuple[str, ...] = (),
    script: str = "",
    extras: dict[str, str] | None = None,
    files: dict[str, str] | None = None,
) -> Path:
    """A wheel with the one module `name` in it, which has its `VERSION`; `script` is the function of its command."""
    module = name.replace("-", "_")
    stem = f"{module}-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-py3-none-any.whl"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {need}" for need in needs]
    for extra, need in (extras or {}).items():
        metadata += [f"Provides-Extra: {extra}", f'Requires-Dist: {need}; extra == "{extra}"']
    tags = "Wheel-Version: 1.0\nGenerator: carrel-tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = {
        # Python tells compiled files apart by size and second: two versions of one moment must differ in size.
        f"{module}.py": f"VERSION = {version!r}\n{'#' * int(version.partition('.')[0])}\n{source}",
        f"{stem}.dist-info/METADATA": "\n".join(metadata) + "\n",
        f"{stem}.dist-info/WHEEL": tags,
        **(files or {}),
    }
    if script:
        content[f"{stem}.dist-info/entry_points.txt"] = f"[console_scripts]\n{name} = {module}:{script}\n"
    content[f"{stem}.dist-info/RECORD"] = "".join(f"{file},,\n" for file in [*content, f"{stem}.dist-info/RECORD"])
    with zipfile.ZipFile(path, "w") as file:
        for inside, text in content.items():
            file.writestr(inside, text)
    return path
