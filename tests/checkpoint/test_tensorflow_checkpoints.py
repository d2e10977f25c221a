"""Checkpoints that TensorFlow wrote are read, and trainings go on from them with the same losses.

`tensorflow_files/recorded` has some, which `write.py` there wrote; where there is a TensorFlow, it writes them anew.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow_files
from strategies import over, sharded
from tensorflow_files import RECORDED

import replicax as rx
from replicax._base.crc32c import masked_crc32c
from replicax._checkpoint import sorted_table
from replicax._checkpoint.tensor_bundle import TensorBundle

TABLE = np.array(json.loads((RECORDED / "told.json").read_text())["table"], np.float32)
Checkpoint = rx.train.Checkpoint
written = tensorflow_files.written


def test_readers_show_keys_shapes_dtypes_and_values(written):
    reader = rx.train.load_checkpoint(written / "values")
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    value = "/.ATTRIBUTES/VARIABLE_VALUE"
    assert shapes[f"table{value}"] == [70, 3] and shapes[f"texts{value}"] == [3] and shapes[f"wide{value}"] == []
    assert {key.partition("/")[0]: str(dtype) for key, dtype in dtypes.items() if key.endswith(value)} == {
        "table": "float32",
        "half": "bfloat16",
        "texts": "object",
        "flag": "bool",
        "wide": "int64",
        "double": "float64",
        "generator": "int64",
    }
    tensors = {name: reader.get_tensor(f"{name}{value}") for name in ("table", "half", "texts", "flag", "wide")}
    assert np.array_equal(tensors["table"], TABLE)
    assert tensors["half"].tolist() == TABLE[0].astype(tensors["half"].dtype).tolist()
    assert tensors["texts"].tolist() == [b"a", b"", b"longer than the others"]
    assert tensors["flag"].tolist() == [True, False] and int(tensors["wide"]) == 2**40
    assert rx.train.load_variable(written / "values", f"double{value}") == 1 / 3
    assert reader.has_tensor(f"wide{value}") and not reader.has_tensor("wide")
    with pytest.raises(KeyError, match="Key wide not found"):
        reader.get_tensor("wide")
    with pytest.raises(rx.CheckpointError, match="dtype 21"):
        reader.get_tensor("iterator/.ATTRIBUTES/ITERATOR_STATE")
    assert rx.train.list_variables(written / "named-7") == [("global_step", []), ("net/table", [70, 3])]
    assert b"save_counter" in rx.train.load_checkpoint(written / "module").get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
    assert rx.train.latest_checkpoint(written / "module") == str(written / "module" / "ckpt-2")
    state = rx.train.get_checkpoint_state(written / "module")
    assert [Path(path).name for path in state.all_model_checkpoint_paths] == ["ckpt-1", "ckpt-2"]


@over(plain=True)
def test_values_pass_to_variables_of_every_strategy(make):
    with make().scope():
        table = rx.Variable(np.zeros((70, 3), np.float32), name="net/table")
        half = rx.Variable(np.zeros(3, "bfloat16"))
        step = rx.Variable(0, name="global_step")
    Checkpoint(table=table, half=half).read(RECORDED / "values").assert_existing_objects_matched().expect_partial()
    assert np.array_equal(table.numpy(), TABLE) and np.array_equal(half.numpy(), TABLE[0].astype(half.dtype))
    table.assign(np.zeros((70, 3), np.float32))
    Checkpoint(a=table).restore(RECORDED / "sharded").expect_partial()
    assert np.array_equal(table.numpy(), TABLE)
    table.assign(np.zeros((70, 3), np.float32))
    Checkpoint(any=[table], name=step).restore(RECORDED / "named-7").assert_consumed()
    assert np.array_equal(table.numpy(), TABLE) and int(step) == 7


def test_variables_of_which_each_replica_has_a_part():
    with sharded(2).scope():
        table = rx.Variable(np.zeros((70, 3), np.float32))
    Checkpoint(table=table).restore(RECORDED / "values").expect_partial()
    assert np.array_equal(table.numpy(), TABLE)


def test_objects_that_are_made_later_find_their_values_by_name():
    checkpoint = Checkpoint()
    status = checkpoint.restore(RECORDED / "named-7")
    with pytest.raises(AssertionError, match="Unresolved object in checkpoint .*: global_step"):
        status.assert_consumed()
    checkpoint.here = rx.Variable(1, name="global_step")
    checkpoint.table = rx.Variable(np.zeros((70, 3), np.float32), name="net/table")
    assert int(checkpoint.here) == 7
    status.assert_consumed()


def test_integers_of_64_bits_go_into_those_of_32_if_they_fit():
    v = rx.Variable(np.int32(0))
    with pytest.raises(rx.InvalidArgumentError, match="does not hold the value 1099511627776.*Nothing has been"):
        Checkpoint(wide=v).restore(RECORDED / "values")
    with pytest.raises(rx.InvalidArgumentError, match="original dtype bool"):
        Checkpoint(flag=rx.Variable(np.zeros(2, np.int32))).restore(RECORDED / "values")
    with pytest.raises(ValueError, match=r"incompatible tensor with shape \(70, 3\)"):
        Checkpoint(table=rx.Variable(np.zeros((3, 70), np.float32))).restore(RECORDED / "values")


def copied(folder, *names):
    for name in names or ["values.index", "values.data-00000-of-00001"]:
        shutil.copy(RECORDED / name, folder)
    return folder / "values"


def test_damaged_files_are_named_and_nothing_is_restored(tmp_path):
    def refused(*words):
        half, table = rx.Variable(np.zeros(3, "bfloat16")), rx.Variable(np.zeros((70, 3), np.float32))
        with pytest.raises(rx.CheckpointError) as caught:
            Checkpoint(half=half, table=table).restore(path)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert not half.numpy().any() and not table.numpy().any()

    path = copied(tmp_path)
    index, data = tmp_path / "values.index", tmp_path / "values.data-00000-of-00001"
    bundle = TensorBundle(str(path))
    entry = next(e for key, e in bundle._entries.items() if key.startswith(b"\0table") and e.size < 100)
    content = bytearray(data.read_bytes())
    content[entry.offset + 2] ^= 1
    data.write_bytes(content)
    refused("values.data-00000-of-00001", "a slice of table/.ATTRIBUTES/VARIABLE_VALUE", "checksum")
    data.write_bytes(content[:-1])
    refused("values.data-00000-of-00001", "is cut off")
    data.unlink()
    refused("values.data-00000-of-00001", "not whole")
    copied(tmp_path)
    whole = index.read_bytes()
    for place in range(0, len(whole) - 48, 7):
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :])
        refused("values.index", "checksum of a block")
    for size in range(0, len(whole), 11):
        index.write_bytes(whole[:size])
        refused("values.index", "its end is missing")


def test_changed_bytes_of_tensors_are_noticed(tmp_path):
    path = copied(tmp_path)
    data = tmp_path / "values.data-00000-of-00001"
    whole, entries = data.read_bytes(), TensorBundle(str(path))._entries
    known = [e for e in entries.values() if e.number != 21]  # TensorFlow's iterator
    for place in [place for e in known for place in range(e.offset, e.offset + e.size, 3)]:
        data.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(rx.CheckpointError, match="values.data-00000-of-00001: .* (checksum|strings) do"):
            TensorBundle(str(path)).check()


def test_a_manager_falls_back_to_an_older_one_and_goes_on_in_the_folder(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(RECORDED / "module", folder)
    newest = folder / "ckpt-2.data-00000-of-00001"
    content = bytearray(newest.read_bytes())
    content[20] ^= 1
    newest.write_bytes(content)
    step = rx.Variable(np.int32(0))
    manager = rx.train.CheckpointManager(Checkpoint(step=step), folder, max_to_keep=2)
    with pytest.warns(UserWarning, match="passed over for an older one.*ckpt-2.data"):
        assert manager.latest_checkpoint == str(folder / "ckpt-1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Only what is restored is read: the damaged value is another one.
        assert manager.restore_or_initialize() == str(folder / "ckpt-2") and int(step) == 4
    manager.checkpoint.restore(folder / "ckpt-1").expect_partial()
    assert int(step) == 2 and int(manager.checkpoint.save_counter) == 1
    path = manager.save(checkpoint_number=3)
    assert [Path(one).name for one in manager.checkpoints] == ["ckpt-2", "ckpt-3"]
    assert rx.train.latest_checkpoint(folder) == path
    assert (folder / "ckpt-1.index").exists() and (folder / "ckpt-3").is_dir()  # TensorFlow's files are nobody's here
    os.remove(folder / "checkpoint")
    with pytest.warns(UserWarning, match="is missing, so the folder's checkpoints are looked for"):
        assert rx.train.latest_checkpoint(folder) == path


@pytest.mark.parametrize("damaged", ["newest", "all"])
def test_a_manager_finds_older_checkpoints_that_tensorflows_list_omits(tmp_path, damaged):
    folder = tmp_path / "run"
    shutil.copytree(RECORDED / "module", folder)
    newest = 'model_checkpoint_path: "ckpt-2"\nall_model_checkpoint_paths: "ckpt-2"\n'  # as tf.train.Checkpoint.save
    (folder / "checkpoint").write_text(newest)
    for index in [folder / "ckpt-2.index"] if damaged == "newest" else folder.glob("*.index"):
        index.write_bytes(index.read_bytes()[:-9])
    step = rx.Variable(np.int32(0))
    manager = rx.train.CheckpointManager(Checkpoint(step=step), folder, max_to_keep=2)
    with pytest.warns(UserWarning, match="passed over for an older one.*ckpt-"):
        if damaged == "all":
            assert rx.train.latest_checkpoint(folder) is manager.latest_checkpoint is None
            with pytest.raises(rx.CheckpointError, match="Move them elsewhere"):
                manager.restore_or_initialize()
            return
        older = str(folder / "ckpt-1")
        assert rx.train.latest_checkpoint(folder) == manager.latest_checkpoint == older
        assert manager.restore_or_initialize() == older and int(step) == 2
    manager.checkpoint.restore(older).expect_partial()  # the rest of the model is not here
    manager.save()
    assert rx.train.latest_checkpoint(folder) == manager.latest_checkpoint == str(folder / "ckpt-2")


def test_a_saved_model_is_read_by_its_folder(tmp_path):
    (tmp_path / "model" / "variables").mkdir(parents=True)
    (tmp_path / "model" / "saved_model.pb").touch()
    for name in ("values.index", "values.data-00000-of-00001"):
        shutil.copy(RECORDED / name, tmp_path / "model" / "variables" / name.replace("values", "variables"))
    half = rx.Variable(np.zeros(3, "bfloat16"))
    Checkpoint(half=half).restore(tmp_path / "model").expect_partial()
    assert half.numpy().any()


def test_a_compressed_index_is_read_by_cramjam_or_an_error_names_it(monkeypatch):
    masked = masked_crc32c()

    def block(key, value):
        return bytes([0, len(key), len(value)]) + key + value + bytes(4) + b"\1\0\0\0"

    def stored(content, compression):
        return content + bytes([compression]) + masked(content + bytes([compression])).to_bytes(4, "little")

    data = block(b"key", b"value")
    index = block(b"l", bytes([0, len(data)]))
    footer = bytes([len(data) + 5, len(index)] * 2).ljust(40, b"\0") + 0xDB4775248B80FB57.to_bytes(8, "little")
    for compression, word in ((0, ""), (1, "pip install cramjam"), (2, "unknown compression 2")):
        table = stored(data, compression) + stored(index, 0) + footer
        monkeypatch.setitem(sys.modules, "cramjam", None)
        if word:
            with pytest.raises((ImportError, ValueError), match=word):
                list(sorted_table.entries(table, masked))
        else:
            assert list(sorted_table.entries(table, masked)) == [(b"key", b"value")]
        reversing = types.SimpleNamespace(snappy=types.SimpleNamespace(decompress_raw=lambda content: content[::-1]))
        monkeypatch.setitem(sys.modules, "cramjam", reversing)
        if compression == 1:
            table = stored(data[::-1], compression) + stored(index, 0) + footer
            assert list(sorted_table.entries(table, masked)) == [(b"key", b"value")]
