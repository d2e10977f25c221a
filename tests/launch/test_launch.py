"""`replicax launch` on one machine: what workers get, how failures are told, and that nothing is left behind."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launching import HEAD, Launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def lines_of(text, worker):
    """What one worker has printed."""
    return re.findall(rf"^\[worker {worker}\] (.*)$", text, re.MULTILINE)


def test_each_worker_gets_its_task_its_arguments_and_no_input(tmp_path):
    program = """
    print(task, cluster, sys.argv[1:], repr(sys.stdin.read()))
    print("to the other stream", file=sys.stderr)
    """
    with Launch(tmp_path, "--workers 3", program, "--rate", "0.1", "--workers", "7") as launch:
        assert launch.wait() == 0, launch.output
    printed = [lines_of(launch.out, worker) for worker in range(3)]
    cluster = re.findall(r"127\.0\.0\.1:\d+", printed[0][0])
    assert len(set(cluster)) == 3
    for worker in range(3):
        assert printed[worker] == [f"{worker} {cluster} ['--rate', '0.1', '--workers', '7'] ''"]
        assert lines_of(launch.err, worker) == ["to the other stream"]


def test_a_module_is_run_with_m(tmp_path):
    # program.py is in the current folder, where `python -m` looks too; the file's name is its first argument here.
    with Launch(tmp_path, "--workers 1 -m program", "print(sys.argv[1:])") as launch:
        assert launch.wait() == 0, launch.output
    assert lines_of(launch.out, 0) == ["['program.py']"]


def test_workers_get_environment_variables_for_jax_on_cpu_by_default(tmp_path):
    program = "print([os.environ.get(n) for n in ('NPROC', 'GLIBC_TUNABLES', 'JAX_NUM_CPU_DEVICES')])"
    env = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4:glibc.malloc.trim_threshold=1", "NPROC": None}
    with Launch(tmp_path, "--workers 1 --devices-per-worker 40", program, env=env) as launch:
        assert launch.wait() == 0, launch.output
    large_pages = env["GLIBC_TUNABLES"] + ":glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296"
    assert lines_of(launch.out, 0) == [str([str(max(80, os.cpu_count() or 1)), large_pages, "40"])]
    with Launch(tmp_path, "--workers 1 --no-tuning", program, env=env) as launch:
        assert launch.wait() == 0, launch.output
    assert lines_of(launch.out, 0) == [f"[None, '{env['GLIBC_TUNABLES']}', None]"]


def test_lines_of_several_workers_are_never_torn(tmp_path):
    program = """
    for k in range(2000):
        for part in (f"line {k}", " of worker", f" {task}", os.linesep):
            os.write(1, part.encode())
    os.write(1, b"no end of line")
    """
    with Launch(tmp_path, "--workers 3", program) as launch:
        assert launch.wait() == 0, launch.output
    for worker in range(3):
        assert lines_of(launch.out, worker) == [
            *(f"line {k} of worker {worker}" for k in range(2000)),
            "no end of line",
        ]


def test_workers_may_end_one_after_the_other(tmp_path):
    program = """
    if task == 0:
        sys.exit(0)
    wait_for("go")
    print("still here")
    """
    with Launch(tmp_path, "--workers 2", program) as launch:
        launch.until(lambda: len(launch.processes()) == 3, "launcher, one guard, one worker")
        (launch.folder / "go").touch()
        assert launch.wait() == 0, launch.output
    assert lines_of(launch.out, 1) == ["still here"]


def test_the_worker_that_failed_first_is_told_with_its_traceback_and_step(tmp_path):
    program = """
    if task == 1:
        deep = "Traceback (most recent call last):\\n  deep\\nValueError: boom"
        report(message="ValueError: boom", traceback=deep, step=57)
        sys.exit(3)
    while not os.path.exists(os.path.join(os.environ["REPLICAX_REPORT_DIR"], "1.json")):
        time.sleep(0.01)
    if task == 0:  # it sees that worker 1 has gone
        report(kind="lost", message="worker 1 is lost", caused_by=1)
        sys.exit(70)
    for_ever()
    """
    with Launch(tmp_path, "--workers 3", program) as launch:
        assert launch.wait() == 3, launch.output
    assert launch.err.splitlines() == [
        "replicax launch: worker 1 failed first, at step 57: exit status 3",
        "    Traceback (most recent call last):",
        "      deep",
        "    ValueError: boom",
        "  worker 0: exit status 70, worker 1 is lost",
        "  worker 2: ended by the launcher (killed by SIGTERM)",
    ]


def test_without_a_report_the_traceback_on_standard_error_is_shown(tmp_path):
    program = """
    if task == 1:
        print("chatter", file=sys.stderr)
        raise ValueError("boom")
    for_ever()
    """
    with Launch(tmp_path, "--workers 2", program) as launch:
        assert launch.wait() == 1, launch.output
    told = launch.err[launch.err.index("replicax launch: ") :].splitlines()
    assert told[:3] == [
        "replicax launch: worker 1 failed first: exit status 1",
        "  The last lines of its standard error:",
        "    Traceback (most recent call last):",
    ]
    assert told[-2:] == ["    ValueError: boom", "  worker 0: ended by the launcher (killed by SIGTERM)"]


@pytest.mark.sampled(3, others="thorough")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_worker_that_a_signal_kills_is_told_by_the_signals_name(name, tmp_path):
    program = f"""
    if task == 0:
        os.kill(os.getpid(), signal.{name})
    for_ever()
    """
    with Launch(tmp_path, "--workers 2", program) as launch:
        assert launch.wait() == 128 + getattr(signal, name), launch.output
    assert f"worker 0 failed first: killed by {name}" in launch.err


def test_a_stopped_worker_that_another_one_reports_is_the_cause_and_ends(tmp_path):
    program = """
    def end(number, frame):
        report(message="was ended by SIGTERM")
        sys.exit(143)
    if task == 1:
        signal.signal(signal.SIGTERM, end)
        Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        for_ever()
    wait_for("stopped")
    report(kind="stuck", message="worker 1 does not answer", caused_by=1)
    sys.exit(70)
    """
    with Launch(tmp_path, "--workers 2", program) as launch:
        assert launch.wait() == 70, launch.output
    assert launch.err.splitlines() == [
        "replicax launch: worker 1 is the cause: was stopped, as by SIGSTOP or a debugger, until the launcher ended it "
        "(exit status 143)",
        "  worker 0 says: worker 1 does not answer",
        "  worker 0: exit status 70",
    ]


def test_a_worker_that_ignores_the_request_to_end_is_killed(tmp_path):
    program = """
    if task == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path("deaf").touch()
        for_ever()
    wait_for("deaf")
    sys.exit(5)
    """
    with Launch(tmp_path, "--workers 2 --grace 0.2", program) as launch:
        assert launch.wait() == 5, launch.output
    assert "worker 0: ended by the launcher (killed by SIGKILL)" in launch.err


@pytest.mark.thorough
def test_a_report_of_a_worker_that_does_not_end_ends_the_job(tmp_path):
    program = """
    if task == 0:
        report(message="ValueError: boom")
    for_ever()
    """
    with Launch(tmp_path, "--workers 2", program) as launch:
        assert launch.wait() == 1, launch.output
    assert launch.err.splitlines()[:2] == [
        "replicax launch: worker 0 failed first: ended by the launcher (killed by SIGTERM)",
        "  ValueError: boom",
    ]


def test_all_workers_are_restarted_until_they_succeed(tmp_path):
    program = """
    print("attempt", attempt, "at", cluster[0])
    if task == attempt:
        sys.exit(9)
    if attempt < 2:
        for_ever()
    """
    with Launch(tmp_path, "--workers 2 --max-restarts 5", program) as launch:
        assert launch.wait() == 0, launch.output
    told = [line for line in launch.err.splitlines() if line.startswith("replicax launch")]
    assert told == [
        "replicax launch: worker 0 failed first: exit status 9",
        "replicax launch: restart 1 of at most 5",
        "replicax launch: worker 1 failed first: exit status 9",
        "replicax launch: restart 2 of at most 5",
    ]
    starts = lines_of(launch.out, 1)
    assert [start.split()[1] for start in starts] == ["0", "1", "2"]
    assert len({start.split()[-1] for start in starts}) == 3  # new ports each time


def test_restarts_are_limited_and_the_last_failure_is_the_exit_status(tmp_path):
    with Launch(tmp_path, "--workers 1 --max-restarts 2", "sys.exit(20 + attempt)") as launch:
        assert launch.wait() == 22, launch.output
    assert launch.err.count("failed first") == 3


def test_a_preempted_job_is_restarted_without_counting_it_as_a_failure(tmp_path):
    """Preempted, failed, preempted with the other status, failed, done: two failures in all."""
    program = """
    if attempt in (0, 2):
        sys.exit((42, 143)[attempt // 2])
    if attempt < 4:
        sys.exit(5 if task == 0 else for_ever())
    """
    with Launch(tmp_path, "--workers 2 --max-restarts 2", program) as launch:
        assert launch.wait() == 0, launch.output
    told = [line.removeprefix("replicax launch: ") for line in launch.err.splitlines() if line[0] != " "]
    assert told == [
        "preempted: worker 0 and worker 1 ended with exit status 42.",
        "restart after a preemption",
        "worker 0 failed first: exit status 5",
        "restart 1 of at most 2",
        "preempted: worker 0 and worker 1 ended with exit status 143.",
        "restart after a preemption",
        "worker 0 failed first: exit status 5",
        "restart 2 of at most 2",
    ]


@pytest.mark.parametrize(
    "options, status, told",
    [
        ("", 42, "preempted: worker 0 ended with exit status 42."),
        ("--preempt-exit-codes none --max-restarts 1", 42, "worker 0 failed first: exit status 42"),
        ("--preempt-exit-codes 7,8 --max-restarts 1", 42, "worker 0 failed first: exit status 42"),
    ],
)
def test_without_restarts_or_with_other_codes_the_status_of_a_preempted_worker_is_the_launchers(
    options, status, told, tmp_path
):
    with Launch(tmp_path, f"--workers 1 {options}", "sys.exit(42)") as launch:
        assert launch.wait() == status, launch.output
    assert f"replicax launch: {told}" in launch.err


def test_preempted_workers_end_in_their_own_time(tmp_path):
    """The launcher does not end the others as after a failure, in which they would lose what they still do."""
    program = """
    signal.signal(signal.SIGTERM, lambda *_: print("asked to end"))
    print("ready")
    if task == 1:
        wait_for("go")
    sys.exit(42)
    """
    with Launch(tmp_path, "--workers 2", program) as launch:
        launch.wait_for("ready", 2)
        launch.until(lambda: len(launch.processes()) == 3, "launcher, one guard, one worker")
        (launch.folder / "go").touch()
        assert launch.wait() == 42, launch.output
    assert "asked" not in launch.out


# Children and grandchildren as data loaders are, one that has left the session and one that is an orphan.
_FAMILY = """
sleeper = [sys.executable, "-S", "-c", "import time; print('asleep', flush=True); time.sleep(1000)"]
subprocess.Popen(sleeper)
subprocess.Popen(sleeper, start_new_session=True)
orphan = f"import subprocess; subprocess.Popen({sleeper!r}, start_new_session=True)"
subprocess.Popen([sys.executable, "-S", "-c", orphan])
"""
_ASLEEP = 6  # of two workers


@pytest.mark.sampled(3, others="thorough")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_launcher_ends_everything(name, tmp_path):
    with Launch(tmp_path, "--workers 2 --max-restarts 3", _FAMILY + "for_ever()") as launch:
        launch.wait_for("asleep", _ASLEEP)
        launch.signal(getattr(signal, name))
        assert launch.wait() == 128 + getattr(signal, name), launch.output
        launch.nothing_left()
    assert f"interrupted by {name}; all workers have ended" in launch.err
    assert "failed first" not in launch.err


def test_a_worker_may_end_in_its_own_way_when_the_launcher_is_interrupted(tmp_path):
    program = """
    def save(number, frame):
        print("saved")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    print("ready")
    for_ever()
    """
    with Launch(tmp_path, "--workers 2", program) as launch:
        launch.wait_for("ready", 2)
        launch.signal(signal.SIGTERM)
        assert launch.wait() == 128 + signal.SIGTERM, launch.output
    assert launch.out.count("saved") == 2


def test_an_interrupted_launcher_ends_with_its_signal_though_its_workers_were_preempted(tmp_path):
    program = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
    print("ready")
    for_ever()
    """
    with Launch(tmp_path, "--workers 2 --max-restarts 3", program) as launch:
        launch.wait_for("ready", 2)
        launch.signal(signal.SIGTERM)
        assert launch.wait() == 128 + signal.SIGTERM, launch.output
    assert launch.out.count("ready") == 2 and "preempted" not in launch.err
    assert "interrupted by SIGTERM; all workers have ended" in launch.err


def test_a_second_interrupt_kills_at_once(tmp_path):
    program = _FAMILY + "signal.signal(signal.SIGINT, lambda *_: print('not yet'))\nprint('ready')\nfor_ever()"
    with Launch(tmp_path, "--workers 2", program) as launch:
        launch.wait_for("asleep", _ASLEEP)
        launch.wait_for("ready", 2)
        launch.signal(signal.SIGINT)
        launch.wait_for("not yet", 2)
        launch.signal(signal.SIGINT)
        assert launch.wait(20.0) == 128 + signal.SIGINT, launch.output
        launch.nothing_left()


def test_the_launchers_own_death_ends_everything(tmp_path):
    program = _FAMILY + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nfor_ever()"
    with Launch(tmp_path, "--workers 2", program, env={"TMPDIR": str(tmp_path)}) as launch:
        launch.wait_for("asleep", _ASLEEP)
        assert list(tmp_path.glob("replicax-launch-*"))
        launch.signal(signal.SIGKILL)
        assert launch.wait() == -signal.SIGKILL
        launch.nothing_left()
    assert not list(tmp_path.glob("replicax-launch-*"))


def test_the_death_of_a_guard_ends_everything(tmp_path):
    # In one piece: the children write to the same pipe.
    program = _FAMILY + "if task == 0:\n    os.write(1, f'guarded by {os.getppid()}\\n'.encode())\nfor_ever()"
    with Launch(tmp_path, "--workers 2", program) as launch:
        launch.wait_for("asleep", _ASLEEP)
        line = re.compile(r"guarded by (\d+)\n")
        launch.until(lambda: line.search(launch.out) is not None, "the whole line")
        os.kill(int(line.findall(launch.out)[0]), signal.SIGKILL)
        assert launch.wait() == 128 + signal.SIGKILL, launch.output
        launch.nothing_left()


def test_child_processes_of_workers_end_with_them(tmp_path):
    program = _FAMILY + "while not os.path.exists('go'):\n    time.sleep(0.01)"
    with Launch(tmp_path, "--workers 2", program) as launch:
        launch.wait_for("asleep", _ASLEEP)
        (launch.folder / "go").touch()
        assert launch.wait() == 0, launch.output
        launch.nothing_left()


def test_processes_started_before_the_launcher_are_not_ended(tmp_path):
    # As in a container's entry point: something in the background, and then `exec`.
    beside = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done beside')"
    script = f'{sys.executable} -S -c "{beside}" & exec "$@"'
    command = ("sh", "-c", script, "sh", sys.executable, "-m", "replicax.launch")
    with Launch(tmp_path, "--workers 2", "print('hello')", command=command) as launch:
        assert launch.wait() == 0, launch.output
        assert len(launch.processes()) == 1
        (launch.folder / "go").touch()
        launch.wait_for("done beside")


@pytest.mark.thorough
def test_a_launcher_whose_output_cannot_be_written_goes_on_and_ends_with_the_workers_status(tmp_path, monkeypatch):
    monkeypatch.delenv("REPLICAX_VIRTUAL_DEVICES")  # with which each launcher would import JAX
    program = """
    for k in range(300):  # more than a pipe holds
        print("line", k, "x" * 1000)
    print("to the other stream", file=sys.stderr)
    Path(f"trained.{task}").touch()
    sys.exit(7)
    """
    (tmp_path / "program.py").write_text(HEAD + textwrap.dedent(program), encoding="utf-8")
    launcher = f"{sys.executable} -m replicax.launch --workers 2 ../program.py"
    reader_gone = f'exec {sys.executable} -c "import os; print(os.read(0, 5))"'
    redirections = {
        ">&-": "", ">&- 2>&- <&-": "", ">/dev/full": "standard output: No space left on device",
        "2>/dev/full": "line 299", ">/dev/full 2>&1": "", f"| ({reader_gone})": "standard output: Broken pipe",
    }  # fmt: skip
    running = []
    for index, redirection in enumerate(redirections):
        (tmp_path / str(index)).mkdir()
        script = ["bash", "-c", f"set -o pipefail; {launcher} {redirection}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        running.append(subprocess.Popen(script, cwd=tmp_path / str(index), text=True, **pipes))
    for index, (process, (redirection, told)) in enumerate(zip(running, redirections.items())):
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 7, (redirection, output[-2000:])
        assert told in output, (redirection, output[-2000:])
        assert {path.name for path in (tmp_path / str(index)).iterdir()} == {"trained.0", "trained.1"}, redirection


def test_a_log_that_can_be_written_again_goes_on_and_says_what_is_missing(tmp_path):
    # A pipe whose reader has gone, and comes again, as a file on a disk that is full for a while.
    program = """
    print("one")
    wait_for("gone")
    print("two"), print("three")
    wait_for("back")
    print("four")
    """
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    command = ("sh", "-c", f'exec "$@" > {tmp_path}/log', "sh", sys.executable, "-m", "replicax.launch")
    with Launch(tmp_path, "--workers 1", program, command=command) as launch:
        launch.until(lambda: reading(reader) == "[worker 0] one\n", "the first line")
        os.close(reader)
        (launch.folder / "gone").touch()
        launch.wait_for("standard output: Broken pipe; what the workers print is lost")
        reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
        (launch.folder / "back").touch()
        assert launch.wait() == 0, launch.output
    lines = reading(reader).splitlines()
    os.close(reader)
    assert lines[-2:] == ["replicax launch: 2 lines are missing here: Broken pipe", "[worker 0] four"]


def reading(descriptor: int) -> str:
    """What has come to a pipe."""
    try:
        return os.read(descriptor, 4096).decode()
    except BlockingIOError:
        return ""


def test_a_reader_that_does_not_read_delays_neither_signals_nor_the_end(tmp_path):
    program = """
    print("x" * 1_000_000)
    Path("blocked").touch()
    for_ever()
    """
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    command = ("sh", "-c", f'exec "$@" > {tmp_path}/log', "sh", sys.executable, "-m", "replicax.launch")
    with Launch(tmp_path, "--workers 1", program, command=command) as launch:
        launch.until((launch.folder / "blocked").exists, "a worker that has printed more than the pipe holds")
        launch.signal(signal.SIGTERM)
        assert launch.wait() == 128 + signal.SIGTERM, launch.output
    os.close(reader)


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_names_are_coloured_on_a_terminal_alone_and_not_with_no_color(no_colour, tmp_path):
    (tmp_path / "program.py").write_text("print('hello')\n", encoding="utf-8")
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "replicax.launch", "--workers", "1", "program.py"]
    environment = {**os.environ, "NO_COLOR": no_colour, "TERM": "xterm"}
    del environment["REPLICAX_VIRTUAL_DEVICES"]  # with which the launcher would import JAX
    try:
        done = subprocess.run(command, cwd=tmp_path, stdout=theirs, stderr=theirs, env=environment, timeout=60)
        shown = os.read(terminal, 4096)
    finally:
        os.close(theirs)
        os.close(terminal)
    assert done.returncode == 0
    assert shown == (b"[worker 0] hello\r\n" if no_colour else b"\x1b[36m[worker 0] \x1b[0mhello\r\n")


_GPUS = "print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('JAX_NUM_CPU_DEVICES'))"


@pytest.mark.parametrize(
    "options, gpus, expected",
    [
        ("--workers 2", "0,1,2,3", ["0,1 None", "2,3 None"]),
        ("--workers 2 --devices-per-worker 1", "4,GPU-5a,6", ["4 None", "GPU-5a None"]),
        ("--workers 1", "0,1", ["0,1 None"]),
        ("--workers 2 --devices-per-worker 3", "", [" 3", " 3"]),
    ],
)
def test_each_worker_sees_its_share_of_the_gpus(options, gpus, expected, tmp_path):
    env = {"CUDA_VISIBLE_DEVICES": gpus, "JAX_PLATFORMS": None}
    with Launch(tmp_path, options, _GPUS, env=env) as launch:
        assert launch.wait() == 0, launch.output
    assert [line for worker in range(len(expected)) for line in lines_of(launch.out, worker)] == expected


@pytest.mark.parametrize(
    "options, env, message",
    [
        ("--workers 0", {}, "argument --workers: expected a whole number, at least 1; got '0'"),
        (
            "--workers 99999999999999999999",
            {},
            "argument --workers: expected a whole number, at least 1 and of 9 digits",
        ),
        ("--workers 999999999", {}, "workers on one machine need 3000000061 open files, and the limit is "),
        ("--workers 2 --max-restarts -1", {}, "argument --max-restarts: expected"),
        ("--workers 2 --grace soon", {}, "argument --grace: expected seconds, at least 0; got 'soon'"),
        ("", {}, "the following arguments are required: --workers"),
        ("--workers 2 missing.py", {}, "There is no file missing.py in "),
        ("--workers 2 .", {}, "is a folder without a __main__.py"),
        ("--workers 2 -m missing.part", {}, "There is no module missing.part: no 'missing' in "),
        ("--workers 2 --worker-rank 1", {}, "--worker-rank is for several machines and needs --coordinator HOST:PORT"),
        ("--workers 2 --coordinator 127.0.0.1:4000", {}, "--coordinator needs --worker-rank"),
        ("--workers 2 --coordinator here --worker-rank 0", {}, "argument --coordinator: An address reads HOST:PORT"),
        ("--workers 2 --coordinator a:4000 --worker-rank 2", {}, "ask for 2 to 2 on this machine"),
        ("--workers 2", {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "this machine has 3 GPUs (0, 1, 2) for 2 workers"),
        ("--workers 2 --devices-per-worker 2", {"CUDA_VISIBLE_DEVICES": "7"}, "this machine has 1 GPU (7) for 2"),
        (
            "--workers 2 --devices-per-worker 1",
            {"REPLICAX_VIRTUAL_DEVICES": "GPU:2"},
            "--devices-per-worker 1 and REPLICAX_VIRTUAL_DEVICES=GPU:2 in the environment both say",
        ),
    ],
)
def test_mistakes_on_the_command_line_are_reported(options, env, message, tmp_path):
    with Launch(tmp_path, options, "print('started')", env={"JAX_PLATFORMS": None, **env}) as launch:
        assert launch.wait() == 2, launch.output
    assert message in launch.err
    assert "Traceback" not in launch.err
    assert not launch.out


def test_help_names_every_option_with_its_default(tmp_path):
    with Launch(tmp_path, "--help", "") as launch:
        assert launch.wait() == 0
    for word in ("--workers", "--max-restarts", "--coordinator", "--no-tuning", "exit status:", "TF_CONFIG"):
        assert word in launch.out


def test_the_command_replicax_has_the_subcommand_launch(tmp_path):
    command = (sys.executable, "-m", "replicax", "launch")
    with Launch(tmp_path, "--workers 2", "print('hello')", command=command) as launch:
        assert launch.wait() == 0, launch.output
    assert launch.out.count("hello") == 2


_PSUM = """
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(cluster[0], len(cluster), task)
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((jax.device_count(),), ("d",))
local = jnp.full((jax.local_device_count(), 1), task + 1.0)
x = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("d")), local)
total = jax.jit(jnp.sum)(x)
print("total", float(total), "on", jax.device_count(), "devices")
jax.distributed.shutdown()
"""


def test_a_jax_program_reduces_over_the_workers(tmp_path):
    with Launch(tmp_path, "--workers 2 --devices-per-worker 2", _PSUM) as launch:
        assert launch.wait(120.0) == 0, launch.output
    assert launch.out.count("total 6.0 on 4 devices") == 2


def test_a_stopped_guard_and_a_deleted_folder_of_reports_do_not_delay_the_end(tmp_path):
    program = """
    import shutil
    if task == 0:
        shutil.rmtree(os.environ["REPLICAX_REPORT_DIR"])
        os.kill(os.getppid(), signal.SIGSTOP)
        Path("stopped").touch()
        for_ever()
    wait_for("stopped")
    sys.exit(5)
    """
    with Launch(tmp_path, "--workers 2", program) as launch:
        assert launch.wait() == 5, launch.output
    assert launch.err.splitlines() == [
        "replicax launch: worker 1 failed first: exit status 5",
        "  worker 0: ended by the launcher (killed by SIGTERM)",
    ]


def test_an_interrupt_while_the_launcher_ends_is_no_traceback_and_leaves_nothing(tmp_path, run_python):
    (tmp_path / "program.py").write_text("", encoding="utf-8")
    done = run_python(
        f"""
        import os, signal
        from replicax._commands import main
        from replicax._launch import _guard
        ends = _guard.end_descendants
        def interrupted(**options):
            os.kill(os.getpid(), signal.SIGINT)
            ends(**options)
            print("ended what was left")
        _guard.end_descendants = interrupted
        print(main(["launch", "--workers", "1", {str(tmp_path / "program.py")!r}]))
        """
    )
    assert (done.stdout, done.stderr) == ("ended what was left\n0\n", "")


def test_an_installed_package_has_the_command():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"replicax": "replicax._commands:main"}


def test_a_worker_that_ends_before_it_makes_its_strategy_is_told_at_once_and_named(tmp_path):
    program = """
    if task == 1:
        print("nothing to do", file=sys.stderr)
        sys.exit(0)
    import replicax as rx
    rx.MultiWorkerMirroredStrategy()
    """
    with Launch(tmp_path, "--workers 3", program, env={"JAX_PLATFORMS": "cpu"}) as launch:
        assert launch.wait(120.0) == 1, launch.output  # 300 s is the time for all to join
    told = launch.err[launch.err.index("replicax launch: ") :].splitlines()
    first, *others = told
    assert first.startswith("replicax launch: worker 1 failed first: ended with exit status 0 before it joined the job")
    assert first.endswith(" waited for it") and "    nothing to do" in others


def test_a_worker_that_takes_no_part_in_a_job_of_the_others_may_end(tmp_path):
    """The program makes a smaller cluster of its own."""
    program = """
    if task == 2:
        sys.exit(0)
    me = {"type": "worker", "index": task}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": cluster[:2]}, "task": me})
    import replicax as rx
    if task == 1:
        time.sleep(2)
    print(rx.MultiWorkerMirroredStrategy().num_replicas_in_sync, "replicas")
    """
    with Launch(tmp_path, "--workers 3", program, env={"JAX_PLATFORMS": "cpu"}) as launch:
        assert launch.wait(120.0) == 0, launch.output
    assert launch.out.count("2 replicas") == 2


@pytest.mark.parametrize(
    ("options", "env", "coloured"),
    [
        ("--workers 1", {}, False),  # not a terminal
        ("--workers 1 --color always", {"NO_COLOR": "1"}, True),
        ("--workers 1", {"FORCE_COLOR": "1"}, True),
        ("--workers 1 --color never", {"FORCE_COLOR": "1"}, False),
        ("--workers 1", {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_names_of_workers_have_colours_as_asked_for(tmp_path, options, env, coloured):
    environment = {"NO_COLOR": None, "FORCE_COLOR": None, "TERM": "xterm", **env}
    with Launch(tmp_path, options, 'print("hello"); sys.exit(3)', env=environment) as launch:
        assert launch.wait() == 3, launch.output
    assert launch.out == ("\x1b[36m[worker 0] \x1b[0mhello\n" if coloured else "[worker 0] hello\n")
    assert launch.err.startswith("\x1b[1;31mreplicax launch: " if coloured else "replicax launch: ")
