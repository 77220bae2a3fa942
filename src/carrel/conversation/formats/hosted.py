"""Pure: tools that OpenAI defines and we run: their calls and outputs, which are items that only OpenAI understands."""

from carrel.conversation.formats.turns import Converted, Piece, Turn, as_text

_KINDS = ("computer_call", "local_shell_call", "shell_call", "apply_patch_call")


def settle_hosted(turns: list[Turn], report: Converted) -> None:
    """Take out calls that were never answered, or name them when the answers are still to come; and answers to none."""
    pieces = [piece for turn in turns for piece in turn.pieces]
    asked, answered = ({_id_of(piece, suffix) for piece in pieces} - {""} for suffix in ("", "_output"))
    for turn in turns:
        for piece in list(turn.pieces):
            call, answer = _id_of(piece, ""), _id_of(piece, "_output")
            if call and call not in answered and turn is turns[-1]:
                report.unanswered.append(call)
            elif (call and call not in answered) or (answer and answer not in asked):
                report.drop(piece.at, "native", "a call without its output, or the other way round, is refused")
                turn.pieces.remove(piece)


def _id_of(piece: Piece, suffix: str) -> str:
    """The id by which a call and its output know each other; empty for anything else."""
    value = piece.block["value"] if piece.kind == "native" else {}
    if as_text(value.get("type")) not in [f"{kind}{suffix}" for kind in _KINDS]:
        return ""
    return as_text(value.get("call_id") or value.get("id"))
