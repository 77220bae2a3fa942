"""What is too large for a line goes beside it and comes back whole."""

import base64
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.conversation.attachments import MARK, TEXT_LIMIT, detach, paths_of, reattach
from carrel.conversation.log_entries import encode
from carrel.conversation.messages import build_message, document_block, image_block, text_block, tool_result_block

LONG = "line of output\n" * 5000
PICTURE = base64.b64encode(bytes(range(256)) * 400).decode()


def test_a_long_tool_output_leaves_a_preview():
    message = build_message("user", [tool_result_block(tool_use_id="a", model_text=LONG)])
    spilled = detach(message)
    [path] = spilled.files
    assert path.startswith("tool-output/")
    assert path.endswith(".txt")
    assert spilled.files[path] == LONG.encode()
    kept = spilled.message["content"][0]["model_text"]
    assert kept.startswith("line of output")
    assert path in kept
    assert len(encode(spilled.message)) < 20_000
    assert reattach(spilled.message, spilled.files) == message


def test_images_and_documents_stay_in_the_line():
    inner = [text_block("seen"), image_block(PICTURE, mime_type="image/png")]
    message = build_message(
        "user",
        [
            text_block("look"),
            image_block(PICTURE, mime_type="image/png", name="a.png"),
            document_block(PICTURE, mime_type="application/pdf"),
            tool_result_block(tool_use_id="a", model_text="x", content=inner),
        ],
    )
    assert len(encode(message)) > TEXT_LIMIT
    spilled = detach(message)
    assert spilled.message is message
    assert spilled.files == {}


def stand_in(data: bytes, encoding: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A block of a log that was written when large images went to `blobs/`, and the file it refers to."""
    digest = hashlib.sha256(data).hexdigest()
    path = f"blobs/{digest}"
    block = {"type": "image", "mime_type": "image/png", "name": "a.png"}
    blob = {"path": path, "bytes": len(data), "sha256": digest, "encoding": encoding, "block": block}
    text = f"[image a.png, image/png, {len(data):,} bytes, kept in {path}]"
    return text_block(text, meta={"blob": blob}), {path: data}


@pytest.mark.parametrize("encoding", ["base64", "text"])
def test_an_image_that_an_older_carrel_put_into_a_file_comes_back(encoding: str):
    data = base64.b64decode(PICTURE) if encoding == "base64" else PICTURE.encode()
    block, files = stand_in(data, encoding)
    image = image_block(PICTURE, mime_type="image/png", name="a.png")
    for content, whole in (
        ([text_block("look"), block], [text_block("look"), image]),
        (
            [tool_result_block(tool_use_id="a", model_text="x", content=[block])],
            [tool_result_block(tool_use_id="a", model_text="x", content=[image])],
        ),
    ):
        message = {MARK: 1, **build_message("user", content)}
        assert paths_of(message) == list(files)
        assert reattach(message, files) == build_message("user", whole)


def test_small_things_stay_where_they_are():
    message = build_message("user", [tool_result_block(tool_use_id="a", model_text="short")])
    assert detach(message).message is message
    assert not (len(encode(message)) > TEXT_LIMIT)


def test_a_file_that_is_gone_leaves_the_preview():
    message = detach(build_message("user", [tool_result_block(tool_use_id="a", model_text=LONG)])).message
    assert reattach(message, {}) == message


def test_a_reference_that_points_elsewhere_is_not_followed():
    block = {"type": "text", "text": "x", "meta": {"blob": {"path": "../../secret", "block": {}}}}
    assert paths_of(build_message("user", [block])) == []


sizes = st.sampled_from([10, 60_000])
text = st.builds(lambda n, c: c * n, sizes, st.sampled_from("aé😀\ud800"))
blocks: Any = st.one_of(
    st.builds(lambda t: text_block(t), text),
    st.builds(
        lambda t, m: tool_result_block(tool_use_id="a", model_text=t, meta=m), text, st.sampled_from([None, {"k": 1}])
    ),
    st.builds(lambda n: image_block(base64.b64encode(b"x" * n).decode(), mime_type="image/png"), sizes),
    st.just({"type": "unknown", "data": 5}),
)


@given(st.lists(blocks, max_size=3))
def test_spilling_loses_nothing(content: list[Any]):
    message = build_message("user", content)
    spilled = detach(message)
    assert (MARK in spilled.message) == bool(spilled.files)
    assert bool(spilled.files) <= (len(encode(message)) > TEXT_LIMIT)
    assert reattach(spilled.message, spilled.files) == message
