"""Exports are complete and in order, and nothing in a conversation can act on their readers."""

import base64
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from carrel.conversation.export import to_line
from carrel.conversation.export.html_page import LONGEST_MARKDOWN, markdown_to_html, page_of, to_html
from carrel.conversation.export.markdown import to_markdown
from carrel.conversation.log_entries import build_compact_event, build_note, build_rewind_event
from carrel.conversation.messages import (
    SessionData,
    assistant_message,
    build_message,
    document_block,
    image_block,
    text_block,
    thinking_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)
from carrel.conversation.replay import Numbered
from tests.support.missing_parts import skip_without

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
ATTACK = """"'><script>document.documentElement.setAttribute("data-ran", "yes")</script>\
<img src=x onerror='document.documentElement.setAttribute("data-ran", "yes")'>\
<svg onload='document.documentElement.setAttribute("data-ran", "yes")'></svg>\
</textarea></title></style></pre></details>-->]]>{{ 7 * 6 }}{% raw %}"""
MAY_STAND = {
    *("html", "head", "meta", "link", "title", "style", "body", "div", "header", "main", "article", "footer", "span"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "p", "pre", "code", "em", "strong", "b", "s", "blockquote", "hr", "br", "a"),
    *("dl", "dt", "dd", "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "time", "details", "summary"),
    *("figure", "img", "figcaption"),
}
ACTING = "\x00\x07\x08\x1b\x7f\x9b\u202e\u2066\u2069\u2028\U000e0041\ud800"


def session(**more: Any) -> Any:
    return {"id": "s1", "title": "A walk", "model": "m-1", "provider": "p", "cwd": "/home/ada"} | more


def data(*messages: dict[str, Any], **more: Any) -> SessionData:
    return {"session": session(**more), "messages": list(messages)}


def numbered(*entries: dict[str, Any]) -> list[Numbered]:
    return list(enumerate(entries, 1))


class Seen(HTMLParser):
    """The tags, attributes and text that a browser would see."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "hr", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self.open), data))

    def text_in(self, tag: str) -> str:
        return "\n".join(text for path, text in self.texts if tag in path and "style" not in path)


def assert_inert(page: str) -> None:
    seen = Seen(page)
    assert {tag for tag, _ in seen.tags} <= MAY_STAND
    for tag, attributes in seen.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        source, link = attributes.get("src"), attributes.get("href")
        assert source is None or (tag == "img" and source.startswith("data:image/"))
        assert link is None or link.startswith(("http://", "https://", "mailto:", "#", "data:"))
        if link is not None and link.startswith("data:") and tag == "a":
            assert "download" in attributes
    assert not set(page) & set(ACTING)


# The content of a page


def test_a_page_shows_messages_with_speaker_and_time() -> None:
    question = user_text_message("Where is the *key*?", meta={"created_at": "2025-03-04T10:02:00+01:00"})
    answer = assistant_message([text_block("Under the mat.")], model="m-2", usage={"input_tokens": 1200})
    page = to_html(data(question, answer, created_at="2025-03-04T09:02:00+00:00", total_tokens=4321, tags=["home"]))
    seen = Seen(page)
    body = seen.text_in("body")
    assert page.count("<article") == 2
    for words in (
        "A walk",
        "4 Mar 2025, 09:02 UTC",
        "4 March 2025",
        "09:02",
        "4,321",
        "home",
        "/home/ada",
        "m-2 · 1,200 in",
    ):
        assert words in body
    assert ("key", "em") in [(text, path[-1]) for path, text in seen.texts if path]
    assert body.index("Where is") < body.index("Under the mat.")


def test_thinking_is_folded_away() -> None:
    page = to_html(data(assistant_message([thinking_block("Hmm, the mat."), text_block("The mat.")])))
    assert "Hmm, the mat." in Seen(page).text_in("details")
    assert "open" not in dict(next(attributes for tag, attributes in Seen(page).tags if tag == "details"))


def test_a_tool_call_is_shown_with_input_and_result_and_errors_are_marked() -> None:
    calls = assistant_message(
        [
            tool_use_block(tool_id="a", name="read", input={"path": "x.py", "lines": [1, 2]}),
            tool_use_block(tool_id="b", name="run", input={"command": "false"}),
            tool_use_block(tool_id="c", name="wait"),
        ]
    )
    results = build_message(
        "user",
        [
            tool_result_block(tool_use_id="a", model_text="all of it", display_text="2 lines"),
            tool_result_block(tool_use_id="b", model_text="exit 1", is_error=True),
        ],
    )
    page = to_html(data(calls, results))
    folded = Seen(page).text_in("details")
    for words in ("x.py", "1,\n  2", "2 lines", "Text for the model", "all of it", "exit 1", "no result"):
        assert words in folded
    assert page.count("<article") == 1, "results are shown with their calls and not as a message of the user"
    assert [page.count(f'class="call {state}"') for state in ("ok", "error", "no-result")] == [1, 1, 1]


def test_a_reused_call_id_has_its_own_result() -> None:
    def turn(text: str) -> list[dict[str, Any]]:
        return [
            assistant_message([tool_use_block(tool_id="call_0", name=f"ask_{text}")]),
            build_message("user", [tool_result_block(tool_use_id="call_0", model_text=f"answer {text}")]),
        ]

    page = to_html(data(*turn("one"), *turn("two")))
    first, second = page.split("ask_two")
    assert "answer one" in first
    assert "answer two" not in first
    assert "answer two" in second


def test_a_late_result_replaces_its_placeholder() -> None:
    placeholder = tool_result_block(tool_use_id="a", model_text="interrupted", is_error=True, meta={"synthetic": True})
    late = tool_result_block(tool_use_id="a", model_text="here after all")
    call = assistant_message([tool_use_block(tool_id="a", name="read")])
    page = to_html(data(call, build_message("user", [placeholder]), build_message("user", [late])))
    assert "here after all" in page
    assert 'class="call ok"' in page


def test_images_are_shown_and_documents_can_be_saved() -> None:
    csv = base64.b64encode(b"a,b\n").decode()
    message = build_message(
        "user",
        [
            image_block(PIXEL, mime_type="image/png", name="dot.png"),
            document_block(csv, mime_type="text/csv", name="t.csv"),
            document_block(csv, mime_type="text/html", name="evil.html"),
            image_block(csv, mime_type="text/html", name="no-image"),
            image_block("$$$", mime_type="image/png", name="broken.png"),
        ],
    )
    seen = Seen(to_html(data(message)))
    assert [attributes["src"] for tag, attributes in seen.tags if tag == "img"] == [f"data:image/png;base64,{PIXEL}"]
    links = {attributes["download"]: attributes["href"] for tag, attributes in seen.tags if "download" in attributes}
    assert links == {
        "t.csv": f"data:text/csv;base64,{csv}",
        "evil.html": f"data:application/octet-stream;base64,{csv}",
        "no-image": f"data:application/octet-stream;base64,{csv}",
    }
    assert "image, its data cannot be read" in seen.text_in("body")


def test_rewound_messages_are_folded_and_the_rewind_is_marked() -> None:
    log = numbered(
        user_text_message("stays"),
        user_text_message("goes"),
        user_text_message("goes too"),
        build_rewind_event(1),
        user_text_message("new way"),
    )
    page = to_html(data(log[0][1], log[4][1]), log)
    folded = Seen(page).text_in("details")
    assert "2 messages set aside by a rewind" in folded
    assert "goes too" in folded
    assert "stays" not in folded
    assert "new way" not in folded
    assert "Rewound to 1 message" in page


def test_messages_replaced_by_a_summary_are_still_shown() -> None:
    log = numbered(
        user_text_message("old words"),
        user_text_message("undone"),
        build_rewind_event(1),
        build_compact_event("It was **long**.", provider="p", model="m", compacted_count=1),
        user_text_message("new words"),
    )
    page = to_html(data(log[4][1]), log)
    folded = Seen(page).text_in("details")
    assert "old words" in page
    assert "old words" not in folded
    assert "undone" in folded
    assert "1 message became a summary" in folded
    assert "<strong>long</strong>" in page


def test_rewinding_a_summary_restores_the_original_messages() -> None:
    log = numbered(
        user_text_message("first"),
        build_compact_event("short", provider="p", model="m", compacted_count=1),
        user_text_message("after the summary"),
        build_rewind_event(0, to_seq=1),
    )
    folded = Seen(to_html(data(log[0][1]), log)).text_in("details")
    assert "first" not in folded
    assert "after the summary" in folded


def test_without_the_log_a_summary_is_a_mark_and_not_a_user_message() -> None:
    summary = user_text_message("[Conversation Summary]\n\nShort.", meta={"synthetic": True})
    acknowledgement = assistant_message([text_block("Understood.")])
    acknowledgement["meta"] = {"synthetic": True}
    page = to_html(data(summary, acknowledgement, user_text_message("go on")))
    assert page.count("<article") == 1
    assert "Summary of earlier messages" in page


def test_labels_pins_and_forks_are_marked() -> None:
    log = numbered(
        user_text_message("one"),
        assistant_message([tool_use_block(tool_id="a", name="read")]),
        build_message("user", [tool_result_block(tool_use_id="a", model_text="x")]),
        build_note("label", text="after reading", at_seq=3),
        build_note("pin", at_seq=1),
        build_note("fork", parent_session_id="s0", at_seq=5),
        build_note("meta", set={"title": "unseen"}),
    )
    page = to_html(data(), log)
    assert '<a class="flag" href="#entry-2">after reading</a>' in page
    assert 'id="entry-2"' in page
    assert "pinned" in Seen(page).text_in("article")
    assert "Forked here; everything above comes from s0" in page
    assert "unseen" not in page


def test_unreadable_lines_are_reported() -> None:
    broken = {"role": "unreadable", "meta": {"line": 2, "reason": "no JSON"}}
    page = to_html(
        {"session": session(), "messages": [], "problems": ["line 2 is left out"]},
        numbered(user_text_message("x"), broken),
    )
    assert "line 2 is left out" in page
    assert "Line 2 could not be read: no JSON" in page


def test_an_unknown_role_or_block_is_shown_as_it_is() -> None:
    page = to_html(data(build_message("developer", [{"type": "hologram", "x": 1}, text_block("hi")])))
    assert "developer" in page
    assert "hologram" in page


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": "plain"},
        {"role": "user", "content": [None, 3, {"type": None}, {"type": "text"}, {"type": "text", "text": 7}]},
        {"role": "assistant", "content": [{"type": "tool_use", "input": "text"}, {"type": "tool_result"}]},
        {"role": "user", "content": [{"type": "tool_result", "content": "old form"}, {"type": "image"}]},
        {"role": 5, "content": [], "meta": []},
        {"role": "user", "content": [], "meta": {"created_at": "0001-01-01T00:00:00+10:00", "usage": 3}},
        {"role": "compact", "meta": {"compacted_count": "many"}},
        {"role": "rewind", "meta": {"rewind_to": "x", "to_seq": -1}},
    ],
)
def test_odd_entries_do_not_break_an_export(message: dict[str, Any]) -> None:
    assert_inert(to_html(data(message)))
    assert_inert(to_html(data(), numbered(message, user_text_message("after"))))
    assert to_markdown(data(message)).startswith("# A walk")


@pytest.mark.parametrize(("forked_at", "name"), [(None, "Part of"), (5, "Forked from")])
def test_the_parent_of_a_session_is_named(forked_at: int | None, name: str) -> None:
    facts = Seen(to_html(data(parent_session_id="s0", forked_at_seq=forked_at))).texts
    assert [text for path, text in facts if path[-1:] in (("dt",), ("dd",)) and text in (name, "s0")] == [name, "s0"]


def test_an_empty_session_has_a_page() -> None:
    assert "No messages yet." in to_html({"session": {}, "messages": []})


# Hostile content


def hostile() -> tuple[SessionData, list[Numbered]]:
    """A session in which every text is an attack."""
    blocks = [
        text_block(ATTACK + "\n\n```" + ATTACK + "\n" + ATTACK + "\n```\n"),
        text_block(
            "[a](javascript:document.documentElement.setAttribute('data-ran','yes')) ![b](https://spy.example/x.png)"
        ),
        text_block("<https://x.example> [c](data:text/html,<script>1</script>) [d](vbscript:x) [e](/etc) &#x202e;"),
        thinking_block(ATTACK),
        image_block(PIXEL, mime_type=f'image/png" onerror="{ATTACK}', name=ATTACK),
        image_block(PIXEL, mime_type="image/png", name=ATTACK),
        image_block(ATTACK, mime_type="image/png"),
        document_block(PIXEL, mime_type="text/html", name=ATTACK),
        tool_use_block(tool_id=ATTACK, name=ATTACK, input={ATTACK: ATTACK, "n": {ATTACK: [ATTACK]}}),
        tool_result_block(tool_use_id="unknown", model_text=ATTACK, display_text=ATTACK + "x", is_error=True),
        {"type": ATTACK, ATTACK: ATTACK},
    ]
    answer = tool_result_block(
        tool_use_id=ATTACK, model_text=ATTACK, display_text="shown", content=[text_block(ATTACK), *blocks[4:8]]
    )
    log = numbered(
        build_message(
            "assistant", blocks, meta={"model": ATTACK, "created_at": ATTACK, "usage": {"input_tokens": ATTACK}}
        ),
        build_message("user", [answer]),
        build_message(ATTACK, [text_block(ACTING)]),
        build_note("label", text=ATTACK, at_seq=1),
        build_note("fork", parent_session_id=ATTACK),
        build_compact_event(ATTACK, provider=ATTACK, model=ATTACK, compacted_count=1),
        {"role": "unreadable", "meta": {"reason": ATTACK}},
        user_text_message(ACTING + ATTACK),
    )
    meta = dict.fromkeys(("id", "title", "model", "provider", "cwd", "created_at", "updated_at", "archived_at"), ATTACK)
    full: Any = {"session": {**meta, "tags": [ATTACK], "parent_session_id": ATTACK}, "messages": [e for _, e in log]}
    return full | {"problems": [ATTACK]}, log


def test_hostile_content_stays_text() -> None:
    full, log = hostile()
    for page in (to_html(full, log), to_html(full)):
        assert_inert(page)
        assert "42" not in Seen(page).text_in("h1"), "nothing in a conversation is a template"
        assert "spy.example" in page
        assert page.count("data-ran") > 20


def test_the_page_forbids_everything_but_its_style_and_its_images() -> None:
    policy = next(
        attributes["content"]
        for tag, attributes in Seen(to_html(data())).tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@example("", ["[", "](", ")"])
@example("", ["![", "](", ")"])
@given(st.text(), st.lists(st.sampled_from([*"<>&\"'`*_[]()!|#-\n\\ ", "javascript:", "](", "<a", "&#x202e;", "://"])))
def test_no_text_becomes_active_html(text: str, pieces: list[str]) -> None:
    page = markdown_to_html(text + "".join(pieces))
    assert_inert(page)


def test_a_very_long_text_is_shown_as_it_is() -> None:
    page = markdown_to_html("*" * (LONGEST_MARKDOWN + 1))
    assert page == f"<pre>{'*' * (LONGEST_MARKDOWN + 1)}</pre>"


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[str], str]:
    """The document of a page in a real browser after all scripts have run."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        skip_without("no Chromium on this machine: `apt install chromium`")

    def dump(page: str) -> str:
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        quiet = "headless no-sandbox disable-gpu no-first-run disable-sync disable-background-networking"
        return subprocess.run(
            [
                program,
                *(f"--{option}" for option in quiet.split()),
                "--disable-component-update",
                f"--user-data-dir={tmp_path / 'profile'}",
                "--virtual-time-budget=2000",
                "--dump-dom",
                (tmp_path / "page.html").as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout

    return dump


def test_a_browser_runs_nothing_of_a_hostile_conversation(browse: Callable[[str], str]) -> None:
    page = to_html(*hostile())
    without_policy = page.replace("Content-Security-Policy", "X-None")
    assert "data-ran" not in browse(page).split(">")[1]
    assert "data-ran" not in browse(without_policy).split(">")[1], "what is shown is harmless without the policy too"


def test_the_policy_alone_would_stop_a_script_and_the_test_above_would_see_one(browse: Callable[[str], str]) -> None:
    script = '<script>document.documentElement.setAttribute("data-ran", "yes")</script>'
    page = to_html(data()).replace("</body>", f"{script}</body>")
    assert "data-ran" not in browse(page).split(">")[1]
    assert 'data-ran="yes"' in browse(page.replace("Content-Security-Policy", "X-None")).split(">")[1]


# Markdown and JSON lines


def test_markdown_reads_like_the_conversation() -> None:
    text = to_markdown(
        data(
            user_text_message("Look at ```x```"),
            assistant_message([thinking_block("a\nb"), tool_use_block(tool_id="t", name="read", input={"p": "````"})]),
            build_message("user", [tool_result_block(tool_use_id="t", model_text="no", is_error=True)]),
            build_message("user", [image_block(PIXEL, mime_type="image/png", name="dot.png"), {"type": "new"}]),
        )
    )
    for piece in (
        "# A walk\n",
        "- Folder: /home/ada\n",
        "## User\n\n> Look at ```x```\n",
        "*Thinking:*\n\n> a\n> b\n",
        "**read** `t`\n\n`````json\n",
        "## Tool result\n\nerror from `t`\n\n```\nno\n```\n",
        f"![dot.png](data:image/png;base64,{PIXEL})",
        '"type": "new"',
    ):
        assert piece in text


SYNTAX = (
    "<!-- |--> |``` |~~~ |` |`` |\\\\|<script>|</div>|<div>|<b|![|](http://x/y.png)|[a]: http://x|# |## User|"
    "---|===|> |- |    |word|<http://a.b>|&#x202e;|<?|<![CDATA[|1. |User\\n---|\\n|\\n\\n| "
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["|", "|---|", *SYNTAX.replace("\\n", "\n").split("|")]), max_size=14).map("".join))
@example("User\n---\n---")
@example("<!--\n\n```\n")
@example("\u2028# A\r# B\x0b# C\x85# D\n# E")
def test_markdown_in_a_message_stays_in_its_quote(text: str) -> None:
    whole = to_markdown(data(user_text_message(f"{text}."), assistant_message([thinking_block(f"{text}.")])))
    tokens = MarkdownIt("commonmark").enable("table").parse(f"{whole}\n[a]")
    outside = [number for number, token in enumerate(tokens) if token.level == 0]
    headings = [tokens[number + 1].content for number in outside if tokens[number].type == "heading_open"]
    assert headings == ["A walk", "User", "Assistant"]
    quotes = [number for number in outside if tokens[number].type == "blockquote_open"]
    assert len(quotes) == 2
    assert {tokens[number].type for number in outside} <= {
        *("heading_open", "heading_close", "bullet_list_open", "bullet_list_close"),
        *("paragraph_open", "paragraph_close", "blockquote_open", "blockquote_close"),
    }


def test_markdown_of_a_message_is_quoted_unchanged() -> None:
    text = "Use `List<T>`, see <https://example.org/>:\n\n- one *two*\n\n```html\n<b>\n```\n\n# Next\n\n    <i>"
    quoted = "\n".join(f"> {line}".rstrip() for line in text.split("\n"))
    assert f"## User\n\n{quoted}\n" in to_markdown(data(user_text_message(text)))


def test_titles_and_names_are_escaped() -> None:
    session_data = data(assistant_message([tool_use_block(tool_id="t", name="read_file", input={})]))
    session_data["session"]["title"] = "![x](http://x/y.png) <b> _a_ snake_case"
    text = to_markdown(session_data)
    assert text.startswith("# !\\[x\\](http://x/y.png) \\<b\\> \\_a\\_ snake_case\n")
    assert "**read_file** `t`" in text


def test_markdown_contains_images_and_documents() -> None:
    def base64(raw: bytes) -> str:
        return b64encode(raw).decode()

    pdf, no_text = base64(b"%PDF-1.7"), base64(b"\xff\xfe")
    text = to_markdown(
        data(
            build_message(
                "user",
                [
                    document_block(base64("a,b\n1,ü\n".encode()), mime_type="text/csv", name="t[1].csv"),
                    document_block(base64(b'{"a": "```"}'), mime_type="application/json", name="a.json"),
                    document_block(no_text, mime_type="text/plain", name="no-text.txt"),
                    document_block(pdf, mime_type="application/pdf", name="p.pdf"),
                    image_block("$$$", mime_type="image/png", name="broken.png"),
                    tool_result_block(
                        tool_use_id="t",
                        model_text="a dot",
                        content=[image_block(PIXEL, mime_type="image/png", name="x](javascript:1)")],
                    ),
                ],
            )
        )
    )
    for piece in (
        "**t\\[1\\].csv** (text/csv, 9 bytes)\n\n```\na,b\n1,ü\n```\n",
        '**a.json** (application/json, 12 bytes)\n\n````\n{"a": "```"}\n````\n',
        f"[no-text.txt](data:text/plain;base64,{no_text}) (text/plain, 2 bytes)",
        f"[p.pdf](data:application/pdf;base64,{pdf}) (application/pdf, 8 bytes)",
        "*[broken.png: image, its data cannot be read]*",
        f"![x\\](javascript:1)](data:image/png;base64,{PIXEL})",
    ):
        assert piece in text


def test_json_lines_are_the_log_with_every_line_at_its_number() -> None:
    entries = [
        user_text_message("ü\n" + "\ud800"),
        {"role": "unreadable", "meta": {"line": 2, "reason": "no JSON"}},
        {"role": "other", "big": 10**30},
    ]
    lines = "".join(map(to_line, entries)).split("\n")
    assert len(lines) == 4
    assert lines[3] == ""
    kept = orjson.loads(lines[1])
    assert kept["role"] == "rewind"
    assert kept["meta"] == {"rewind_to": 2**53 - 1, "aside": "unreadable", "line": 2, "reason": "no JSON"}
    assert '"big":1000000000000000000000000000000' in lines[2]


def test_a_new_day_has_a_line_before_its_first_message() -> None:
    log = numbered(
        user_text_message("no time"),
        build_rewind_event(0, created_at="2026-03-01T10:00:00+00:00"),
        build_message("user", [text_block("later")], meta={"created_at": "2026-03-02T10:00:00+00:00"}),
    )
    session_data = data(created_at="2026-03-01T09:00:00+00:00")
    days = [item.text for item in page_of(session_data, log).items if item.kind == "day"]
    assert days == ["2 March 2026"]
    assert [item.kind for item in page_of(session_data, log[2:]).items] == ["day", "message"]


def test_provider_content_and_external_images_are_named() -> None:
    found = {"type": "native", "provider": "anthropic", "value": {"type": "search_result", "title": "Desks"}}
    ran = {"type": "native", "provider": "gemini", "value": {"executableCode": {"code": "1+1"}}}
    result = tool_result_block(tool_use_id="a", model_text="ok", content=[text_block("ok"), found])
    messages = [
        build_message("user", [{"type": "image", "url": "https://example.org/x.png"}, text_block("see")]),
        assistant_message([ran, tool_use_block(tool_id="a", name="look")]),
        build_message("user", [result]),
    ]
    page, markdown = to_html(data(*messages)), to_markdown(data(*messages))
    for words in (
        "executableCode (gemini)",
        "search_result (anthropic)",
        "Desks",
        "image at https://example.org/x.png",
    ):
        assert words in page
    assert "image at https://example.org/x.png" in markdown
    assert "Desks" in markdown


def test_an_image_in_url_safe_base64_is_shown() -> None:
    odd = b64encode(b"\xfb\xff\xfe").decode().replace("+", "-").replace("/", "_").rstrip("=")
    message = build_message("user", [image_block(odd, mime_type="image/png")])
    assert f"data:image/png;base64,{b64encode(bytes((0xFB, 0xFF, 0xFE))).decode()}" in to_markdown(data(message))


def test_messages_added_by_a_program_are_marked() -> None:
    message = user_text_message("<caveat>", meta={"source": {"kind": "claude-code", "injected": True}})
    assert "added by the program" in to_html(data(message))
    assert "added by the program" in to_markdown(data(message))
    assert "added by the program" not in to_html(data(user_text_message("hi", meta={"source": "elsewhere"})))
