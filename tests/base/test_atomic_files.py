"""What is replaced and deleted on disk: nothing of the user's, nothing of another process, and what was left behind."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from strategies import WORKERS

import replicax as rx
from replicax._base import atomic_files as atomic
from replicax._checkpoint import files as files

pytestmark = pytest.mark.skipif(WORKERS > 1, reason="jobs have tests of their own")

Checkpoint, CheckpointManager, Dataset = rx.train.Checkpoint, rx.train.CheckpointManager, rx.data.Dataset
LEFT = ".replicax-unfinished-"


def names(folder):
    return sorted(os.listdir(folder))


def tree(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in Path(folder).rglob("*")}


def restored(manager_of, folder, **options):
    v = rx.Variable(0.0)
    return manager_of(Checkpoint(v=v), folder, **options).restore_or_initialize(), float(v)


def saved(folder, *values, max_to_keep=9, name="ckpt"):
    v = rx.Variable(0.0)
    manager = CheckpointManager(Checkpoint(v=v), folder, max_to_keep, checkpoint_name=name)
    for value in values:
        v.assign(value)
        manager.save()
    return manager


# Files of the user.


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working folder, which has a file, an empty folder, a checkpoint, and a manager's folder."""
    folder = tmp_path / "project"
    (folder / "work" / "here").mkdir(parents=True)
    (folder / "precious.txt").write_text("x")
    (folder / "run-1").mkdir()
    (folder / "run-1" / "notes").write_text("mine")
    (folder / "empty").mkdir()
    monkeypatch.chdir(folder / "work")
    Checkpoint(v=rx.Variable(1.0)).write(folder / "model")
    saved(folder / "managed", 1.0)
    shutil.copytree(folder / "model", folder / "mine too")
    (folder / "mine too" / "notes").write_text("mine")
    (folder / "linked").symlink_to(folder / "mine too")
    return folder


def test_saving_does_not_replace_other_folders(project):
    before = tree(project)
    checkpoint, dataset = Checkpoint(v=rx.Variable(2.0)), Dataset.range(3)
    refused = rx.InvalidArgumentError
    cases = [
        (refused, "is empty", ""),
        (refused, "is empty", b""),
        (refused, "is the working folder", "."),
        (refused, "is the working folder", str(project / "work" / "..") + "/work/"),
        (refused, "has the working folder in it", ".."),
        (refused, "has the working folder in it", "/"),
        *([(refused, "is a mount point", "/proc")] if os.path.ismount("/proc") else []),
        (refused, "characters that no file name has", "a\ud800b"),
        (refused, "characters that no file name has", "a\0b"),
        (FileExistsError, "is there and is no .*: it is left as it is", project / "managed"),
        (FileExistsError, "is there and is no .*: it is left as it is", project / "run-1"),
        (FileExistsError, "such as notes|is no saved dataset", project / "mine too"),
        (FileExistsError, "such as notes|is no saved dataset", project / "linked"),
        (FileExistsError, "precious.txt is a file", project / "precious.txt"),
    ]
    for kind, message, path in cases:
        for write in (checkpoint.write, dataset.save):
            with pytest.raises(kind, match=message):
                write(path)
    with pytest.raises(FileExistsError, match="run-1 is there and is no checkpoint"):
        checkpoint.save(project / "run")
    with pytest.raises(FileExistsError, match="is there and is no saved dataset"):
        dataset.save(project / "model")
    with pytest.raises(ValueError, match="is empty"):
        checkpoint.save("")
    assert tree(project) == before and int(checkpoint.save_counter) == 0
    checkpoint.write(project / "empty")
    dataset.save(project / "work" / "here")
    checkpoint.write(project / "model")
    assert tree(project) != before and set(names(project)) == {name.split("/")[0] for name in before}


def cut(record):
    record.write_text(record.read_text()[:10])


def of_another_program(record):
    record.write_text("{}")


def a_folder_with_a_file(record):
    a_folder(record)
    (record / "notes").write_text("mine")


