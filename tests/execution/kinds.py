"""The kinds of executor that the one suite is run on, and where they differ and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from carrel.execution.config import ContainerConfig, InProcessConfig, SubprocessConfig
from carrel.execution.container_executor import ContainerExecutor
from carrel.execution.executor import Executor, Handler
from carrel.execution.in_process import InProcessExecutor
from carrel.execution.subprocess_executor import SubprocessExecutor
from tests.support.real_docker import IMAGE

KINDS = ("in-process", "subprocess", "sandboxed", "container")

DIFFERENCES: dict[tuple[str, str], str] = {
    ("in-process", "survives the end of its process"): "its process is the host's own",
    (
        "in-process",
        "output below Python",
    ): "what child processes and C code write goes to the host's own output",
    ("in-process", "output of threads"): "Python does not say to which run a thread belongs",
    ("in-process", "warnings of its own"): "what is done with a warning is decided for the whole process",
    ("in-process", "works in its workspace"): "the current folder belongs to the whole process",
    ("in-process", "stops anything"): "a thread that does not come back from C cannot be stopped, only left behind",
    ("in-process", "only its own environment variables"): "they belong to the whole process",
    ("in-process", "the workspace stays as it was"): "there is nothing to keep changes apart",
    ("in-process", "ends what a stopped run has started"): "what code starts are children of the host, among others",
    ("in-process", "forks"): "a part of a process cannot be forked",
    ("subprocess", "forks"): "without a sandbox two sessions cannot have different files at the same path",
    ("in-process", "memory of its own"): "a bomb would take the host with it",
    ("in-process", "packages of its own"): "a process has one import path and one table of modules",
    ("subprocess", "a file system of its own"): "the sandbox is off",
    ("in-process", "a file system of its own"): "it is the host's",
    ("container", "forks"): "no engine makes a second container of one that runs, with its processes",
}
"""(kind, promise): why this kind does not give it. A test of that promise is not made for that kind."""


IN_CONTAINERS = frozenset(
    f"test_{name}"
    for name in [
        "the_value_of_the_last_expression",
        "a_long_list_arrives_whole",
        "reset_forgets_the_variables",
        "output_of_children_and_of_descriptors_comes_in_order",
        "several_runs_at_once_queue_up_in_order",
        "calls_in_parallel",
        "a_call_is_cancelled_with_its_run",
        "a_handler_can_write_into_the_run_that_called",
        "what_the_command_wrote_and_how_it_ended",
        "an_interrupt_ends_the_command_and_keeps_the_variables",
        "a_command_has_output_and_an_exit_code",
        "a_command_that_waits_holds_up_neither_commands_nor_files",
        "a_run_holds_up_neither_commands_nor_files",
        "closing_ends_a_running_command_at_once",
        "input_of_any_size",
        "a_large_file_goes_both_ways",
        "a_command_that_cannot_be_started_raises_what_subprocess_raises",
        "errors_about_kinds_of_files",
        "root_where_there_is_one",
        "input_environment_and_folder_of_a_command",
        "what_a_command_writes_comes_as_it_is_written",
        "time_is_up_for_the_command_and_all_it_started",
        "what_stays_in_the_background_does_not_hold_up_the_answer",
        "what_a_command_left_running_is_listed_and_can_be_ended",
        "a_command_that_stops_all_processes_ends_when_its_time_is_up",
        "a_command_that_stops_all_processes_for_ever_ends_when_its_time_is_up",
        "a_snapshot_that_the_code_has_stopped_is_continued",
        "cancelling_the_caller_ends_the_command",
        "files_are_written_read_and_listed",
        "changes_are_compared_with_the_start",
        "an_overlay_leaves_the_folder_as_it_was",
        "a_change_that_sets_size_and_time_back_is_found_too",
        "rw_changes_the_folder_itself",
        "after_close_they_say_so",
        "nothing_of_the_hosts_environment_is_inside",
        "code_longer_than_a_record",
        "pieces_come_while_the_code_runs",
        "answers_without_a_waiting_caller_are_not_logged",
        "a_slow_reader_gets_everything",
        "leaving_the_stream_stops_the_code",
        "a_background_process_that_writes_during_the_next_run_is_not_in_it",
        "output_is_whole_after_a_crash",
        "a_timeout_interrupts_and_keeps_the_variables",
        "code_that_will_not_stop_is_killed_and_the_variables_are_restored",
        "an_interrupt_is_not_lost_when_the_code_has_only_just_begun",
        "cancelling_the_caller_stops_the_code",
        "close_during_a_run_ends_it_with_a_result",
        "close_while_it_starts",
        "a_crash_costs_the_run_and_not_the_session",
        "where_no_snapshot_could_be_kept_the_result_says_lost_and_why",
        "killing_its_own_parent",
        "ending_all_programs_called_python_ends_none_of_the_sessions_own",
        "a_package_is_importable_at_once_and_gone_when_it_is_removed",
        "commands_have_it_too",
        "a_handler_may_install_for_the_run_that_called_it",
        "requirements_of_the_settings_are_there_from_the_start",
        "packages_of_a_base_are_there_for_its_next_session_and_for_no_other",
        "where_it_cannot_fork_it_says_so_and_goes_on",
    ]
)
"""What depends on how a container is connected. The rest is the worker's and the installer's own, the same programs
as in the subprocess: it is tried in containers too, each of which takes half a second, but by `make soak`."""


def make(kind: str, handlers: dict[str, Handler] | None = None, **settings: Any) -> Executor:
    """An executor of this kind; settings that only the other kind knows are not for it."""
    if kind == "in-process":
        known = {name: value for name, value in settings.items() if name in InProcessConfig.__dataclass_fields__}
        return InProcessExecutor(InProcessConfig(**known), handlers=handlers)
    if kind == "container":
        known = {name: value for name, value in settings.items() if name in ContainerConfig.__dataclass_fields__}
        return ContainerExecutor(ContainerConfig(**{"image": IMAGE, **known}), handlers=handlers)
    mode = "off" if kind == "subprocess" else "required"
    return SubprocessExecutor(SubprocessConfig(**{"sandbox": mode, **settings}), handlers=handlers)


def files_below(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
