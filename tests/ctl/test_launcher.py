"""exec and run, driven as a shell drives them: exit codes, signals, terminals."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUPERVISE = """
import os, sys
from client_hook.errors import CannotStart
from client_hook.launcher import Supervision
try:
    with Supervision() as supervision:
        code = supervision.run(sys.argv[1:], os.environ)
except CannotStart as error:
    print(error.message, file=sys.stderr)
    code = error.exit_code
print("removed", file=sys.stderr, flush=True)
sys.exit(code)
"""
REPLACE = """
import os, sys
from client_hook.errors import CannotStart
from client_hook.launcher import replace_process
try:
    replace_process(sys.argv[1:], os.environ | {"MARK": "set"})
except CannotStart as error:
    print(error.message, file=sys.stderr)
    sys.exit(error.exit_code)
"""
HEARS = """
import signal
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
"""
"""Under nohup, or in the background of a script, a shell starts everything with these ignored."""
BOTH = pytest.mark.parametrize("launcher", [SUPERVISE, REPLACE], ids=["run", "exec"])


def launch(launcher: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", launcher, *argv], cwd=ROOT, capture_output=True, text=True)


@contextmanager
def session(launcher: str, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a session of its own, of which nothing is left after a test that failed."""
    command, pipe = [sys.executable, "-c", HEARS + launcher, *argv], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@BOTH
def test_the_exit_code_is_the_programs(launcher: str) -> None:
    assert launch(launcher, "sh", "-c", "exit 7").returncode == 7


@BOTH
def test_a_program_that_is_not_there_is_127(launcher: str) -> None:
    done = launch(launcher, "no-such-program-here")
    assert done.returncode == 127
    assert "no-such-program-here: no such program" in done.stderr


@BOTH
def test_a_file_that_is_no_program_is_126(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("data")
    assert launch(launcher, str(tmp_path / "data")).returncode == 126


@BOTH
def test_a_program_dies_of_a_closed_pipe_as_it_would_from_a_shell(launcher: str) -> None:
    with session(launcher, "yes") as process:
        assert process.stdout is not None
        process.stdout.read(2)
        process.stdout.close()
        code = process.wait(30)
    # exec: whoever waits sees the signal itself; run reports it as 128 + n.
    assert code == (-signal.SIGPIPE if launcher is REPLACE else 128 + signal.SIGPIPE)


def test_exec_passes_the_environment_and_keeps_the_pid() -> None:
    with session(REPLACE, "sh", "-c", "echo $$ $MARK") as process:
        told, _ = process.communicate()
    assert told.split() == [str(process.pid), "set"]


def test_a_program_that_a_signal_ended_is_128_plus_n_and_cleaned_up_after() -> None:
    done = launch(SUPERVISE, "sh", "-c", "kill -KILL $$")
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr == "removed\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT])
def test_a_signal_sent_to_the_launcher_reaches_the_program(number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.01; done"
    with session(SUPERVISE, "bash", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        told, said = process.communicate(timeout=30)
    assert (told, said, process.returncode) == (f"got {name}\n", "removed\n", 9)


COUNT_INTERRUPTS = """
import os, signal, sys, time
count = 0
def interrupted(*_):
    global count
    count += 1
    os.write(1, b"interrupts %d\\n" % count)  # print, inside the print that it interrupts, is an error
signal.signal(signal.SIGINT, interrupted)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(count))
print("ready", flush=True)
while True:
    time.sleep(0.05)  # a signal that comes just before signal.pause() would wait for the next one
"""


def test_ctrl_c_in_a_terminal_arrives_once() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", SUPERVISE, sys.executable, "-c", COUNT_INTERRUPTS])
    with os.fdopen(terminal, "r+b", buffering=0) as console:
        said = b""

        def until(word: bytes) -> None:
            nonlocal said
            while word not in said:
                try:
                    said += console.read(1024)
                except OSError as error:  # the program's side of the terminal is closed
                    raise AssertionError(f"{word!r} did not come, but {said!r}") from error

        until(b"ready")
        console.write(b"\x03")
        until(b"interrupts 1")
        # Had the launcher passed the terminal's signal on, it would come before this one.
        os.kill(pid, signal.SIGTERM)
        until(b"removed")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # before the terminal hangs up
    assert code == 1


def test_a_signal_before_the_program_runs_is_held_for_it() -> None:
    script = SUPERVISE.replace("        code =", "        os.kill(os.getpid(), 15)\n        code =")
    done = launch(script, "sleep", "1000")
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == "removed\n"