@pytest.mark.parametrize("damage", [cut, of_another_program, a_folder_with_a_file])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_nothing_is_deleted_from_a_folder_with_a_damaged_record(tmp_path, monkeypatch, damage, exchange):
    """Which of its files are the user's cannot be told any more."""
    if not exchange:
        monkeypatch.setattr(atomic, "_renameat2", None)
    manager = CheckpointManager(Checkpoint(v=rx.Variable(0.0)), tmp_path, max_to_keep=1)
    saves = {
        "replicax.json": lambda: Checkpoint(v=rx.Variable(1.0)).write(tmp_path / "model"),
        "replicax-dataset.json": lambda: Dataset.range(3).save(tmp_path / "data"),
    }
    for record, save in saves.items():
        folder = Path(save() or tmp_path / "data")
        (folder / "thesis.txt").write_text("mine")
        damage(folder / record)
        with pytest.warns(UserWarning, match="is kept as"):
            save()
        (kept,) = tmp_path.glob(f"{folder.name}.damaged-*")
        assert (kept / "thesis.txt").read_text() == "mine" and not (folder / "thesis.txt").exists()
        assert not damage.__name__.startswith("a_folder") or (kept / record / "notes").read_text() == "mine"
    if damage is a_folder_with_a_file:  # then it is no checkpoint for a manager
        return
    first = Path(manager.save())
    (first / "thesis.txt").write_text("mine")
    damage(first / "replicax.json")
    with pytest.warns(UserWarning, match="is kept. The file replicax.json"):
        manager.save()
    assert (first / "thesis.txt").read_text() == "mine"


def test_a_path_may_be_bytes_or_a_link_or_have_any_character(tmp_path):
    v = rx.Variable(0.0)
    checkpoint = Checkpoint(v=v)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "to come").symlink_to("new")
    paths = [
        "bytes",
        "link",
        "to come",
        "back\\slash",
        "in a back\\slash/ckpt",
        "not \udcff utf-8",
        "\udcff/ckpt",
        "日 本%?#",
    ]
    for number, name in enumerate(paths, 1):
        v.assign(number)
        path = os.fsencode(tmp_path / name) if number == 1 else str(tmp_path / name)
        assert checkpoint.write(path) == str(tmp_path / name)
        checkpoint.write(path)  # and over it
        v.assign(0)
        checkpoint.read(path).assert_consumed()
        assert float(v) == number and rx.train.load_checkpoint(path).has_tensor("v/.ATTRIBUTES/VARIABLE_VALUE")
    assert rx.train.latest_checkpoint(os.fsencode(tmp_path / "real")) is None
    assert (tmp_path / "link").is_symlink() and files.RECORD in names(tmp_path / "real") and (tmp_path / "new").is_dir()
    assert not [name for name in names(tmp_path) if name.startswith(LEFT)]


