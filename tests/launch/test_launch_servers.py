"""`replicax launch` with parameter servers: chief, workers, servers and evaluator, on one machine and on several."""

from __future__ import annotations

import json
import re
import signal
import sys
import textwrap

import pytest
from launching import Launch
from test_launch_machines import machines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

# Each task tells the chief what it is, and gets an answer: it ends with that status, or waits for ever.
TALK = """
import socket
config = json.loads(os.environ["TF_CONFIG"])
kind, cluster = config["task"]["type"], config["cluster"]
name, restarts = f"{kind} {task}", int(os.environ["REPLICAX_TASK_RESTART_COUNT"])
host, port = cluster["chief"][0].rsplit(":", 1)

class Chief:
    def __init__(self):
        self.listener = socket.create_server((host, int(port)))
        self.waiting = {}

    def hear(self, *names):
        while not set(names) <= set(self.waiting):
            connection, _ = self.listener.accept()
            name, address = connection.makefile().readline().split(",")
            kind, number = name.split(".")[0].split()
            assert address.strip() == (cluster[kind][int(number)] if kind in cluster else "none")
            self.waiting[name] = connection

    def end(self, name, status):
        self.waiting.pop(name).sendall(f"{status}\\n".encode())

def serve():
    while True:
        try:
            chief = socket.create_connection((host, int(port)))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    address = cluster[kind][task] if kind in cluster else "none"
    chief.sendall(f"{name}.{restarts},{address}\\n".encode())
    if answer := chief.makefile().readline():
        os.kill(os.getpid(), -int(answer)) if int(answer) < 0 else sys.exit(int(answer))
    for_ever()
"""


def launched(folder, options, program, **kwargs):
    """A launcher of `of_chief(program)`."""
    return Launch(folder, options, of_chief(program), **kwargs)


def of_chief(program):
    """A program whose chief runs this one, and whose other tasks `serve`."""
    chief = textwrap.indent(textwrap.dedent(program), "    ")
    return f"{TALK}\nif kind == 'chief':\n    chief = Chief()\n{chief}\nelse:\n    serve()\n"


def told(launch):
    prefix = "replicax launch: "
    return [line.removeprefix(prefix) for line in launch.err.splitlines() if line.startswith(prefix)]


PRINTS = """
config = json.loads(os.environ["TF_CONFIG"])
secrets = [os.environ.get("REPLICAX_JOB_SECRET"), os.environ.get("REPLICAX_JOB_SECRET_FILE")]
print(json.dumps([config, secrets, sys.argv[1:]]))
print("to the other stream", file=sys.stderr)
if config["task"]["type"] == "chief":
    wait_for("go")
else:
    for_ever()
"""
TASKS = ["chief 0", "evaluator 0", "ps 0", "ps 1", "worker 0", "worker 1", "worker 2"]


def shown(launch):
    """The value that each task printed, by its name."""
    found = re.findall(r"^\[(\w+ \d+)\] +(\[.*\])$", launch.out, re.MULTILINE)
    return {name: json.loads(text) for name, text in found}


@pytest.mark.parametrize(
    "given",
    [{}, {"REPLICAX_JOB_SECRET": "of the test alone"}, {"REPLICAX_JOB_SECRET_FILE": __file__}],
    ids=["", "text", "file"],
)
def test_each_task_gets_its_place_in_the_cluster_and_the_secret(given, tmp_path):
    unset = {"REPLICAX_JOB_SECRET": None, "REPLICAX_JOB_SECRET_FILE": None}
    options = "--workers 3 --ps 2 --evaluator"
    with Launch(tmp_path, options, PRINTS, "--rate", "1", env={**unset, **given}) as launch:
        launch.until(lambda: len(shown(launch)) == len(TASKS), "a line of each task")
        launch.wait_for("to the other stream", len(TASKS))
        (launch.folder / "go").touch()
        assert launch.wait() == 0, launch.output
    assert not told(launch)
    values = shown(launch)
    assert sorted(values) == TASKS
    assert all(f"[{name}]".ljust(14) + "to the other stream" in launch.err.splitlines() for name in TASKS)
    cluster = values["chief 0"][0]["cluster"]
    assert {kind: len(addresses) for kind, addresses in cluster.items()} == {"chief": 1, "worker": 3, "ps": 2}
    addresses = [address for some in cluster.values() for address in some]
    assert len(set(addresses)) == 6 and all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)
    for name, (config, (secret, file), arguments) in values.items():
        kind, number = name.split()
        assert config == {"cluster": cluster, "task": {"type": kind, "index": int(number)}}
        assert arguments == ["--rate", "1"]
        assert (secret, file) == (given.get("REPLICAX_JOB_SECRET", secret), given.get("REPLICAX_JOB_SECRET_FILE"))
    (secret,) = {secret for _, (secret, _), _ in values.values()}  # the same everywhere
    assert given or re.fullmatch("[0-9a-f]{64}", secret or "")
    assert secret is None or secret not in launch.err


