"""What is too large for a line goes beside it and comes back whole."""

import base64
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from carrel.conversation.entries import encode
from carrel.conversation.messages import build_message, document_block, image_block, text_block, tool_result_block
from carrel.conversation.spill import MARK, may_spill, paths_of, restore, spill

LONG = "line of output\n" * 5000
PICTURE = base64.b64encode(bytes(range(256)) * 400).decode()


def test_a_long_tool_output_leaves_a_preview():
    message = build_message("user", [tool_result_block(tool_use_id="a", model_text=LONG)])
    spilled = spill(message)
    [path] = spilled.files
    assert path.startswith("tool-output/")
    assert path.endswith(".txt")
    assert spilled.files[path] == LONG.encode()
    kept = spilled.message["content"][0]["model_text"]
    assert kept.startswith("line of output")
    assert path in kept
    assert len(encode(spilled.message)) < 20_000
    assert restore(spilled.message, spilled.files) == message


def test_a_picture_is_text_to_other_readers():
    message = build_message("user", [text_block("look"), image_block(PICTURE, mime_type="image/png", name="a.png")])
    spilled = spill(message)
    [path] = spilled.files
    assert path.startswith("blobs/")
    assert spilled.files[path] == base64.b64decode(PICTURE)
    stand_in = spilled.message["content"][1]
    assert stand_in["type"] == "text"
    assert stand_in["text"] == f"[image a.png, image/png, 102,400 bytes, kept in {path}]"
    assert restore(spilled.message, spilled.files) == message


def test_the_same_picture_twice_is_stored_once():
    message = build_message(
        "user", [image_block(PICTURE, mime_type="image/png"), document_block(PICTURE, mime_type="x/y")]
    )
    assert len(spill(message).files) == 1
    assert restore(*spill(message)) == message


def test_a_picture_inside_a_tool_result():
    inner = [text_block("seen"), image_block(PICTURE, mime_type="image/png")]
    message = build_message("user", [tool_result_block(tool_use_id="a", model_text="x", content=inner)])
    assert restore(*spill(message)) == message
    assert paths_of(spill(message).message) == list(spill(message).files)


def test_small_things_stay_where_they_are():
    message = build_message("user", [tool_result_block(tool_use_id="a", model_text="short")])
    assert spill(message).message is message
    assert not may_spill(encode(message))


def test_base64_that_would_not_come_back_the_same_is_kept_as_text():
    odd = PICTURE[:1000] + "\n" + PICTURE[1000:]
    message = build_message("user", [image_block(odd, mime_type="image/png")])
    assert restore(*spill(message)) == message


def test_a_file_that_is_gone_leaves_the_preview():
    message = spill(build_message("user", [tool_result_block(tool_use_id="a", model_text=LONG)])).message
    assert restore(message, {}) == message


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
    spilled = spill(message)
    assert (MARK in spilled.message) == bool(spilled.files)
    assert bool(spilled.files) <= may_spill(encode(message))
    assert restore(spilled.message, spilled.files) == message