def test_a_full_disk_is_a_clear_error_and_changes_nothing(run_python, tmp_path):
    done = run_python(f"""
        import os, resource, signal
        import numpy as np
        import replicax as rx
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        v = rx.Variable(np.random.default_rng(0).normal(size=100_000).astype(np.float32))
        checkpoint = rx.train.Checkpoint(v=v)
        checkpoint.save({str(tmp_path / "ckpt")!r})
        before = sorted(os.listdir({str(tmp_path)!r}))
        folder = {str(tmp_path)!r}
        saves = {{
            "a new one": lambda: checkpoint.write(folder + "/new"),
            "over one": lambda: checkpoint.write(folder + "/ckpt-1"),
            "dataset": lambda: rx.data.Dataset.range(100_000).batch(50_000).save(folder + "/saved"),
        }}
        files = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else os.curdir
        for limit in (1 << 16, 50, 0):  # the arrays, the records, the files of staging folders cannot be written
            for name, save in saves.items():
                opened, error = len(os.listdir(files)), None
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                try:
                    save()
                except (OSError, rx.CheckpointError) as raised:
                    error = raised
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                assert "File too large" in str(error), (limit, name, error)
                if name != "dataset":
                    assert isinstance(error, rx.CheckpointError), (limit, name, error)
                    assert "could not be written, and what was there is as before" in str(error), (limit, name, error)
                del error
                assert limit or len(os.listdir(files)) == opened, (limit, name)
        assert sorted(os.listdir({str(tmp_path)!r})) == before
        checkpoint.restore({str(tmp_path / "ckpt-1")!r}).assert_consumed()
        print("done")
    """)
    assert done.stdout.endswith("done\n"), done.stderr


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(tmp_path, monkeypatch, exchange):
    """As a process that evaluates reads what the one that trains writes: all of it is of one of the two."""
    if not exchange:
        monkeypatch.setattr(atomic, "_renameat2", None)
    path = str(tmp_path / "model")
    for during in ("_checksum", "_tensorstore_path"):  # while files are checked, and before values are read
        Checkpoint(v=rx.Variable(1.0), w=rx.Variable(1.0)).write(path)

        plain = getattr(files, during)

        def replaced(*args, plain=plain, during=during):
            monkeypatch.setattr(files, during, plain)
            Checkpoint(v=rx.Variable([2.0, 2.0])).write(path)
            return plain(*args)

        monkeypatch.setattr(files, during, replaced)
        read = rx.train.load_checkpoint(path)
        assert read.get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE").tolist() == [2.0, 2.0]
        assert not read.has_tensor("w/.ATTRIBUTES/VARIABLE_VALUE")


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_checkpoint_replaced_during_the_check_for_other_files_is_checked_again(tmp_path, monkeypatch, exchange):
    """As by another thread: the files that come are not the user's, and a file of the user is still found."""
    if not exchange:
        monkeypatch.setattr(atomic, "_renameat2", None)
    path, read = str(tmp_path / "model"), atomic.read_record
    checkpoint = Checkpoint(v=rx.Variable(1.0))
    checkpoint.write(path)

    def then_replaced(record):
        content = read(record)
        monkeypatch.setattr(atomic, "read_record", read)
        Checkpoint(v=rx.Variable([2.0, 2.0])).write(path)
        return content

    monkeypatch.setattr(atomic, "read_record", then_replaced)
    checkpoint.write(path)
    assert float(rx.train.load_variable(path, "v/.ATTRIBUTES/VARIABLE_VALUE")) == 1.0

    (Path(path) / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="notes"):
        checkpoint.write(path)