@pytest.mark.parametrize("workers, gpus", [(1, ["2,3"]), (2, ["2", "3"])])
def test_workers_have_the_gpus_and_devices_and_other_tasks_compute_on_cpu(workers, gpus, tmp_path):
    program = """
    names = ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
    print(json.dumps([os.environ.get(name) for name in names]))
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "chief":
        wait_for("go")
    else:
        for_ever()
    """
    cpu = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": None, "JAX_NUM_CPU_DEVICES": None}
    for env, options in (({**cpu, "CUDA_VISIBLE_DEVICES": "2,3"}, ""), (cpu, "--devices-per-worker 4")):
        with Launch(tmp_path, f"--workers {workers} --ps 1 {options}", program, env=env) as launch:
            launch.until(lambda launch=launch: len(shown(launch)) == workers + 2, "a line of each task")
            (launch.folder / "go").touch()
            assert launch.wait() == 0, launch.output
        values = shown(launch)
        others, of_workers = ["", "cpu", None], [[gpu, None, None] for gpu in gpus]
        if options:
            others, of_workers = ["", "cpu", None], [["", None, "4"]] * workers
        assert [values[f"worker {number}"] for number in range(workers)] == of_workers
        assert values["chief 0"] == values["ps 0"] == others


def test_a_secret_that_cannot_be_read_is_told_before_anything_starts(tmp_path):
    env = {"REPLICAX_JOB_SECRET": None, "REPLICAX_JOB_SECRET_FILE": "/no/such/file"}
    with Launch(tmp_path, "--workers 1 --ps 1", "print('started')", env=env) as launch:
        assert launch.wait() == 2
    assert "The file that REPLICAX_JOB_SECRET_FILE names cannot be read" in launch.err and not launch.out


def test_the_end_of_the_chief_is_that_of_the_job(tmp_path):
    program = """
    chief.hear("worker 0.0", "worker 1.0", "ps 0.0", "evaluator 0.0")
    """
    with launched(tmp_path, "--workers 2 --ps 1 --evaluator", program) as launch:
        assert launch.wait() == 0, launch.output
        launch.nothing_left()
    assert launch.err == ""


@pytest.mark.thorough
def test_a_task_that_ignores_the_request_to_end_is_killed(tmp_path):
    program = """
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path("deaf").touch()
        for_ever()
    wait_for("deaf")
    """
    with Launch(tmp_path, "--workers 1 --ps 1 --grace 0.2", program) as launch:
        assert launch.wait() == 0, launch.output
        launch.nothing_left()


def test_a_failure_of_the_chief_is_told_and_the_others_are_ended(tmp_path):
    program = """
    chief.hear("worker 0.0", "ps 0.0")
    raise ValueError("boom")
    """
    with launched(tmp_path, "--workers 1 --ps 1", program) as launch:
        assert launch.wait() == 1, launch.output
    lines = launch.err[launch.err.index("replicax launch: ") :].splitlines()
    assert lines[:2] == [
        "replicax launch: chief 0 failed first: exit status 1",
        "  The last lines of its standard error:",
    ]
    assert lines[-2:] == ["    ValueError: boom", "  ps 0 and worker 0: ended by the launcher (killed by SIGTERM)"]


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("name, answer", [("worker 0", 5), ("ps 1", 5), ("evaluator 0", 5), ("worker 1", -9)])
def test_a_task_that_fails_is_restarted_at_its_address_while_the_others_go_on(name, answer, tmp_path):
    program = f"""
    others = {{"worker 0.0", "worker 1.0", "ps 0.0", "ps 1.0", "evaluator 0.0"}}
    chief.hear(*others)
    chief.end("{name}.0", {answer})
    chief.hear("{name}.1")
    assert set(chief.waiting) == others - {{"{name}.0"}} | {{"{name}.1"}}
    """
    with launched(tmp_path, "--workers 2 --ps 2 --evaluator", program) as launch:
        assert launch.wait() == 0, launch.output
    how = "killed by SIGKILL" if answer < 0 else "exit status 5"
    assert told(launch) == [f"{name} failed: {how}. It alone is restarted (restart 1 of at most 3)."]


