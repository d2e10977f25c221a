"""`map` with `use_processes`: the function runs in other processes, and gives what it gives here."""

import gc
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from replicax._data.ragged import RaggedTensor
from replicax.data import AUTOTUNE, Dataset

R = Dataset.range
HERE = os.getpid()


class Sample(NamedTuple):
    number: np.ndarray
    process: np.ndarray


def of_process(x):
    """A large array, and the process in which it was made."""
    return Sample(np.full(30_000, int(x), np.int64), np.int64(os.getpid()))


def in_processes(dataset, function, count=1, **options):
    return dataset.map(function, num_parallel_calls=count, use_processes=True, **options)


def ended(process):
    """Waits for a process to end, also as one that nobody has asked for its result yet."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{process}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_elements_come_in_order_from_the_same_processes_in_each_pass():
    dataset = in_processes(R(40), of_process, 2)
    processes = []
    for _ in range(2):
        found = list(dataset.as_numpy_iterator())
        assert all(isinstance(sample, Sample) for sample in found)
        assert [sample.number.tolist() for sample in found] == [[i] * 30_000 for i in range(40)]
        processes.append({int(sample.process) for sample in found})
    assert HERE not in processes[0] | processes[1] and len(processes[0] | processes[1]) <= 2
    in_any_order = in_processes(R(40), of_process, 2, deterministic=False)
    assert sorted(int(s.number[0]) for s in in_any_order) == list(range(40))


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="there is no /proc")
def test_processes_end_with_the_dataset_and_their_arrays_stay():
    dataset = in_processes(R(6).repeat(20), of_process)
    found = list(dataset.as_numpy_iterator())  # all results are held, so no place for one is used twice
    processes = {int(sample.process) for sample in found}
    del dataset
    gc.collect()
    assert all(map(ended, processes))
    assert [set(sample.number.tolist()) for sample in found] == [{i} for i in range(6)] * 20


def kinds(x):
    n = int(x)
    return {
        "ragged": RaggedTensor.from_row_lengths(np.arange(n, dtype=np.int64), [n, 0]),
        "strings": np.array([b"a" * n, b"\0"], object),
        "half": jnp.full((2, n), n, jnp.bfloat16),
        "nothing": np.zeros((0, n), np.int8),
        "bools": (n % 2 == 0, np.float64(n)),
    }


def test_every_kind_of_result_comes_back_as_it_is_made():
    def told(dataset):
        return [repr(element) for element in dataset]

    assert told(in_processes(R(7), kinds)) == told(R(7).map(kinds))
    numbers = lambda x: {"s": b"%d" % int(x), "x": np.float32(x)}  # noqa: E731
    batches = [
        {"s": b["s"].tolist(), "x": b["x"].tolist()} for b in in_processes(R(70), numbers).batch(32).as_numpy_iterator()
    ]
    assert [len(b["s"]) for b in batches] == [32, 32, 6]
    assert sum((b["s"] for b in batches), []) == [b"%d" % i for i in range(70)]
    assert sum((b["x"] for b in batches), []) == list(range(70))


def failing(x):
    if int(x) == 3:
        raise KeyError("here")
    return x


def test_an_error_is_raised_in_its_place():
    iterator = iter(in_processes(R(6), failing))
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="here") as caught:
        next(iterator)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert [int(x) for x in iterator] == [4, 5]
    assert [int(x) for x in in_processes(R(6), failing).ignore_errors()] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("number", "report"), [(signal.SIGKILL, r"has ended \(killed by signal 9\)"), (signal.SIGSTOP, "was stopped")]
)
def test_a_process_that_is_killed_or_stopped_is_named_and_replaced(caplog, number, report):
    def function(x):
        if int(x) == 5 and os.getpid() != HERE:
            os.kill(os.getpid(), number)
        return x, os.getpid()

    samples = list(in_processes(R(200), function).as_numpy_iterator())
    assert [int(x) for x, _ in samples] == list(range(200))
    first, last = int(samples[0][1]), int(samples[-1][1])
    assert HERE not in (first, last) and first != last
    (message,) = caplog.messages
    assert re.fullmatch(rf"`map_func` .*: process {first} {report}\. Another one replaces it; no .*", message), message


def test_a_function_that_ends_each_process_is_called_here(caplog):
    def function(x):
        if os.getpid() != HERE:
            os._exit(3)
        return x

    assert [int(x) for x in in_processes(R(40), function)] == list(range(40))
    assert [message.count("(exit status 3)") for message in caplog.messages] == [1, 1, 1]
    assert "is called in this process, and in no other" in caplog.messages[-1]


def test_a_restored_iterator_goes_on():
    dataset = in_processes(R(20).shuffle(20, seed=3), lambda x: x * 2).batch(3)
    iterator = iter(dataset)
    for _ in range(2):
        next(iterator)
    again = iter(dataset)
    again.restore_state(iterator.save_state())
    assert [x.tolist() for x in again] == [x.tolist() for x in iterator]


def test_what_the_program_has_set_in_its_modules_goes_along(tmp_path, monkeypatch):
    (tmp_path / "own_settings.py").write_text("factor = 1\n")
    (tmp_path / "own_pipeline.py").write_text(
        "import own_settings as settings\nprint('imported')\n\ndef scaled(x):\n    return x * settings.factor\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = ("own_settings", "own_pipeline")
    settings, pipeline = (importlib.import_module(name) for name in names)
    settings.factor = 10
    try:
        assert [int(x) for x in in_processes(R(4), pipeline.scaled)] == [0, 10, 20, 30]
    finally:
        for name in names:
            del sys.modules[name]


def test_what_the_program_sets_later_goes_along_in_the_next_pass():
    settings = {"factor": 1}
    dataset = in_processes(R(4), lambda x: (x * settings["factor"], os.getpid()))
    for factor in (1, 10, 100):
        settings["factor"] = factor
        found = list(dataset.as_numpy_iterator())
        assert [x for x, _ in found] == [i * factor for i in range(4)]
        assert HERE not in {process for _, process in found}


def test_functions_share_processes():
    datasets = [in_processes(R(4), lambda x, i=i: (x * i, os.getpid())) for i in range(3)]
    together = list(Dataset.zip(*datasets).as_numpy_iterator())
    assert [[x for x, _ in element] for element in together] == [[0, i, 2 * i] for i in range(4)]
    assert len({process for element in together for _, process in element} - {HERE}) == 1


def test_an_element_that_cannot_go_to_a_process_is_made_here(caplog):
    lock = threading.Lock()

    def of_generator(i):
        with lock:
            yield i

    spec = R(1).element_spec
    windows = R(5).map(lambda i: Dataset.from_generator(lambda: of_generator(i), output_signature=spec))
    firsts = in_processes(windows, lambda window: next(iter(window)) * 2)
    assert [int(x) for x in firsts] == [0, 2, 4, 6, 8]
    assert "is called in this process, and in no other" in caplog.text


def test_a_function_that_cannot_be_made_there_is_called_here(caplog, capfd):
    class Fragile:
        def __reduce__(self):
            return int, ("no number",)

    fragile = Fragile()
    assert [int(x) for x in in_processes(R(4), lambda x: x + (fragile is None))] == [0, 1, 2, 3]
    assert "ValueError: invalid literal for int()" in caplog.text
    assert capfd.readouterr().err == ""


def _raised_here(process):
    raise OSError(f"not in {process}")


class Unreadable(NamedTuple):
    number: np.ndarray

    def __reduce__(self):
        return _raised_here, (HERE,)


def test_results_that_cannot_be_read_are_made_here(caplog):
    found = list(in_processes(R(4), lambda x: Unreadable(x * 2)).as_numpy_iterator())
    assert [int(x.number) for x in found] == [0, 2, 4, 6]
    assert "its results cannot be read: not in" in caplog.text
    others = in_processes(R(4), lambda x: (x, os.getpid())).as_numpy_iterator()
    assert HERE not in {process for _, process in others}  # other functions still have their processes


def test_what_cannot_go_to_a_process_is_an_error():
    lock = threading.Lock()

    def locked(x):
        with lock:
            return x

    with pytest.raises(TypeError, match="`map_func` of `Dataset.map` cannot run in other .*: it cannot be pickled"):
        list(in_processes(R(3), locked))
    other = R(2)
    with pytest.raises(TypeError, match="it uses `Dataset`, which belongs to this process"):
        list(in_processes(R(3), lambda x: x + sum(1 for _ in other)))
    with pytest.raises(ValueError, match="`use_processes` needs `num_parallel_calls`"):
        R(3).map(failing, use_processes=True)


def test_the_environment_says_how_many(monkeypatch):
    monkeypatch.setenv("REPLICAX_INPUT_PROCESSES", "1")
    found = list(in_processes(R(20), of_process, AUTOTUNE))
    assert len({int(sample.process) for sample in found} - {HERE}) == 1
    monkeypatch.setenv("REPLICAX_INPUT_PROCESSES", "0")
    for count in (AUTOTUNE, 2):
        assert {int(sample.process) for sample in in_processes(R(5), of_process, count)} == {HERE}
    monkeypatch.setenv("REPLICAX_INPUT_PROCESSES", "many")
    with pytest.raises(ValueError, match="REPLICAX_INPUT_PROCESSES in the environment is how many .*: 'many'"):
        in_processes(R(5), of_process, AUTOTUNE)


KILLED = """
import os
import numpy as np
from replicax.data import Dataset

def function(x):
    return np.int64(os.getpid())

if __name__ == "__main__":
    for process in Dataset.range(1000).map(function, num_parallel_calls=2, use_processes=True):
        print(int(process) != os.getpid(), flush=True)
        os._exit(3)
raise SystemExit("only the program itself runs this")
"""


def test_processes_end_with_the_program_which_they_do_not_run(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    # Without an end of the processes there is no end of the output.
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "True\n", "")