def test_the_working_folder_may_change_while_a_dataset_is_read_and_written(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    Dataset.range(3).save("saved")
    loaded = Dataset.load("saved")
    passes = [iter(Dataset.range(3).cache("cache")), iter(Dataset.range(3).snapshot("snapshot"))]
    for elements in passes:
        next(elements)
    monkeypatch.chdir(tmp_path / "second")
    assert [[int(i) for i in elements] for elements in (*passes, loaded)] == [[1, 2], [1, 2], [0, 1, 2]]
    assert names(tmp_path / "second") == [] and names(tmp_path / "first") == ["cache", "saved", "snapshot"]


def test_a_snapshot_of_one_process_is_not_replaced_by_another_that_began_before(tmp_path):
    """It may be read already, file by file."""
    slow = iter(Dataset.range(3).snapshot(str(tmp_path / "snapshot")))
    next(slow)
    assert [int(i) for i in Dataset.range(4, 7).snapshot(str(tmp_path / "snapshot"))] == [4, 5, 6]
    before = tree(tmp_path / "snapshot")
    assert [int(i) for i in slow] == [1, 2]
    assert tree(tmp_path / "snapshot") == before and names(tmp_path) == ["snapshot"]


# The file that names the checkpoints.


def lost(file):
    file.unlink()


def dangling(file):
    file.unlink()
    file.symlink_to("nowhere")


def a_folder(file):
    file.unlink()
    file.mkdir()


def of_nothing_that_is_there(file):
    files.write_record(
        file,
        {
            "all_model_checkpoint_paths": ["ckpt-7"],
            "all_model_checkpoint_timestamps": [1.0],
            "last_preserved_timestamp": None,
        },
    )


@pytest.mark.parametrize("lose", [lost, dangling, a_folder, of_nothing_that_is_there])
def test_training_does_not_begin_anew_where_the_list_of_checkpoints_is_lost(lose, tmp_path):
    saved(tmp_path, 1.0, 2.0, 3.0)
    lose(tmp_path / "checkpoint")
    for number in (3, 2, 1):  # as copies have them
        os.utime(tmp_path / f"ckpt-{number}" / files.RECORD)
    with pytest.warns(UserWarning, match=r"checkpoint (is|names).*looked for.*: ckpt-1, ckpt-2, ckpt-3"):
        assert restored(CheckpointManager, tmp_path, max_to_keep=3) == (str(tmp_path / "ckpt-3"), 3.0)
    with pytest.warns(UserWarning):
        assert rx.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-3")
    v = rx.Variable(4.0)
    checkpoint = Checkpoint(v=v)
    with pytest.warns(UserWarning):
        manager = CheckpointManager(checkpoint, tmp_path, 3, init_fn=lambda: pytest.fail("begun anew"))
    manager.restore_or_initialize()
    if lose is a_folder:
        before = tree(tmp_path)
        for save in (manager.save, lambda: checkpoint.save(tmp_path / "ckpt")):
            with (
                warnings.catch_warnings(),
                pytest.raises(IsADirectoryError, match=r"ckpt-4 was not written. .*checkpoint is a folder"),
            ):
                warnings.simplefilter("ignore")
                save()
        assert tree(tmp_path) == before and int(checkpoint.save_counter) == 3
        (tmp_path / "checkpoint").rmdir()
    manager.save()
    assert names(tmp_path) == ["checkpoint", "ckpt-2", "ckpt-3", "ckpt-4"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(CheckpointManager, tmp_path, max_to_keep=3)[1] == 3.0


def test_checkpoints_that_may_be_kept_for_good_are_not_deleted_where_the_list_is_lost(tmp_path):
    saved(tmp_path, 1.0, 2.0, 3.0)
    lost(tmp_path / "checkpoint")
    with pytest.warns(UserWarning, match="is missing"):
        manager = CheckpointManager(Checkpoint(v=rx.Variable(0.0)), tmp_path, 1, keep_checkpoint_every_n_hours=2.0)
    manager.restore_or_initialize()
    manager.save()
    manager.save()
    assert names(tmp_path) == ["checkpoint", "ckpt-1", "ckpt-2", "ckpt-3", "ckpt-5"]
    assert manager.checkpoints == [str(tmp_path / "ckpt-5")]


def test_training_starts_without_a_warning_in_an_empty_folder(tmp_path):
    begun = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = CheckpointManager(
            Checkpoint(v=rx.Variable(1.0)), tmp_path / "new", 2, init_fn=lambda: begun.append(1)
        )
        assert manager.restore_or_initialize() is None and begun == [1]
        assert rx.train.latest_checkpoint(tmp_path) is rx.train.get_checkpoint_state(tmp_path) is None
        manager.save()
        Checkpoint(v=rx.Variable(1.0)).save(tmp_path / "other" / "ckpt")


def test_a_manager_deletes_only_checkpoints_of_its_name_in_its_folder(tmp_path):
    folder = tmp_path / "run"
    saved(folder, 1.0)
    others = [
        tmp_path / "precious",
        tmp_path / "elsewhere" / "ckpt-1",
        folder / "ckpt-8",
        folder / "notes",
        folder / "ckpt-x",
    ]
    for other in others:
        other.mkdir(parents=True)
        (other / "thesis").write_text("x")
    Checkpoint(v=rx.Variable(5.0)).write(tmp_path / "outside" / "ckpt-4")
    Checkpoint(v=rx.Variable(5.0)).write(folder / "model-4")
    Checkpoint(v=rx.Variable(5.0)).write(folder / "sub" / "ckpt-4")
    Checkpoint(v=rx.Variable(5.0)).write(folder / "ckpt-9")
    (folder / "ckpt-9" / "notes").write_text("x")
    os.symlink(tmp_path / "outside" / "ckpt-4", folder / "ckpt-5")
    before = tree(tmp_path)
    index = files.read_record(folder / "checkpoint")
    crafted = ["../precious", str(tmp_path / "precious"), "../elsewhere/ckpt-1", "../outside/ckpt-4", "sub/ckpt-4"]
    crafted += ["ckpt-5", "ckpt-8", "ckpt-9", "ckpt-x", "notes", "model-4", "", ".", "..", "ckpt-1"]
    index["all_model_checkpoint_paths"] = crafted
    index["all_model_checkpoint_timestamps"] = [1.0] * len(crafted)
    files.write_record(folder / "checkpoint", index)
    manager = CheckpointManager(Checkpoint(v=rx.Variable(6.0)), folder, 1)
    with pytest.warns(
        UserWarning, match="is kept. .*ckpt-9 is a checkpoint in which there are files that do not belong"
    ):
        manager.save(100)
    after = tree(tmp_path)
    gone = {name.split("/")[1] for name in before if name not in after}
    assert gone == {"ckpt-1"} and names(tmp_path / "precious") == ["thesis"]


def test_managers_of_two_names_share_a_folder(tmp_path):
    a, b = saved(tmp_path, 1.0, 2.0, name="a"), saved(tmp_path, 11.0, 12.0, 13.0, max_to_keep=2, name="b")
    Checkpoint(v=rx.Variable(21.0)).save(tmp_path / "c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(CheckpointManager, tmp_path, max_to_keep=1, checkpoint_name="a") == (str(tmp_path / "a-2"), 2.0)
        assert restored(CheckpointManager, tmp_path, max_to_keep=1, checkpoint_name="b") == (
            str(tmp_path / "b-3"),
            13.0,
        )
        # One without any of its own goes on from the newest of the others, as TensorFlow's does.
        assert restored(CheckpointManager, tmp_path, max_to_keep=1)[1] == 21.0
    assert names(tmp_path) == ["a-1", "a-2", "b-2", "b-3", "c-1", "checkpoint"]
    a.save()
    assert [Path(path).name for path in rx.train.get_checkpoint_state(tmp_path).all_model_checkpoint_paths] == [
        "b-2", "b-3", "c-1", "a-1", "a-2", "a-3"]  # fmt: skip
    assert b.latest_checkpoint == str(tmp_path / "b-3")


def test_saves_into_one_folder_at_the_same_time_do_not_disturb_each_other(tmp_path):
    """Locks keep threads apart as they do processes."""
    start, errors = threading.Barrier(3), []

    def save(name):
        v = rx.Variable(0.0)
        try:
            manager = CheckpointManager(Checkpoint(v=v), tmp_path, 2, checkpoint_name=name)
            start.wait()
            for number in range(8):
                v.assign(number)
                manager.save()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    there = ["a-7", "a-8", "b-7", "b-8", "c-7", "c-8"]
    assert names(tmp_path) == [*there, "checkpoint"]
    listed = rx.train.get_checkpoint_state(tmp_path).all_model_checkpoint_paths
    assert sorted(Path(path).name for path in listed) == there
    for name in "abc":
        assert restored(CheckpointManager, tmp_path, max_to_keep=2, checkpoint_name=name)[1] == 7.0


def test_a_manager_restores_what_another_process_has_saved_since(tmp_path):
    """As one that evaluates: what it had found is deleted by now."""
    saving = saved(tmp_path, 1.0, 2.0, max_to_keep=2)
    v = rx.Variable(0.0)
    evaluating = CheckpointManager(Checkpoint(v=v), tmp_path, 2, init_fn=lambda: pytest.fail("begun anew"))
    saving.checkpoint.v.assign(3.0)
    for _ in range(2):
        saving.save()
    assert evaluating.restore_or_initialize() == str(tmp_path / "ckpt-4") and float(v) == 3.0
    assert evaluating.checkpoints == saving.checkpoints


def test_two_processes_may_write_one_new_checkpoint(tmp_path, monkeypatch):
    checkpoint, rename = Checkpoint(v=rx.Variable(1.0)), os.rename

    def after_another(source, destination):
        if destination == str(tmp_path / "model"):
            monkeypatch.undo()
            Checkpoint(v=rx.Variable(2.0)).write(tmp_path / "model")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", after_another)
    checkpoint.write(tmp_path / "model")
    value = rx.train.load_variable(tmp_path / "model", "v/.ATTRIBUTES/VARIABLE_VALUE")
    assert float(value) == 1.0 and names(tmp_path) == ["model"]


def test_a_lock_file_is_used_if_a_folder_cannot_be_locked(tmp_path, monkeypatch):
    """As on NFS, which locks only what is open for writing."""
    fcntl = pytest.importorskip("fcntl")
    flock, locks = fcntl.flock, []

    def of_nfs(file, how):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        try:
            flock(file, how | fcntl.LOCK_NB)
            locks.append("held")
        except BlockingIOError:
            locks.append("would wait")

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    for _ in range(2):
        with atomic.changing(tmp_path), atomic.changing(tmp_path):
            pass
    assert locks == ["held", "would wait"] * 2


class KerasVariable:
    """An integer variable as Keras has them: an array can be made of it, and it is no index."""

    def __init__(self, value):
        self._value = value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._value, dtype)


def test_the_number_of_a_checkpoint_may_be_a_variable_of_any_library(tmp_path):
    manager = saved(tmp_path)
    for number in (KerasVariable(7), rx.Variable(8), np.int64(9), np.array(10), 11):
        assert manager.save(checkpoint_number=number).endswith(f"ckpt-{int(np.asarray(number))}")
    for wrong in (KerasVariable(7.5), "7", KerasVariable([1])):
        with pytest.raises(TypeError, match="`checkpoint_number` is an integer or an integer variable"):
            manager.save(checkpoint_number=wrong)


# What is left behind, and what is not.


def left(folder, target, **content):
    """What a killed process has left: a staging folder that nobody has locked."""
    staging = folder / f"{LEFT}{target}"
    staging.mkdir(parents=True)
    (staging / atomic._TARGET).write_text(target)
    for name, source in content.items():
        shutil.copytree(source, staging / name)
    return staging


def test_saves_remove_files_of_killed_but_not_of_living_processes(tmp_path):
    manager = saved(tmp_path, 1.0, 2.0)
    whole = tmp_path / "ckpt-2"
    left(tmp_path, "ckpt-1", deleted=whole)
    left(tmp_path, "ckpt-3", new=whole)
    left(tmp_path, "other-3", new=whole)
    (tmp_path / f"{LEFT}just made").mkdir()
    mine = tmp_path / f"{LEFT}mine"  # has not what ours have
    mine.mkdir()
    (mine / "notes").write_text("x")
    os.symlink(mine, tmp_path / f"{LEFT}link")
    with atomic.replacing(tmp_path / "ckpt-9", files.CHECKPOINT) as lives:
        os.mkdir(lives)
        manager.save()
        assert os.path.isdir(lives)
        assert names(tmp_path) == sorted(
            [f"{LEFT}link", f"{LEFT}mine", Path(lives).parent.name, "checkpoint", "ckpt-1", "ckpt-2", "ckpt-3"]
        )


def test_a_checkpoint_that_was_caught_between_two_renames_is_found_and_put_in_place(tmp_path):
    """As on file systems where two folders cannot change places."""
    saved(tmp_path / "a", 1.0)
    saved(tmp_path / "b", 2.0)
    for content, value in [({"old": "a", "new": "b"}, 2.0), ({"old": "a"}, 1.0)]:
        folder = tmp_path / f"run {value}"
        left(folder, "ckpt-1", **{name: tmp_path / of / "ckpt-1" for name, of in content.items()})
        before = tree(folder)
        with pytest.warns(UserWarning, match="is missing"):
            assert rx.train.latest_checkpoint(folder) == str(folder / "ckpt-1")
        with pytest.warns(UserWarning, match="is missing"):
            assert restored(CheckpointManager, folder, max_to_keep=1) == (str(folder / "ckpt-1"), value)
        assert tree(folder) == before  # reading changes nothing
        Checkpoint(v=rx.Variable(0.0)).write(folder / "other")
        v = rx.Variable(0.0)
        Checkpoint(v=v).restore(folder / "ckpt-1").assert_consumed()
        assert names(folder) == ["ckpt-1", "other"] and float(v) == value


def test_a_staging_folder_with_a_target_elsewhere_is_ignored(tmp_path):
    saved(tmp_path / "a", 1.0)
    run = tmp_path / "run"
    for number, target in enumerate(["../stolen", str(tmp_path / "stolen"), "..", ""]):
        staging = left(run, f"x{number}", old=tmp_path / "a" / "ckpt-1")
        (staging / atomic._TARGET).write_text(target)
    Checkpoint(v=rx.Variable(0.0)).write(run / "other")
    assert names(run) == ["other"] and names(tmp_path) == ["a", "run"]


def test_an_interrupt_between_two_renames_puts_the_new_one_in_place(tmp_path, monkeypatch):
    v = rx.Variable(1.0)
    path = Checkpoint(v=v).write(tmp_path / "ckpt")
    v.assign(2.0)
    rename = os.rename

    def interrupted(source, destination):
        rename(source, destination)
        if destination.endswith("old"):
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "_try_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Checkpoint(v=v).write(path)
    v.assign(0.0)
    Checkpoint(v=v).read(path).assert_consumed()
    assert float(v) == 2.0 and names(tmp_path) == ["ckpt"]