def test_a_task_that_ends_before_the_chief_is_told_and_not_restarted(tmp_path):
    program = """
    chief.hear("worker 0.0", "worker 1.0", "ps 0.0")
    chief.end("worker 1.0", 0)
    wait_for("told")
    """
    with launched(tmp_path, "--workers 2 --ps 1", program) as launch:
        launch.wait_for("worker 1 ended with exit status 0, before the chief; it is not restarted.")
        (launch.folder / "told").touch()
        assert launch.wait() == 0, launch.output
    assert len(told(launch)) == 1


@pytest.mark.thorough
def test_the_job_goes_on_without_a_worker_that_fails_again_and_again(tmp_path):
    program = """
    for k in range(2):
        chief.hear(f"worker 1.{k}", "worker 0.0", "ps 0.0")
        chief.end(f"worker 1.{k}", 6)
    wait_for("told")
    chief.end("worker 0.0", 0)
    """
    with launched(tmp_path, "--workers 2 --ps 1 --max-task-restarts 1", program) as launch:
        launch.wait_for("It is not restarted any more (--max-task-restarts 1).")
        (launch.folder / "told").touch()
        assert launch.wait() == 0, launch.output
    assert told(launch) == [
        "worker 1 failed: exit status 6. It alone is restarted (restart 1 of at most 1).",
        "worker 1 failed: exit status 6. It is not restarted any more (--max-task-restarts 1).",
    ]


def test_the_job_ends_without_any_worker(tmp_path):
    program = """
    chief.hear("worker 0.0", "worker 1.0", "ps 0.0")
    chief.end("worker 1.0", 6)
    chief.end("worker 0.0", 7)
    for_ever()
    """
    with launched(tmp_path, "--workers 2 --ps 1 --max-task-restarts 0", program) as launch:
        assert launch.wait() in (6, 7), launch.output
    assert re.search("worker [01] failed first: exit status [67]\n", launch.err)
    assert "  chief 0 and ps 0: ended by the launcher (killed by SIGTERM)\n" in launch.err


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("names", [["worker 0", "worker 1"], ["ps 0"]])
def test_a_chief_does_not_wait_for_tasks_that_ended_before_it(names, tmp_path):
    program = f"""
    chief.hear("worker 0.0", "worker 1.0", "ps 0.0")
    for name in {names}:
        chief.end(f"{{name}}.0", 0)
    for_ever()
    """
    with launched(tmp_path, "--workers 2 --ps 1", program) as launch:
        assert launch.wait() == 1, launch.output
    text = f"The job cannot go on: {' and '.join(names)} ended with exit status 0 before the chief."
    assert told(launch)[-1] == text


def test_the_job_ends_without_one_of_its_servers(tmp_path):
    program = """
    chief.hear("worker 0.0", "ps 0.0", "ps 1.0")
    chief.end("ps 1.0", 8)
    for_ever()
    """
    with launched(tmp_path, "--workers 1 --ps 2 --max-task-restarts 0", program) as launch:
        assert launch.wait() == 8, launch.output
    assert "replicax launch: ps 1 failed first: exit status 8\n" in launch.err


