"""A job of several processes never hangs in silence: what goes wrong is injected, and every process ends and says why.

REPLICAX_REPEAT=20 runs each case so often; REPLICAX_FIGURES=FILE adds a line a run with the seconds from the
injection to the end of each worker (scripts/injections.py does both and prints a table).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from processes import Ended, Workers

REPEAT = int(os.environ.get("REPLICAX_REPEAT", "1"))
HEARTBEAT = 3.0


@pytest.fixture(autouse=True, params=range(REPEAT) if REPEAT > 1 else None)
def run():
    """One of several runs of a test."""


STEPS = """
    from processes import join, mark, step
    job = join()
    me = job.process_id
    step()
    mark("ready")
    while True:
        step()
"""


@pytest.fixture
def figures(request):
    """`figures(since, done)` writes down how long each worker took to end."""

    def write(since: float, done: dict[int, Ended]) -> None:
        if path := os.environ.get("REPLICAX_FIGURES"):
            params = getattr(request.node, "callspec", None)
            values = [str(v) for name, v in params.params.items() if name != "run"] if params else []
            case = f"{request.node.originalname} {' '.join(values)}".strip()
            seconds = {index: round(ended.ended - since, 2) for index, ended in done.items()}
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"case": case, "seconds": seconds}) + "\n")

    return write


def own_lines(text: str) -> list[str]:
    """What replicax has written, without the table of the processes."""
    lines = [line.removeprefix("replicax: ") for line in text.splitlines() if line.startswith("replicax: ")]
    if lines and lines[0].startswith("a job of"):
        lines = lines[2 + int(lines[0].split()[3]) :]
    return lines


def test_a_job_that_goes_well(tmp_path):
    """Every worker ends with status 0, and only process 0 prints the table of the processes."""
    with Workers(
        tmp_path, 3, "from processes import join, step\njoin()\nfor _ in range(5): x = step()\nprint(x.tolist())\n"
    ) as workers:
        done = workers.join()
    assert [ended.returncode for ended in done.values()] == [0, 0, 0], workers.output()
    assert all("[3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]" in ended.stdout for ended in done.values())
    assert "a job of 3 processes" in done[0].stderr and done[0].stderr.count("program0.py") == 3
    assert done[1].stderr == done[2].stderr == ""


def test_two_devices_a_process(tmp_path):
    with Workers(
        tmp_path, 2, "from processes import join, step\njoin()\nprint(step().tolist())\n", devices=2
    ) as workers:
        done = workers.join()
    assert [(e.returncode, "[4.0, 4.0," in e.stdout) for e in done.values()] == [(0, True)] * 2, workers.output()


RAISES = """
    import sys, threading, time
    from processes import join, mark, step
    job = join()
    def broken_part():
        raise ValueError("the data are bad\\nin line 7")
    threading.Thread(target=time.sleep, args=(600,)).start()  # a thread that would keep the process alive
    for _ in range(3):
        step().block_until_ready()
    if job.process_id == {bad}:
        mark("now")
        broken_part()
    {others}
"""


@pytest.mark.parametrize(
    "bad, others",
    [(1, "while True: step()"), (0, "while True: step()"), (1, "time.sleep(600)"), (2, "while True: sum(range(1000))")],
)
def test_an_exception_ends_all(tmp_path, run_dir, figures, bad, others):
    """Within 5 s, with its traceback first, whatever the others do."""
    with Workers(tmp_path, 3, RAISES.format(bad=bad, others=others), env=run_dir.env) as workers:
        workers.wait_for("now", bad)
        since = time.monotonic()
        done = workers.join(timeout=30)
        figures(since, done)
    assert all(ended.ended - since < 5.0 for ended in done.values()), workers.output()
    assert done[bad].returncode == 1
    assert "in broken_part\n" in done[bad].stderr and "ValueError: the data are bad" in done[bad].stderr
    for index, ended in done.items():
        report = run_dir.report(index)
        if index == bad:
            assert report["caused_by"] is None and report["kind"] == "exception" and report["step"] == 3
            assert report["message"] == "ValueError: the data are bad" and "in broken_part" in report["traceback"]
            continue
        assert ended.returncode == 70, workers.output()
        first, *rest = own_lines(ended.stderr)
        assert first == f"worker {bad} failed: ValueError: the data are bad"
        assert any("in broken_part" in line for line in rest)
        assert report["caused_by"] == bad and report["worker"] == f"worker {index}"


class _RunDir:
    def __init__(self, path: Path):
        self._path = path
        self.env = {"REPLICAX_REPORT_DIR": str(path)}

    def report(self, index: int) -> dict:
        return json.loads((self._path / f"{index}.json").read_text(encoding="utf-8"))

    def reports(self) -> list[str]:
        return sorted(path.name for path in self._path.glob("*"))


@pytest.fixture
def run_dir(tmp_path):
    return _RunDir(tmp_path / "reports")


MORE_KILLED = [pytest.param(*case, marks=pytest.mark.thorough) for case in [(2, [0]), (3, [0]), (4, [1, 2])]]


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("count, killed", [(3, [1]), *MORE_KILLED, (3, [0, 2])])
def test_killed_workers_are_named(tmp_path, run_dir, figures, count, killed):
    """`kill -9`, also of worker 0, which holds JAX's coordination service, and of two at once."""
    with Workers(tmp_path, count, STEPS, env=run_dir.env) as workers:
        workers.wait_for("ready")
        for index in killed:
            workers.send(index, signal.SIGSTOP)  # so that neither of two sees the other's end
        since = max(workers.send(index, signal.SIGKILL) for index in killed)
        done = workers.join(timeout=30)
        figures(since, done)
    for index, ended in done.items():
        if index in killed:
            assert ended.returncode == -signal.SIGKILL
            continue
        assert ended.returncode == 70 and ended.ended - since < HEARTBEAT + 5.0, workers.output()
        first = own_lines(ended.stderr)[0]
        named = [0] if 0 in killed else killed
        assert all(f"worker {other} (127.0.0.1:" in first for other in named) and "without a word" in first
        report = run_dir.report(index)
        assert report["kind"] == "lost" and report["caused_by"] == named[0] and report["step"] >= 1
        assert "*** Check failure stack trace" not in ended.stderr  # JAX's own way to end


