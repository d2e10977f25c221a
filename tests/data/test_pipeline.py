"""What a dataset says of its nodes: when it is printed, and in exceptions."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

import replicax as rx
from replicax._base.errors import InvalidArgumentError
from replicax.data import AUTOTUNE, Dataset

R = Dataset.range


def lines(dataset):
    return [[part.strip() for part in line.split("  ") if part.strip()] for line in str(dataset).split("\n")]


def double(x):
    return x * 2


def test_a_printed_dataset_is_a_line_for_each_node_from_the_source_on():
    dataset = Dataset.from_tensor_slices(np.zeros((5, 3), np.float32)).shuffle(5).batch(2)
    assert str(dataset).split("\n") == [
        "from_tensor_slices  5 elements  TensorSpec(shape=(3,), dtype=float32)",
        "shuffle(5)          5 elements  TensorSpec(shape=(3,), dtype=float32)",
        "batch(2)            3 elements  TensorSpec(shape=(None, 3), dtype=float32)",
    ]
    assert "\n" not in repr(dataset)


def test_a_printed_dataset_marks_the_inputs_of_a_node_with_several():
    names = [line[0] for line in lines(Dataset.zip(R(3).repeat(), R(4).take(2)).prefetch(1))]
    assert names == ["- range(3)", "repeat", "- range(4)", "take(2)", "zip", "prefetch(1)"]


def test_a_dataset_is_printed_without_calls_of_its_functions():
    def refused(x):
        raise AssertionError

    assert lines(R(3).map(refused).filter(refused).repeat()) == [
        ["range(3)", "3 elements", "TensorSpec(shape=(), dtype=int32)"],
        ["map(refused)", "3 elements", "?"],
        ["filter(refused)", "unknown number", "?"],
        ["repeat", "without end", "?"],
    ]


def test_a_spec_that_was_asked_for_is_printed():
    dataset = R(3).map(double)
    assert dataset.element_spec.dtype == np.int32
    assert lines(dataset)[-1] == ["map(double)", "3 elements", "TensorSpec(shape=(), dtype=int32)"]


def notes_of(iterator):
    with pytest.raises(InvalidArgumentError, match="four") as caught:
        list(iterator)
    assert caught.value.__notes__[0] in "".join(traceback.format_exception(caught.value))
    return caught.value.__notes__


def check(x):
    if int(x) == 4:
        raise InvalidArgumentError("four")
    return x


@pytest.mark.parametrize("threads", [None, 2, AUTOTUNE])
def test_an_exception_names_the_function_and_the_element(threads):
    dataset = R(3, 9).map(double).map(lambda x: x // 2).map(check, num_parallel_calls=threads).batch(2).repeat(2)
    assert notes_of(dataset) == ["In map(check) of the dataset, element 1."]


def test_an_exception_names_the_same_element_after_a_restore():
    dataset = R(9).map(check).batch(2)
    iterator = iter(dataset)
    next(iterator)
    state = iterator.save_state()
    iterator.restore_state(state)
    assert notes_of(iterator) == ["In map(check) of the dataset, element 4."]


NODES = {
    "filter(is_small)": lambda: R(9).filter(is_small),
    "flat_map(check_and_open)": lambda: R(9).flat_map(check_and_open),
    "scan(check_state)": lambda: R(9).scan(np.int32(0), check_state),
    "from_generator(generate)": lambda: Dataset.from_generator(generate),
}


def is_small(x):
    return check(x) < 9


def check_and_open(x):
    check(x)
    return R(2)


def check_state(state, x):
    return check(x), x


def generate():
    for x in range(9):
        yield check(x)


@pytest.mark.parametrize("name", NODES)
def test_an_exception_names_its_node(name):
    (note,) = notes_of(NODES[name]().shuffle(1).batch(1))
    assert note.startswith(f"In {name} of the dataset")


def test_an_exception_in_a_distributed_dataset_names_its_node():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(R(8).map(check).batch(2))
    assert notes_of(dataset) == ["In map(check) of the dataset, element 4."]


def test_elements_that_cannot_be_stacked_name_the_batch():
    rows = Dataset.from_generator(lambda: iter([np.zeros(2), np.zeros(3)]))
    for dataset in (rows, rows.map(lambda row: row)):
        with pytest.raises(InvalidArgumentError, match="different shapes") as caught:
            list(dataset.batch(2))
        assert caught.value.__notes__ == ["In batch(2) of the dataset."]


def test_an_element_without_rows_names_unbatch():
    with pytest.raises(InvalidArgumentError, match="first dimension") as caught:
        list(R(3).unbatch().map(double))
    assert caught.value.__notes__ == ["In unbatch of the dataset."]