def test_all_tasks_are_restarted_when_the_chief_fails(tmp_path):
    """As where a server was lost: what it held is in the checkpoint from which the chief begins again."""
    program = """
    print(attempt, cluster)
    chief.hear("worker 0.0", "ps 0.0")
    if attempt == 0:
        chief.end("ps 0.0", 1)
        chief.hear("ps 0.1")
        sys.exit(9)
    sys.exit(42 if attempt == 1 else 0)
    """
    with launched(tmp_path, "--workers 1 --ps 1 --max-restarts 1", program) as launch:
        assert launch.wait() == 0, launch.output
    assert told(launch) == [
        "ps 0 failed: exit status 1. It alone is restarted (restart 1 of at most 3).",
        "chief 0 failed first: exit status 9",
        "restart 1 of at most 1",
        "preempted: chief 0 ended with exit status 42.",
        "restart after a preemption",
    ]
    starts = [line.split(" ", 1) for line in re.findall(r"^\[chief 0\] +(.*)$", launch.out, re.MULTILINE)]
    assert [attempt for attempt, _ in starts] == ["0", "1", "2"]
    assert len({cluster for _, cluster in starts}) == 3  # new ports each time


@pytest.mark.sampled(3, others="thorough")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_launcher_ends_all_tasks(name, tmp_path):
    with Launch(tmp_path, "--workers 2 --ps 1 --max-restarts 1", "print('ready')\nfor_ever()") as launch:
        launch.wait_for("ready", 4)
        launch.signal(getattr(signal, name))
        assert launch.wait() == 128 + getattr(signal, name), launch.output
        launch.nothing_left()
    assert f"{name}: the tasks have 30 s to end" in launch.err
    assert f"interrupted by {name}; all tasks have ended" in launch.err
    assert "restart" not in launch.err


@pytest.mark.thorough
def test_a_second_interrupt_kills_all_tasks_at_once(tmp_path):
    program = "signal.signal(signal.SIGINT, lambda *_: print('not yet'))\nprint('ready')\nfor_ever()"
    with Launch(tmp_path, "--workers 1 --ps 1", program) as launch:
        launch.wait_for("ready", 3)
        launch.signal(signal.SIGINT)
        launch.wait_for("not yet", 3)
        launch.signal(signal.SIGINT)
        assert launch.wait(20.0) == 128 + signal.SIGINT, launch.output
        launch.nothing_left()


def test_the_death_of_the_launcher_ends_all_tasks(tmp_path):
    with Launch(tmp_path, "--workers 1 --ps 1", "print('ready')\nfor_ever()") as launch:
        launch.wait_for("ready", 3)
        launch.signal(signal.SIGKILL)
        assert launch.wait() == -signal.SIGKILL
        launch.nothing_left()


