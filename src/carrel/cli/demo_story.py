"""The conversations that `carrel demo` writes."""

from typing import Any

from carrel.conversation.messages import (
    ConversationMessage,
    assistant_message,
    build_message,
    text_block,
    thinking_block,
    tool_result_block,
    tool_use_block,
    user_text_message,
)

MODEL, PROVIDER = "demo-model", "demo"
STORY_ID = "demo-totals"


def _answers(*blocks: dict[str, Any], tokens: tuple[int, int]) -> ConversationMessage:
    usage = {"input_tokens": tokens[0], "output_tokens": tokens[1]}
    return assistant_message(list(blocks), provider=PROVIDER, model=MODEL, usage=usage)


STORY = [
    user_text_message("Since Monday `totals.csv` is one row short. Why? Please find out, and fix it."),
    _answers(
        thinking_block("One row short since Monday. Look at the script before guessing."),
        text_block("I'll read the script first."),
        tool_use_block(tool_id="call-1", name="read_file", input={"path": "reports/totals.py"}),
        tokens=(812, 64),
    ),
    build_message(
        "user",
        [
            tool_result_block(
                tool_use_id="call-1",
                model_text="rows = list(csv.reader(file))\nreturn [sum(map(int, row[1:])) for row in rows[1:-1]]\n",
            )
        ],
    ),
    _answers(
        text_block(
            "Found it. `rows[1:-1]` drops the header **and the last row**:\n\n"
            "| day | rows in the file | rows summed |\n|:--|--:|--:|\n"
            "| Friday | 412 | 412 |\n| Monday | 415 | 414 |\n\n"
            "Until Monday the file ended with a blank line, and that line was dropped. Now a real row is."
        ),
        tokens=(1_015, 131),
    ),
    user_text_message("Then skip blank rows instead, and run the tests."),
    _answers(
        text_block("Changing that one line, then the tests."),
        tool_use_block(
            tool_id="call-2",
            name="run_command",
            input={
                "command": "sed -i 's/rows\\[1:-1\\]/filter(any, rows[1:])/' reports/totals.py && pytest -q reports"
            },
        ),
        tokens=(1_190, 88),
    ),
]
CUT_SHORT = build_message("user", [tool_result_block(tool_use_id="call-2", model_text="10 passed in 0.21s")])
"""The message that is being written when the process is killed."""

ENDING = [
    user_text_message("You were interrupted. Run the tests again."),
    _answers(text_block("Done: all ten tests pass, and `totals.csv` has its last row back."), tokens=(1_302, 24)),
]

OTHERS = {
    "demo-bread": [
        user_text_message("My sourdough loaf is dense and flat. What went wrong?"),
        _answers(
            text_block("The dough had too little time to rise, or the starter was not ripe. Wait until it doubles."),
            tokens=(210, 40),
        ),
    ],
    "demo-query": [
        user_text_message("This SQL query takes eleven seconds. Can it be made quicker?"),
        _answers(
            text_block("It reads the whole table. An index on `orders(customer_id, placed_at)` brings it to 4 ms."),
            tokens=(340, 52),
        ),
    ],
    "demo-trip": [
        user_text_message("Plan three days in Lisbon by train and on foot."),
        _answers(
            text_block("Day one: Alfama and the castle. Day two: Sintra by train. Day three: Belém and the river."),
            tokens=(180, 61),
        ),
    ],
}
