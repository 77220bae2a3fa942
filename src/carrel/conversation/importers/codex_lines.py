"""Pure: the kinds of line in a Codex rollout that carry no conversation, and why."""

_REPEATS = "repeats what a response item says"
_TURN = "marks where a turn starts or ends"
_DONE = "how a tool call went; its result is a response item"
_NOTICE = "a notice of the program"
_SETTING = "the settings of a turn; the model is kept with each answer"
_ASKED = "what the program asked its user; the answer is a response item"
_SPOKEN = "figures of a spoken conversation"
_COLLAB = ("agent_spawn", "agent_interaction", "waiting", "close", "resume")
_AGENTS = "what other agents did; each has a file of its own"

EVENTS = {
    "user_message": _REPEATS,
    "injected_message": _REPEATS,
    "agent_message": _REPEATS,
    "agent_reasoning": _REPEATS,
    "agent_reasoning_raw_content": _REPEATS,
    "agent_reasoning_section_break": _REPEATS,
    "item_completed": _REPEATS,
    "item_started": _REPEATS,
    "raw_response_item": _REPEATS,
    "raw_response_completed": _REPEATS,
    "agent_message_content_delta": _REPEATS,
    "plan_delta": _REPEATS,
    "reasoning_content_delta": _REPEATS,
    "reasoning_raw_content_delta": _REPEATS,
    "task_started": _TURN,
    "turn_started": _TURN,
    "task_complete": _TURN,
    "turn_complete": _TURN,
    "turn_aborted": _TURN,
    "entered_review_mode": _TURN,
    "exited_review_mode": _TURN,
    "turn_moderation_metadata": _TURN,
    "thread_goal_updated": _TURN,
    "thread_queue_changed": _TURN,
    "context_compacted": "a compaction has a line of its own",
    "thread_name_updated": "the session's name",
    "thread_settings_applied": _SETTING,
    "exec_command_begin": _DONE,
    "exec_command_end": _DONE,
    "exec_command_output_delta": _DONE,
    "patch_apply_begin": _DONE,
    "patch_apply_updated": _DONE,
    "patch_apply_end": _DONE,
    "terminal_interaction": _DONE,
    "hook_started": _DONE,
    "hook_completed": _DONE,
    "exec_approval_request": _ASKED,
    "apply_patch_approval_request": _ASKED,
    "request_permissions": _ASKED,
    "request_user_input": _ASKED,
    "elicitation_request": _ASKED,
    "elicitation_abandoned": _ASKED,
    "mcp_tool_call_begin": _DONE,
    "mcp_tool_call_end": _DONE,
    "web_search_begin": _DONE,
    "web_search_end": _DONE,
    "view_image_tool_call": _DONE,
    "image_generation_begin": _DONE,
    "image_generation_end": _DONE,
    "dynamic_tool_call_request": _DONE,
    "dynamic_tool_call_response": _DONE,
    "turn_diff": _DONE,
    "plan_update": _DONE,
    "undo_started": _NOTICE,
    "undo_completed": _NOTICE,
    "error": _NOTICE,
    "warning": _NOTICE,
    "stream_error": _NOTICE,
    "background_event": _NOTICE,
    "deprecation_notice": _NOTICE,
    "guardian_assessment": _NOTICE,
    "model_reroute": _NOTICE,
    "model_verification": _NOTICE,
    "auth_recovery_started": _NOTICE,
    "auth_recovery_completed": _NOTICE,
    "environment_connected": _NOTICE,
    "environment_disconnected": _NOTICE,
    "mcp_startup_update": _NOTICE,
    "mcp_startup_complete": _NOTICE,
    "realtime_conversation_started": _SPOKEN,
    "realtime_conversation_realtime": _SPOKEN,
    "realtime_conversation_closed": _SPOKEN,
    "realtime_conversation_sdp": _SPOKEN,
    "realtime_conversation_list_voices_response": _SPOKEN,
    "session_configured": _SETTING,
    "shutdown_complete": _NOTICE,
    "sub_agent_activity": _AGENTS,
    **{f"collab_{what}_{when}": _AGENTS for what in _COLLAB for when in ("begin", "end")},
}
ITEMS = {
    "ghost_snapshot": "a snapshot of the files, for undoing edits",
    "compaction": "a summary that only the provider can read",
    "compaction_summary": "a summary that only the provider can read",
    "context_compaction": "a summary that only the provider can read",
    "compaction_trigger": "asks the provider for a summary",
    "configuration_update": _SETTING,
    "additional_tools": "the tools that a model is told of later",
}
LINES = {
    "session_meta": "the header; what it says is kept as the session's",
    "turn_context": _SETTING,
    "world_state": "what the program knew of its surroundings",
    "token_usage_record": "figures; those of each answer are kept with it",
    "security_risk_score": _NOTICE,
    "retained_context": "what the program keeps for itself between turns",
    "inter_agent_communication_metadata": _AGENTS,
    "dynamic_tools_updated": "the tools of a turn",
    "realtime_item": _SPOKEN,
    "state": "a mark of the older form",
}
INSTRUCTIONS = "instructions that the program gave the model"
SEALED_LETTER = "what one agent wrote to another, which only the provider can read"
REPEATED_COUNT = "says again what was counted before, or belongs to no answer"
TURNED_BACK = "goes back by no turn that is in the file"

ENVELOPES = frozenset({*LINES, "response_item", "event_msg", "compacted", "inter_agent_communication"} - {"state"})
"""The types of line that wrap what they say in a `payload`."""

INJECTED_STARTS = (
    "<environment_context",
    "<user_instructions",
    "<permissions",
    "<turn_aborted",
    "<skill",
    "<subagent_notification",
    "<INSTRUCTIONS",
    "# AGENTS.md instructions",
)