@pytest.mark.parametrize(
    "options, message",
    [
        ("--workers 1 --evaluator", "--evaluator is for jobs with parameter servers, and needs --ps."),
        ("--workers 1 --max-task-restarts 1", "--max-task-restarts is for jobs with parameter servers"),
        ("--workers 1 --ps 0", "argument --ps: expected a whole number, at least 1; got '0'"),
        (
            "--workers 2 --ps 1 --coordinator 192.0.2.1:4000 --worker-rank 0",
            "Tasks at addresses beyond this machine, such as '192.0.2.1:4000', need a secret. Make one",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path):
    unset = {"REPLICAX_JOB_SECRET": None, "REPLICAX_JOB_SECRET_FILE": None}
    with Launch(tmp_path, options, "print('started')", env=unset) as launch:
        assert launch.wait() == 2
    assert message in launch.err and not launch.out


def test_several_machines_do_not_start_without_authentication(tmp_path):
    options = "--workers 2 --ps 1 --coordinator 192.0.2.1:4000 --worker-rank 0"
    with Launch(tmp_path, options, "print('started')", env={"REPLICAX_JOB_SECRET": "none"}) as launch:
        assert launch.wait() == 2
    assert "needs the job's secret, and REPLICAX_JOB_SECRET is 'none'. Make one" in launch.err and not launch.out


# Several machines.

SECRET = {"REPLICAX_JOB_SECRET": "the secret of these tests"}


def test_tasks_are_spread_over_the_machines_and_end_with_the_chief(tmp_path):
    program = of_chief("""
    chief.hear("worker 0.0", "worker 1.0", "worker 2.0", "ps 0.0", "ps 1.0", "ps 2.0", "evaluator 0.0")
    chief.end("worker 1.0", 3)
    chief.end("ps 1.0", 4)
    chief.hear("worker 1.1", "ps 1.1")
    """)
    ranks = ["1 --workers-here 2", "0"]
    options = "--workers 3 --ps 3 --evaluator"
    program = program.replace("kind, cluster =", "print('started')\nkind, cluster =")
    with machines(tmp_path, ranks, program, options, SECRET) as launches:
        assert [launch.wait() for launch in launches] == [0, 0], [launch.output for launch in launches]
    names = [set(re.findall(r"^\[(\w+ \d+)\] +started", launch.out, re.MULTILINE)) for launch in launches]
    assert names == [{"worker 1", "worker 2", "ps 1"}, {"chief 0", "evaluator 0", "worker 0", "ps 0", "ps 2"}]
    assert sorted(told(launches[0])) == [
        "ps 1 failed: exit status 4. It alone is restarted (restart 1 of at most 3).",
        "worker 1 failed: exit status 3. It alone is restarted (restart 1 of at most 3).",
    ]
    assert launches[1].err == ""


def test_a_failure_of_the_chief_is_told_on_all_machines(tmp_path):
    program = of_chief('chief.hear("worker 0.0", "worker 1.0", "ps 0.0")\nsys.exit(attempt + 4)')
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --ps 1 --max-restarts 1", SECRET) as launches:
        assert [launch.wait() for launch in launches] == [5, 5], [launch.output for launch in launches]
    for launch in launches:
        assert told(launch) == [
            "chief 0 failed first: exit status 4", "restart 1 of at most 1", "chief 0 failed first: exit status 5"
        ]  # fmt: skip


@pytest.mark.sampled(3, others="thorough")
@pytest.mark.parametrize(
    "options, env, message",
    [
        ("--ps 1", {"REPLICAX_JOB_SECRET": "another than that of the leader"}, "Its job has another secret"),
        ("--ps 1", {"REPLICAX_JOB_SECRET": "none"}, "Its job has another secret"),
        ("--ps 2", {}, "It has --ps 2, but the launcher of worker 0 has 1."),
        ("", {}, "It has --ps 0, but the launcher of worker 0 has 1."),
    ],
)
def test_launchers_that_disagree_are_told(options, env, message, tmp_path):
    with machines(tmp_path, ["0"], "print('started')", "--workers 2 --ps 1", SECRET) as (zero,):
        others = f"--workers 2 {options} --coordinator {coordinator_of(zero)} --worker-rank 1"
        with Launch(tmp_path, others, "print('started')", env={**SECRET, **env}) as one:
            assert one.wait() == 2, one.output
            assert message in one.err
        zero.signal(signal.SIGTERM)
        assert zero.wait() == 128 + signal.SIGTERM and not zero.out


def coordinator_of(launch):
    return re.findall(r"127\.0\.0\.1:\d+", " ".join(map(str, launch._process.args)))[0]


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("name, status", [("SIGTERM", 143), ("SIGKILL", -9)])
def test_a_machine_with_workers_alone_may_leave_and_come_back(name, status, tmp_path):
    program = of_chief("""
    chief.hear("worker 0.0", "worker 1.0", "worker 2.0", "ps 0.0")
    print("ready")
    wait_for("go")
    del chief.waiting["worker 1.0"], chief.waiting["worker 2.0"]
    chief.hear("worker 1.0", "worker 2.0")
    """)
    ranks = ["0", "1 --workers-here 2"]
    with machines(tmp_path, ranks, program, "--workers 3 --ps 1 --max-restarts 1", SECRET) as (zero, one):
        zero.wait_for("ready")
        one.signal(getattr(signal, name))
        assert one.wait() == status
        one.nothing_left()
        zero.wait_for("worker 1 and worker 2 on 127.0.0.1 left")
        again = f"--workers 3 --ps 1 --coordinator {coordinator_of(zero)} --worker-rank 1 --workers-here 2"
        with Launch(tmp_path, f"{again} --host 127.0.0.2", program, env=SECRET) as elsewhere:
            assert elsewhere.wait() == 2
        assert "were at 127.0.0.1, where the others look for them, and it is at 127.0.0.2" in elsewhere.err
        (zero.folder / "go").touch()
        with Launch(tmp_path, again, program, env=SECRET) as back:
            assert [zero.wait(), back.wait()] == [0, 0], [zero.output, back.output]
    how = ": its launcher was lost" * (name == "SIGKILL")
    assert told(zero) == [
        f"worker 1 and worker 2 on 127.0.0.1 left{how}. The job goes on.",
        "worker 1 and worker 2 on 127.0.0.1 came back.",
    ]
    if name == "SIGTERM":
        text = "interrupted by SIGTERM; worker 1 and worker 2 on 127.0.0.1 left. The job goes on."
        assert told(one)[-1] == text


def test_the_job_is_restarted_without_a_machine_that_left(tmp_path):
    program = of_chief("""
    chief.hear("worker 0.0", "ps 0.0", *["worker 1.0"] * (attempt == 0))
    print("ready")
    wait_for("go")
    sys.exit(0 if attempt else 9)
    """)
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --ps 1 --max-restarts 1", SECRET) as (zero, one):
        zero.wait_for("ready")
        one.signal(signal.SIGTERM)
        assert one.wait() == 143, one.output
        zero.wait_for("worker 1 on 127.0.0.1 left")
        (zero.folder / "go").touch()
        assert zero.wait() == 0, zero.output
    assert "worker 1 on 127.0.0.1 left before this attempt. The job goes on." in told(zero)


@pytest.mark.thorough
def test_a_launcher_that_was_silent_goes_on(tmp_path):
    program = of_chief("""
    chief.hear("worker 0.0", "worker 1.0", "ps 0.0")
    print("ready")
    wait_for("go")
    """)
    env = {**SECRET, "REPLICAX_HEARTBEAT_TIMEOUT": "4"}
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --ps 1", env) as (zero, one):
        zero.wait_for("ready")
        one.signal(signal.SIGSTOP)
        zero.wait_for("worker 1 on 127.0.0.1 left: its launcher has not answered for ")
        one.signal(signal.SIGCONT)
        zero.wait_for("worker 1 on 127.0.0.1 came back.")
        (zero.folder / "go").touch()
        assert [zero.wait(), one.wait()] == [0, 0], [zero.output, one.output]


def test_a_launcher_waits_while_the_one_before_it_may_still_be_there(tmp_path):
    program = of_chief("""
    chief.hear("worker 0.0", "worker 1.0", "ps 0.0")
    print("ready")
    del chief.waiting["worker 1.0"]
    chief.hear("worker 1.0")
    """)
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --ps 1", SECRET) as (zero, one):
        zero.wait_for("ready")
        again = f"--workers 2 --ps 1 --coordinator {coordinator_of(zero)} --worker-rank 1"
        with Launch(tmp_path, again, program, env=SECRET) as back:
            back.wait_for("worker 1 on 127.0.0.1 still runs, as far as is known. This launcher waits for its end.")
            one.signal(signal.SIGTERM)
            assert one.wait() == 143, one.output
            assert [zero.wait(), back.wait()] == [0, 0], [zero.output, back.output]
    assert told(zero)[-1] == "worker 1 on 127.0.0.1 came back."


@pytest.mark.sampled(2, others="thorough")
@pytest.mark.parametrize("name, status", [("SIGTERM", 143), ("SIGKILL", 1)])
def test_the_job_ends_with_a_machine_that_has_a_server(name, status, tmp_path):
    program = of_chief("""
    chief.hear("worker 0.0", "worker 1.0", "ps 0.0", "ps 1.0")
    print("ready")
    for_ever()
    """)
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --ps 2", SECRET) as (zero, one):
        zero.wait_for("ready")
        one.signal(getattr(signal, name))
        assert zero.wait() == status, zero.output
        one.wait()
    reasons = {"SIGTERM": "interrupted by SIGTERM on 127.0.0.1", "SIGKILL": "ps 1 failed first: its launcher was lost"}
    assert f"replicax launch: {reasons[name]}" in zero.err


def test_a_launcher_whose_leader_is_lost_ends_its_tasks(tmp_path):
    program = of_chief('chief.hear("worker 0.0", "worker 1.0", "ps 0.0")\nprint("ready")\nfor_ever()')
    with machines(tmp_path, ["0", "1"], program, "--workers 2 --ps 1", SECRET) as (zero, one):
        zero.wait_for("ready")
        zero.signal(signal.SIGKILL)
        assert zero.wait() == -signal.SIGKILL
        assert one.wait() == 2, one.output
    assert "The launcher of worker 0, at 127.0.0.1:" in one.err
