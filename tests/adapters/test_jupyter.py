"""The kernel `carrel` against Jupyter's own tests of kernels, and its session across restarts."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.frameworks import require

require("jupyter_kernel_test")

import jupyter_kernel_test
from jupyter_client.manager import KernelManager, start_new_kernel

pytestmark = pytest.mark.real

EXCEPTIONS = {
    "test_pager": "code in a session has no pager: `help(…)` prints",
    "test_clear_output": "code in a session cannot clear what it has printed",
}
"""Optional tests in jupyter_kernel_test/__init__.py that are skipped because their samples are not given."""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the kernel, as a user does, for this module only."""
    data, base = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(data))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(data / "runtime"))
        command = [sys.executable, "-m", "carrel.adapters.jupyter", "install", "--base", str(base)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0, done.stderr
        assert str(data / "kernels" / "carrel") in done.stdout
        yield


TABLE = "class Table:\n    def _repr_html_(self):\n        return '<table></table>'\nTable()"
IMAGE = "class Image:\n    def _repr_png_(self):\n        return b'\\x89PNG'\nImage()"


class TestKernel(jupyter_kernel_test.KernelTests):
    kernel_name = "carrel"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [  # noqa: RUF012
        {"text": "zi", "matches": {"zip"}},
        {"text": "'x'; sys.stdo"},
        {"text": "impo", "matches": {"import"}},
    ]
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n", "await x"]  # noqa: RUF012
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2", "for x in y:"]  # noqa: RUF012
    invalid_code_samples = ["import = 7q", "1 +* 2"]  # noqa: RUF012
    code_generate_error = "raise Exception('mine')"
    code_execute_result = [  # noqa: RUF012
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
        {"code": "'text'", "result": "'text'"},
        {"code": "type(1)", "result": "<class 'int'>"},
        {"code": TABLE, "mime": "text/html"},
    ]
    code_display_data = [  # noqa: RUF012
        {"code": IMAGE, "mime": "image/png"}
    ]
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "range", "search")
    code_inspect_sample = "zip"


class TestWelcome(jupyter_kernel_test.IopubWelcomeTests):
    kernel_name = "carrel"
    support_iopub_welcome = True


def test_only_the_listed_tests_have_no_samples() -> None:
    suite = jupyter_kernel_test.KernelTests
    needed = {"test_pager": "code_page_something", "test_clear_output": "code_clear_output"}
    assert needed.keys() == EXCEPTIONS.keys()
    left_out = [name for name in vars(suite) if name.startswith("code_") and not getattr(TestKernel, name)]
    assert sorted(left_out) == sorted(needed.values())


def run(client: Any, code: str, timeout: float = 60) -> tuple[str, str]:
    """Run a cell; return the state and all text that it gave."""
    texts: list[str] = []

    def note(message: dict[str, Any]) -> None:
        content = message["content"]
        texts.append(
            content.get("text", "") or content.get("data", {}).get("text/plain", "") or content.get("ename", "")
        )

    reply = client.execute_interactive(code, timeout=timeout, output_hook=note)
    return reply["content"]["status"], "".join(texts)


@pytest.fixture
def kernel() -> Iterator[tuple[KernelManager, Any]]:
    manager, client = start_new_kernel(kernel_name="carrel", startup_timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_variables_and_files_survive_a_restart_of_the_kernel(kernel: tuple[KernelManager, Any]) -> None:
    manager, client = kernel
    assert run(client, "x = [1, 2]\nopen('kept.txt', 'w').write('here')") == ("ok", "4")
    manager.restart_kernel()
    client.wait_for_ready(timeout=60)
    status, text = run(client, "x, open('kept.txt').read()")
    assert (status, text.startswith("([1, 2], 'here')")) == ("ok", True)


def test_variables_survive_a_kernel_that_was_killed(kernel: tuple[KernelManager, Any]) -> None:
    manager, client = kernel
    run(client, "x = 5")
    time.sleep(3)  # they are saved about a second after a cell
    manager.restart_kernel(now=True)
    client.wait_for_ready(timeout=60)
    assert run(client, "x + 1")[1].startswith("6")


def test_a_cell_is_interrupted_and_the_variables_stay(kernel: tuple[KernelManager, Any]) -> None:
    manager, client = kernel
    run(client, "y = 1")
    client.execute("print('begun', flush=True)\nimport time\ntime.sleep(300)")
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream":
            break
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=60)["content"]["ename"] == "KeyboardInterrupt"
    assert run(client, "y") == ("ok", "1")


def test_code_in_cells_cannot_see_the_files_of_the_user(kernel: tuple[KernelManager, Any], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert run(kernel[1], f"open({str(tmp_path / 'secret')!r})") == ("error", "FileNotFoundError")
