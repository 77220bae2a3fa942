"""The recorded files of a session, as the server answers them."""

from carrel.session import RecordedState, read_text
from carrel.storage.base import Store
from carrel.wire.answers import FileEntryRecord


async def read_recorded(store: Store, state: RecordedState, path: str, at: str) -> bytes | list[FileEntryRecord]:
    """Return the content of a file in a recorded state, or the changed files below a folder; FileNotFoundError."""
    path = path.removeprefix("./").strip("/").removesuffix("/.")
    if (entry := state.files.get(path)) is not None and entry[0] != "deleted":
        data = await read_text(store, state.session_id, entry[2])
        if data is None:
            raise FileNotFoundError(f"the content of {path!r} at {at!r} was not kept: it is no text, or too large")
        return data
    folder = "" if path in ("", ".") else f"{path}/"
    inside = {name: each for name, each in state.files.items() if name.startswith(folder) and each[0] != "deleted"}
    if not inside and folder:
        raise FileNotFoundError(f"{path!r} was not changed up to {at!r}, so it was not recorded")
    found: dict[str, FileEntryRecord] = {}
    for name, each in sorted(inside.items()):
        first, _, rest = name.removeprefix(folder).partition("/")
        found[first] = FileEntryRecord(name=first, kind="folder" if rest else "file", size=0 if rest else each[1])
    return list(found.values())