@pytest.mark.parametrize("stopped", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_stopped_workers_are_named(tmp_path, run_dir, figures, stopped):
    """SIGSTOP: the process is there and its connections are, but it does not answer."""
    with Workers(tmp_path, 3, STEPS, env=run_dir.env) as workers:
        workers.wait_for("ready")
        since = workers.send(stopped, signal.SIGSTOP)
        done = workers.join(timeout=30)
        figures(since, done)
        workers.send(stopped, signal.SIGCONT)
        again = workers.join(timeout=30)
    for index, ended in done.items():
        assert ended.returncode == 70 and ended.ended - since < HEARTBEAT + 5.0, workers.output()
        first, advice = own_lines(ended.stderr)[:2]
        assert first.startswith(f"worker {stopped} (127.0.0.1:") and "has not answered for" in first
        if index != stopped:
            assert "is stopped (by SIGSTOP or a debugger)" in advice and "memory" not in advice
        assert run_dir.report(index)["caused_by"] == stopped
    assert again[stopped].returncode == 70, "it ends when it goes on"


STUCK = """
    import time
    from processes import join, mark, step
    job = join()
    def somewhere_else():
        mark("now")
        time.sleep(600)
    for _ in range(3):
        step()
    if job.process_id == {late}:
        somewhere_else()
    step("the fourth").block_until_ready()
    time.sleep(600)
"""


@pytest.mark.parametrize("late", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_a_worker_that_does_not_come_is_reported(tmp_path, run_dir, figures, late):
    """At the deadline of a step: who has come and who has not, and the stack of every main thread."""
    with Workers(tmp_path, 3, STUCK.format(late=late), env={**run_dir.env, "REPLICAX_STEP_TIMEOUT": "4"}) as workers:
        workers.wait_for("now", late)
        since = time.monotonic()
        done = workers.join(timeout=30)
        figures(since, done)
    for index, ended in done.items():
        assert ended.returncode == 70 and 2.0 < ended.ended - since < 9.0, workers.output()
        lines = own_lines(ended.stderr)
        assert lines[0].startswith("the job is stuck: worker ")
        assert lines[0].endswith(f'in call 4, "the fourth", which worker {late} has not reached'), lines[0]
        text = "\n".join(lines)
        assert f"worker {late}: waits for no other worker, after 3 calls" in text and "somewhere_else" in text
        where = "no call" if index == late else 'call 4, "the fourth"'
        assert f"worker {index} waits in {where}; its main thread:" in text
        report = run_dir.report(index)
        assert report["kind"] == "stuck" and report["caused_by"] == (None if index == late else late)


@pytest.mark.parametrize("slow", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_the_time_of_compiling_does_not_count(tmp_path, slow):
    """One worker compiles for longer than the deadline of a step, and the others wait; then the job goes on."""
    code = f"""
        import time
        import jax, jax.numpy as jnp
        import replicax as rx
        strategy = rx.MultiWorkerMirroredStrategy()
        compile = jax.stages.Lowered.compile
        def slowly(self, *args, **kwargs):
            if strategy.cluster_resolver.task_id == {slow}:
                time.sleep(7)
            return compile(self, *args, **kwargs)
        jax.stages.Lowered.compile = slowly
        def replica():
            return 1.0 + rx.get_replica_context().all_reduce("SUM", jnp.ones(()))
        @rx.function
        def train_step():
            return strategy.reduce("SUM", strategy.run(replica), axis=None)
        for _ in range(3):
            total = train_step()
        print(float(total))
    """
    with Workers(tmp_path, 2, code, env={"REPLICAX_STEP_TIMEOUT": "3"}) as workers:
        done = workers.join(timeout=60)
    assert [(ended.returncode, ended.stdout.strip()) for ended in done.values()] == [(0, "6.0")] * 2, workers.output()
    said = own_lines(done[0].stderr)
    for times, line in enumerate(said, 1):
        assert line.startswith(f"worker {slow}: compiles call ") and line.endswith(
            f'"train_step()", for {3 * times} s now'
        )
    assert len(said) >= 2 and own_lines(done[1].stderr) == [], workers.output()


def test_endless_compiling_ends_the_job(tmp_path, run_dir):
    """At ten deadlines, and one more."""
    code = """
        import time
        from processes import join, step
        from replicax._job import state
        job = join()
        step().block_until_ready()
        state.set_step_timeout(0.5)
        if job.process_id == 1:
            state.begin("step").compiling = True
            time.sleep(600)
        step().block_until_ready()
    """
    with Workers(tmp_path, 2, code, env=run_dir.env) as workers:
        done = workers.join(timeout=60)
    for index, ended in done.items():
        assert ended.returncode == 70 and run_dir.report(index)["kind"] == "stuck", workers.output()
        text = "\n".join(own_lines(ended.stderr))
        assert "the job is stuck: worker 0 has waited" in text and 'worker 1: compiles call 2, "step"' in text


SWAPPED = """
    import time
    from processes import join, mark, step
    job = join()
    for _ in range(3):
        step("warm", {size}), step("warm", 8)
    calls = [("one", 8), ("other", {size})]
    if job.process_id == {odd}:
        calls.reverse()
    mark("now")
    for label, size in calls:
        step(label, size)
    {then}
"""


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("size, odd, count, then", [(8, 1, 2, "time.sleep(600)"), (1024, 1, 2, "time.sleep(600)"),
                                                    (8, 2, 3, "time.sleep(600)"), (8, 0, 3, "pass")])  # fmt: skip
def test_swapped_collectives_are_found(tmp_path, run_dir, figures, size, odd, count, then):
    """Of the same size, which Gloo would mix without a word, and of different ones; also at the end of the program."""
    code = SWAPPED.format(size=size, odd=odd, then=then)
    with Workers(tmp_path, count, code, env=run_dir.env) as workers:
        workers.wait_for("now")
        since = time.monotonic()
        done = workers.join(timeout=30)
        figures(since, done)
    for index, ended in done.items():
        if then == "pass" and index != 0 and ended.returncode == 0:
            continue  # it had ended its program when process 0 found out
        assert ended.returncode == 70 and ended.ended - since < 8.0, workers.output()
        lines = own_lines(ended.stderr)
        assert lines[0].startswith("the processes go different ways: in call 7, "), lines[0]
        assert '"one"' in lines[0] and '"other"' in lines[0]
        if count == 3:
            assert f'worker {odd} makes "other"' in lines[0]
            assert run_dir.report(index)["caused_by"] == (None if index == odd else odd)
        assert run_dir.report(index)["kind"] == "diverged"


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_process_that_is_ahead_is_compared_too(tmp_path, run_dir, ahead):
    """One process has made two calls where the other has made one, another one, and makes no more."""
    code = f"""
    import time
    from processes import join
    from replicax._job import state
    job = join()
    for label in ["other", "one"] if job.process_id == {ahead} else ["one"]:
        state.begin(label).dispatched(None)
    time.sleep(600)
    """
    with Workers(tmp_path, 2, code, env=run_dir.env) as workers:
        done = workers.join(timeout=30)
    for index, ended in done.items():
        assert ended.returncode == 70, workers.output()
        assert own_lines(ended.stderr)[0].startswith("the processes go different ways: in call 1, ")
        assert run_dir.report(index)["kind"] == "diverged"


def ended_after_now(folder, run_dir, figures, code, early):
    """Runs three workers, of which one comes to "now" and the others wait for it; when that was, and how all ended."""
    with Workers(folder, 3, code, env=run_dir.env) as workers:
        workers.wait_for("now", early)
        since = time.monotonic()
        done = workers.join(timeout=30)
        figures(since, done)
    return workers, since, done


@pytest.mark.parametrize("early", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_an_early_return_is_reported(tmp_path, run_dir, figures, early):
    """A program that has ended while others wait for it in a call."""
    code = f"""
        from processes import join, mark, step
        job = join()
        for _ in range(5):
            step()
        if job.process_id == {early}:
            mark("now")
        else:
            step().block_until_ready()
            step().block_until_ready()
    """
    workers, since, done = ended_after_now(tmp_path, run_dir, figures, code, early)
    for index, ended in done.items():
        if index == early:
            assert ended.returncode == (70 if early == 0 else 0), workers.output()
            continue
        assert ended.returncode == 70 and ended.ended - since < 8.0, workers.output()
        first = own_lines(ended.stderr)[0]
        assert f"worker {early} has ended the program after 5 calls" in first and "waits in call 6" in first, first
        assert run_dir.report(index)["kind"] == "left" and run_dir.report(index)["caused_by"] == early


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("early, pool", [(1, False), (0, True)])
def test_a_thread_that_outlives_its_program_and_makes_no_calls_is_reported(tmp_path, run_dir, figures, early, pool):
    """`sys.exit(0)`, or the end of the program, while a data loader of its own still runs."""
    code = f"""
        import concurrent.futures, sys, threading, time
        from processes import join, mark, step
        job = join()
        def loads_data():
            time.sleep(600)
        for _ in range(5):
            step()
        if job.process_id != {early}:
            step().block_until_ready()
            step().block_until_ready()
        elif {pool}:
            concurrent.futures.ThreadPoolExecutor(1, "loader").submit(loads_data)
            mark("now")
        else:
            threading.Thread(target=loads_data, name="loader").start()
            mark("now")
            sys.exit(0)
    """
    workers, since, done = ended_after_now(tmp_path, run_dir, figures, code, early)
    thread = "'loader_0'" if pool else "'loader'"
    for index, ended in done.items():
        assert ended.returncode == 70, workers.output()
        first, *rest = own_lines(ended.stderr)
        assert first.startswith(f"worker {early} has ended the program after 5 calls, while worker "), first
        assert first.endswith(f"its thread {thread} still runs") and "in loads_data" in "\n".join(rest), (
            workers.output()
        )
        assert run_dir.report(index)["kind"] == "left"
        assert run_dir.report(index)["caused_by"] == (None if index == early else early)


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("error, status", [("KeyboardInterrupt()", -signal.SIGINT), ("ValueError('bad')", 1)])
def test_an_exception_that_a_hook_of_the_program_shows_ends_all_while_a_thread_still_runs(tmp_path, error, status):
    """With the status that it has without the thread: a KeyboardInterrupt ends a program by its signal."""
    code = f"""
        import sys, threading, time
        from processes import join, step
        job = join()
        sys.excepthook = sys.__excepthook__
        step().block_until_ready()
        if job.process_id == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise {error}
        step().block_until_ready()
    """
    with Workers(tmp_path, 2, code) as workers:
        done = workers.join(timeout=60)
    assert (done[0].returncode, done[1].returncode) == (70, status), workers.output()


def test_a_thread_may_train_when_the_main_program_has_ended(tmp_path):
    """One that makes the calls, however late it comes to them, is waited for."""
    code = """
        import threading, time
        from processes import join, step
        job = join()
        begun = threading.Event()
        def train():
            step().block_until_ready()
            begun.set()
            if job.process_id == 1:
                time.sleep(4)
            print(step().tolist()[0])
        if job.process_id == 1:
            threading.Thread(target=train).start()
            begun.wait()
        else:
            train()
    """
    with Workers(tmp_path, 2, code) as workers:
        done = workers.join(timeout=60)
    assert [(e.returncode, e.stdout) for e in done.values()] == [(0, "2.0\n")] * 2, workers.output()


@pytest.mark.parametrize("early", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_an_early_return_is_reported_in_other_waits(tmp_path, run_dir, figures, early):
    """In what is no call, such as an exchange of messages, after a while."""
    code = f"""
        import time
        from processes import join, mark, step
        from replicax._job import state
        job = join()
        step().block_until_ready()
        mark("now")
        if job.process_id != {early}:
            with state.waiting("the end of the data"):
                time.sleep(600)
    """
    workers, since, done = ended_after_now(tmp_path, run_dir, figures, code, early)
    for index, ended in done.items():
        if index != early:
            assert ended.returncode == 70 and ended.ended - since < 10.0, workers.output()
            first = own_lines(ended.stderr)[0]
            assert f"worker {early} has ended the program after 1 call," in first, first
            assert 'waits in "the end of the data"' in first


@pytest.mark.parametrize("absent", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_a_worker_that_never_starts(tmp_path, run_dir, figures, absent):
    env = {**run_dir.env, "REPLICAX_START_TIMEOUT": "3"}
    with Workers(tmp_path, 3, "from processes import join\njoin()\n", env=env, absent=[absent]) as workers:
        since = time.monotonic()
        done = workers.join(timeout=40)
        figures(since, done)
    for index, ended in done.items():
        assert ended.returncode == 1 and "JobError" in ended.stderr, workers.output()
        text = ended.stderr
        if absent:
            assert f"worker 1 ({workers.addresses[1]}) did not join the job within 3 s" in text
        else:
            assert f"worker {index} could not reach worker 0 at {workers.addresses[0]} within 3 s" in text
            assert "refused" in text
        report = run_dir.report(index)
        assert report["kind"] == "start" and report["step"] is None


def test_a_program_that_exits_keeps_its_status_and_ends_those_that_wait(tmp_path, figures):
    """`sys.exit(3)` is the end of a program like any other; one that the program catches is none."""
    code = """
        import sys
        from processes import join, mark, step
        job = join()
        step().block_until_ready()
        try:
            sys.exit(5)
        except SystemExit as caught:
            print("caught", caught.code)
        if job.process_id == 1:
            mark("now")
            sys.exit(3)
        while True:
            step()
    """
    with Workers(tmp_path, 3, code) as workers:
        workers.wait_for("now", 1)
        since = time.monotonic()
        done = workers.join(timeout=30)
        figures(since, done)
    assert [ended.returncode for ended in done.values()] == [70, 3, 70], workers.output()
    assert all("caught 5" in ended.stdout and ended.ended - since < 5.0 for ended in done.values())
    assert own_lines(done[0].stderr)[0].startswith("worker 1 has ended the program after 1 call, while worker ")


@pytest.mark.thorough
def test_a_slow_process_is_not_reported_as_stuck(tmp_path):
    """One worker computes for longer than two heartbeats, one compiles late, one waits: nobody is blamed."""
    code = """
        import ctypes, time
        from processes import join, step
        job = join()
        if job.process_id == 1:
            end = time.monotonic() + 7
            while time.monotonic() < end:
                ctypes.PyDLL(None).usleep(5000)  # holds Python's lock, as a user's own loop would
        if job.process_id == 2:
            time.sleep(3)
        for _ in range(100):
            x = step()
        print(x.tolist()[0])
    """
    with Workers(tmp_path, 3, code) as workers:
        done = workers.join(timeout=60)
    assert [(e.returncode, e.stdout.split()[-1]) for e in done.values()] == [(0, "3.0")] * 3, workers.output()
    assert not any(own_lines(ended.stderr) for ended in done.values())


@pytest.mark.parametrize("early", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_a_program_may_end_before_the_others(tmp_path, figures, early):
    """No process waits for the end of the others, and those may go on by themselves. Process 0 is no exception."""
    code = f"""
        import sys, time
        from processes import join, mark, step
        job = join()
        step().block_until_ready()
        mark("now")
        if job.process_id != {early}:
            time.sleep(8)
            import jax.numpy as jnp
            print("alone", float(jnp.ones(3).sum()))
    """
    with Workers(tmp_path, 3, code) as workers:
        workers.wait_for("now")
        since = time.monotonic()
        done = workers.join(timeout=60)
        figures(since, done)
    assert [ended.returncode for ended in done.values()] == [0, 0, 0], workers.output()
    assert done[early].ended - since < 6.0
    assert all("alone 3.0" in ended.stdout for index, ended in done.items() if index != early)
    assert not any(own_lines(ended.stderr) for ended in done.values())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("target", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_signals_end_a_worker_with_their_status(tmp_path, run_dir, figures, number, target):
    """While its main thread is blocked in a collective; the others are told."""
    code = """
        import time
        from processes import join, mark, step
        job = join()
        step().block_until_ready()
        mark("ready")
        if job.process_id == 2:
            time.sleep(600)
        step().block_until_ready()
    """
    with Workers(tmp_path, 3, code, env=run_dir.env) as workers:
        workers.wait_for("ready")
        since = workers.send(target, number)
        done = workers.join(timeout=30)
        figures(since, done)
    assert done[target].returncode == -number, workers.output()
    for index, ended in done.items():
        if index != target:
            assert ended.returncode == 70 and ended.ended - since < 8.0, workers.output()
            assert own_lines(ended.stderr)[0].startswith(f"worker {target} failed: ")
            assert run_dir.report(index)["caused_by"] == target


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("then", ["raise RuntimeError('training failed') from error", "sys.exit(1)"])
def test_the_cause_is_named_where_a_program_catches_what_followed_from_it(tmp_path, figures, then):
    """A program that ends by itself because a collective failed is not taken for the cause.

    By `sys.exit` a process other than 0 is gone before the cause is known; process 0 tells it.
    """
    code = f"""
        import sys
        from processes import join, mark, step
        job = join()
        step().block_until_ready()
        mark("ready")
        try:
            while True:
                step().block_until_ready()
        except Exception as error:
            {then}
    """
    with Workers(tmp_path, 3, code) as workers:
        workers.wait_for("ready")
        since = workers.send(2, signal.SIGKILL)
        done = workers.join(timeout=30)
        figures(since, done)
    for index in 0, 1:
        assert done[index].returncode in (70, 1) and done[index].ended - since < HEARTBEAT + 5.0, workers.output()
        if index == 0 or "exit" not in then:
            assert own_lines(done[index].stderr)[0].startswith("worker 2 (127.0.0.1:"), workers.output()


def test_a_forked_child_is_no_process_of_the_job(tmp_path):
    """It may end as it likes, and it does not keep its parent's connection open."""
    code = """
        import os, sys, time, warnings
        warnings.simplefilter("ignore")
        from processes import join, mark, step
        from replicax._job import state
        job = join()
        step().block_until_ready()
        if job.process_id == 1:
            if (child := os.fork()) == 0:
                call = state.begin("nobody hears of this")
                os._exit(5 if call is None and state.current() is None else 6)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            if os.fork() == 0:
                time.sleep(1)
                os._exit(0)
            mark("now")
        while True:
            step()
    """
    with Workers(tmp_path, 2, code) as workers:
        workers.wait_for("now", 1)
        workers.send(1, signal.SIGKILL)
        done = workers.join(timeout=30)
    assert done[0].returncode == 70 and "without a word" in own_lines(done[0].stderr)[0], workers.output()
    assert "child 5" in done[1].stdout


# First contact.


@pytest.mark.parametrize("killed", [pytest.param(1, marks=pytest.mark.thorough), 0])
def test_a_worker_that_dies_while_jax_starts(tmp_path, figures, killed):
    """Between the first contact and the first collective, where the others are blocked in JAX."""
    code = f"""
        import os, time
        from processes import join, mark
        from replicax._job import join as joining
        go_on = joining._start_jax
        def start_jax(job, *args):
            if job.process_id == {killed}:
                mark("now")
                time.sleep(600)
            go_on(job, *args)
        joining._start_jax = start_jax
        join()
    """
    with Workers(tmp_path, 3, code) as workers:
        workers.wait_for("now", killed)
        since = workers.send(killed, signal.SIGKILL)
        done = workers.join(timeout=30)
        figures(since, done)
    for index, ended in done.items():
        if index != killed:
            assert ended.returncode == 70 and ended.ended - since < HEARTBEAT + 5.0, workers.output()
            assert own_lines(ended.stderr)[0].startswith(f"worker {killed} (127.0.0.1:")


def test_different_programs_are_named(tmp_path):
    code = """
        import os, pathlib, sys
        file = pathlib.Path(os.environ["FOLDER"], "train.py")
        file.parent.mkdir()
        file.write_text(os.environ["PROGRAM"])
        sys.modules["__main__"].__file__, sys.argv[1:] = str(file), os.environ["ARGUMENTS"].split()
        from processes import join
        join()
    """

    def run(name, programs=("same",) * 2, arguments=("",) * 2, **env):
        each = [
            {"FOLDER": str(tmp_path / f"{name}{i}"), "PROGRAM": program, "ARGUMENTS": line}
            for i, (program, line) in enumerate(zip(programs, arguments))
        ]
        with Workers(tmp_path / name, len(each), code, each=each, env=env) as workers:
            return list(workers.join(timeout=30).values())

    for ended in run("programs", ["same", "same", "changed"], [""] * 3):
        assert ended.returncode == 1 and "worker 2 differs: the program is 'train.py (" in ended.stderr
    done = run("off", ["same", "changed"], ["--lr 0.1", "--lr 0.2"], REPLICAX_PREFLIGHT="off")
    assert [ended.returncode for ended in done] == [0, 0] and own_lines(done[0].stderr) == []
    for ended in run("arguments", arguments=["--task 0 --lr 0.1", "--task 1 --lr 0.2"]):
        assert ended.returncode == 1 and "REPLICAX_ARGUMENTS_MAY_DIFFER=--lr" in ended.stderr
        assert (
            "the command line: worker 0 has '--task ... --lr 0.1', worker 1 has '--task ... --lr 0.2'" in ended.stderr
        )


def test_start_files_of_different_names_are_told_and_may_run(tmp_path):
    code = "from processes import join\njoin()\n"
    with Workers(tmp_path, 2, [code, code + "# of worker 1\n"]) as workers:
        done = workers.join(timeout=30)
    assert [ended.returncode for ended in done.values()] == [0, 0], workers.output()
    told = (
        "The processes have different start files, which must make the same calls. program0.py: worker 0; program1.py"
    )
    assert own_lines(done[0].stderr)[0].startswith(told)


def test_different_versions_are_named(tmp_path):
    code = """
        import os, jax
        if "ODD" in os.environ:
            jax.__version__ = "0.9.9"  # as if another JAX were installed here
        from processes import join
        join()
    """
    with Workers(tmp_path, 2, code, each=[{}, {"ODD": "1"}]) as workers:
        done = workers.join(timeout=30)
    for ended in done.values():
        assert ended.returncode == 1 and "JAX: worker 0 has '0." in ended.stderr, workers.output()
        assert "worker 1 has '0.9.9'" in ended.stderr


def test_different_devices_are_named(tmp_path):
    code = "from processes import join\njoin()\n"
    with Workers(tmp_path, 3, code, each=[{}, {"JAX_NUM_CPU_DEVICES": "2"}, {}]) as workers:
        done = workers.join(timeout=30)
    for ended in done.values():
        assert ended.returncode in (1, 70), workers.output()
        assert "worker 1 differs: devices is '2 x cpu', where the others have '1 x cpu'" in ended.stderr


def test_two_processes_that_claim_one_task_are_reported(tmp_path):
    import processes

    def config(addresses, index):
        return processes.tf_config(addresses, min(index, 1))

    code = "from processes import join\njoin()\n"
    with Workers(tmp_path, 3, code, config=config) as workers:
        done = workers.join(timeout=30)
    assert all(ended.returncode == 1 for ended in done.values()), workers.output()
    assert all("Two processes say that they are worker 1" in done[index].stderr for index in (0, 1, 2))


def test_two_processes_that_claim_to_be_process_0_are_reported(tmp_path):
    """The one that comes later finds the port taken, and asks who has it."""
    import processes

    code = "from processes import join\njoin()\n"
    with Workers(tmp_path, 3, code, config=lambda a, _: processes.tf_config(a, 0), absent=[2]) as workers:
        done = workers.join(timeout=30)
    for ended in done.values():
        assert ended.returncode == 1 and "Two processes say that they are worker 0" in ended.stderr, workers.output()


def test_the_port_of_the_coordination_service_is_held(tmp_path):
    """From when it is told to the others until the service listens there."""
    code = """
        import socket
        from processes import join, step
        from replicax._job import join as joining
        go_on = joining._start_jax
        def start_jax(job, address, bind, limit):
            if bind is not None:
                host, port = bind.split(":")
                try:
                    socket.create_server((host, int(port)))
                    print("taken")
                except OSError:
                    print("held")
            go_on(job, address, bind, limit)
        joining._start_jax = start_jax
        join()
        step()
    """
    with Workers(tmp_path, 2, code) as workers:
        done = workers.join(timeout=30)
    assert [ended.returncode for ended in done.values()] == [0, 0], workers.output()
    assert "held" in done[0].stdout and "taken" not in done[0].stdout


def test_a_stranger_at_the_address_of_process_0_is_reported(tmp_path):
    """Is not taken for worker 0, and the limit of time holds."""
    code = "from processes import join\njoin()\n"
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        config = _with_addresses([f"127.0.0.1:{stranger.getsockname()[1]}", "127.0.0.1:9"])
        limit = {"REPLICAX_START_TIMEOUT": "4"}
        with Workers(tmp_path, 2, code, absent=[0], config=config, env=limit) as workers:
            since = time.monotonic()
            done = workers.join(timeout=40)
    assert done[1].returncode == 1 and done[1].ended - since < 9.0, workers.output()
    assert "what listens there does not answer as one of us" in done[1].stderr, workers.output()
    assert "has reached" not in done[1].stderr


def test_another_cluster_and_strangers(tmp_path):
    """Who knows another cluster is refused and named; what is no process of a job at all is ignored."""
    import processes

    def config(addresses, index):
        return processes.tf_config(addresses if index == 0 else [addresses[0], "127.0.0.1:9"], index)

    code = "from processes import join\njoin()\n"
    with Workers(tmp_path, 2, code, config=config, env={"REPLICAX_START_TIMEOUT": "6"}) as workers:
        host, port = workers.addresses[0].split(":")
        stranger = _connect(host, port)
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stranger.recv(100) == b""  # shown the door
        stranger.close()
        done = workers.join(timeout=30)
    assert all(ended.returncode == 1 for ended in done.values()), workers.output()
    assert "belongs to another cluster: it knows worker 0 (" in done[1].stderr
    assert "did not join the job within 6 s" in done[0].stderr and "Refused, since they know another" in done[0].stderr


def test_a_job_starts_whatever_strangers_send(tmp_path):
    """Lines that are no message, messages of wrong kinds, processes that cannot be, connections that say nothing."""

    def line(message):
        return json.dumps(message).encode() + b"\n"

    with Workers(tmp_path, 2, "from processes import join, step\njoin()\nstep()\n", absent=[1]) as workers:
        host, port = workers.addresses[0].split(":")
        me = {"tasks": [["worker", 0], ["worker", 1]], "addresses": workers.addresses, "process_id": 1, "host": "h"}
        me.update(pid=1, replicax="0", jax="0", python="0", program="p", arguments="", job="")
        wrong = [{"process_id": i} for i in (-1, 2, 99, 1.0, True, None, "1", [])]
        wrong += [{"tasks": 5}, {"tasks": [5]}, {"tasks": None}, {"addresses": {}}, {"host": 5}, {"pid": "x" * 1000}]
        wrong += [{"jax": None}, {"program": []}, {"arguments": {}}]
        sent = [
            b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)) * 100, b"\xff\xfe\n", b"5\n", b"null\n", b"[1]\n", b"\n", b"",
            b"[" * 100_000 + b"\n", b'{"hello":' * 100_000 + b"\n", b"9" * 10_000 + b"\n", b"x" * (2 << 20), b'{"hell',
            *(line({"hello": hello}) for hello in (5, [1], "x", None, True, {}, {"tasks": 5}, {"process_id": 1})),
            *(line({"hello": {**me, **fields}}) for fields in wrong),
            *map(line, ({"start": {}}, {"beat": {}}, {"failed": 1}, {"diagnosis": {}}, {"refused": 1}, {"welcome": 1})),
        ]  # fmt: skip
        strangers = [_connect(host, port)]
        for data in sent:
            strangers.append(_connect(host, port))
            try:
                strangers[-1].sendall(data)
            except OSError:  # shown the door within a long line
                assert len(data) > 1 << 20
        strangers += [_connect(host, port) for _ in range(400)]  # more than are kept
        workers.start(1)
        done = workers.join(timeout=60)
        for stranger in strangers:
            stranger.close()
    assert [ended.returncode for ended in done.values()] == [0, 0], workers.output()[-5000:]
    assert not any(own_lines(ended.stderr) for ended in done.values()), workers.output()[-5000:]


def _connect(host, port):
    """Connects when somebody listens there."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=60)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_any_answer_at_the_address_of_process_0_is_handled(tmp_path):
    """It is not taken for worker 0, and the limit of time holds."""
    starts = b"5", b'{"jax": 5, "heartbeat": 1}', b'{"jax": "a:1", "heartbeat": NaN}', b'{"jax": "a", "heartbeat": 1}'
    answers = [
        *(b'{"start": %b}\n' % start for start in starts),
        b"[" * 99_999 + b"\n",
        b"\xff\n",
        b'{"welcome": 5}\n[]\n',
    ]
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        config = _with_addresses([f"127.0.0.1:{stranger.getsockname()[1]}", "127.0.0.1:9"])
        limit = {"REPLICAX_START_TIMEOUT": "6"}
        code = "from processes import join\njoin()\n"
        with Workers(tmp_path, 2, code, absent=[0], config=config, env=limit) as workers:
            stranger.settimeout(60)
            for answer in answers:
                connection, _ = stranger.accept()
                connection.sendall(answer)
                connection.close()
            done = workers.join(timeout=40)
    assert done[1].returncode == 1 and "JobError: worker 1 could not reach worker 0" in done[1].stderr, workers.output()


LISTENING = """
    from pathlib import Path
    from processes import join, step
    job = join()
    step().block_until_ready()
    own = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                print("listens at", fields[1].split(":")[0])
    step().block_until_ready()
"""


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="looks for sockets in /proc")
@pytest.mark.parametrize("host", ["localhost", "own"])
def test_a_job_listens_at_its_own_addresses_alone(tmp_path, host):
    """On the loopback at nothing beyond it; else at no interface but the one of the address. Relays are on loopback."""
    import processes

    if host == "own":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing
            except OSError:
                pytest.skip("this machine has no address but the loopback's")
            host = probe.getsockname()[0]

    def config(addresses, index):
        return processes.tf_config([a.replace("127.0.0.1", host) for a in addresses], index)

    with Workers(tmp_path, 2, LISTENING, config=config) as workers:
        done = workers.join(timeout=60)
    address = socket.inet_aton(socket.gethostbyname(host))[::-1].hex().upper()
    assert [ended.returncode for ended in done.values()] == [0, 0], workers.output()
    mapped = "0000000000000000FFFF0000"  # how gRPC writes an IPv4 address
    found = [{word.removeprefix(mapped) for word in ended.stdout.split()[2::3]} for ended in done.values()]
    assert found == [{address}, {address, "0100007F"}], workers.output()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of this machine")
def test_a_job_connects_despite_a_proxy_setting(tmp_path):
    """The client of JAX's coordination service would take one, unless its own machine's address is excepted."""
    import processes

    def config(addresses, index):
        return processes.tf_config([a.replace("127.0.0.1", "127.0.0.2") for a in addresses], index)

    code = "from processes import join, step\njoin()\nstep().block_until_ready()\n"
    with Workers(tmp_path, 2, code, config=config, env={"http_proxy": "http://127.0.0.1:9"}) as workers:
        done = workers.join(timeout=60)
    assert [ended.returncode for ended in done.values()] == [0, 0], workers.output()


def test_the_port_is_taken(tmp_path):
    code = "from processes import join\njoin()\n"
    with Workers(tmp_path, 2, code, absent=[0, 1]) as unused:
        host, port = unused.addresses[0].split(":")
    with socket.create_server((host, int(port))):
        with Workers(tmp_path, 2, code, absent=[1], config=_with_addresses(unused.addresses)) as workers:
            done = workers.join(timeout=40)
    assert done[0].returncode == 1
    assert f"worker 0 cannot listen at its address {unused.addresses[0]}" in done[0].stderr, workers.output()


def _with_addresses(addresses):
    import processes

    return lambda _, index: processes.tf_config(addresses, index)


def test_too_late_to_join(tmp_path):
    """Fact 131: the strategy is made before the first computation."""
    code = """
        import jax.numpy as jnp
        jnp.ones(2)
        from processes import join
        join()
    """
    with Workers(tmp_path, 2, code, absent=[1]) as workers:
        done = workers.join(timeout=30)
    assert "RuntimeError: Collective ops must be configured at program startup" in done[0].stderr
