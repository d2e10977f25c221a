"""`strategy.benchmark`: where the time of a compiled step goes.

The step is run as it is, and with its communication taken out (see `without_communication`), in rounds in which the two
take turns, so that the machine's other load affects both. Runs with fresh elements of a dataset, in place of a single
one, show the cost of the input.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from replicax._base import devices as _devices
from replicax._base.messages import received
from replicax._base.types import Tree
from replicax._benchmark import hlo
from replicax._benchmark import without_communication as _without_communication
from replicax._data.dataset import Dataset
from replicax._data.iterators import ElementIterator, pull, push_back
from replicax._engine import function as _function
from replicax._engine import modes
from replicax._engine.function import Function, calls_of, program_of
from replicax._engine.signature import CallSignature
from replicax._input.distributed_dataset import DistributedDataset, for_this_process
from replicax._input.iterator import DistributedIterator
from replicax._report.benchmark import TIMES, Benchmark
from replicax._strategies.strategy import Strategy
from replicax._tracing import context, frames
from replicax._tracing.dataset_reads import element_arrays
from replicax._tracing.protocols import storage_of


def benchmark(strategy: Strategy, step: Callable[..., Tree], batch: Tree, rounds: int, steps: int) -> Benchmark:
    """Implements `Strategy.benchmark`."""
    for name, value in (("rounds", rounds), ("steps", steps)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` is a whole number, at least 1; got {value!r}.")
    context.require_cross_replica(strategy)
    if frames.is_tracing():
        raise RuntimeError("A benchmark runs its step, which cannot be done while another function is traced.")
    if modes.functions_run_eagerly():
        raise RuntimeError(
            "Functions run eagerly now, and a benchmark is of compiled ones: run_functions_eagerly(False)."
        )
    if not callable(step):
        raise TypeError(f"A benchmark is of a function, the step; got {received(step)}.")
    function: Function = step if isinstance(step, Function) else _function.function(step)
    calls = calls_of(function)
    name = calls.code.name
    if function.steps_per_call > 1:
        raise ValueError(
            f"A call of {name} takes {function.steps_per_call} steps, and a benchmark is of one. Give it the "
            "function without `steps_per_call`."
        )
    with contextlib.closing(_Feed(strategy, batch)) as feed:
        program = _Program(function, feed.again())
        feed.unused()
        if program.takes != feed.gives:
            raise ValueError(
                f"{name} takes {program.takes} elements a call from iterators itself, of which a benchmark "
                f"has {feed.gives} to give. Let it take one, and pass its iterator as an argument: benchmark(step, "
                "(iterator,))."
            )
        sizes = {mesh.size for mesh in program.level.meshes}
        if sizes and strategy.num_replicas_in_sync not in sizes:
            raise ValueError(
                f"{name} runs {max(sizes)} replicas of another strategy, and {strategy!r} has "
                f"{strategy.num_replicas_in_sync}. Call `benchmark` of the strategy that the step is written for."
            )
        with program.variables_kept() as restore, calls.without_step_hint():
            measured = _measured(program, feed, restore, rounds, steps)
    return Benchmark(
        step=name,
        strategy=type(strategy).__name__,
        replicas=strategy.num_replicas_in_sync,
        devices=program.devices(),
        worker=jax.process_index(),
        rounds=rounds,
        steps=steps,
        **measured,
        bytes_per_device=program.bytes_per_device(),
        flops=program.flops(),
        collectives=[{"kind": one.kind, "arrays": len(one.arrays), "bytes": one.bytes} for one in program.collectives],
        collectives_left=len(program.left),
    )


def _measured(program: _Program, feed: _Feed, restore: Callable[[], None], rounds: int, steps: int) -> dict[str, Any]:
    """Returns the seconds of a step, their spread, and the page faults of a step."""

    def begin() -> float:
        restore()
        program.wait_for(program.function(*feed.again()))  # the first call copies lent arrays
        return time.perf_counter()

    def timed(kind: str) -> float:
        arguments = feed.fresh if kind == "loop" else feed.again
        with program.without_communication() if kind == "alone" else contextlib.nullcontext():
            start = begin()
            for _ in range(steps):
                result = program.function(*arguments())
            program.wait_for(result)
            return (time.perf_counter() - start) / steps

    times: dict[str, list[float]] = {name: [] for name in ("step", "dispatch", "alone", "loop")}
    faults: list[int] = []
    kinds = ["step", *(["alone"] if program.separable else []), *(["loop"] if feed.moves else [])]
    for number in range(rounds + 1):  # the first one only warms up
        for kind in kinds if number % 2 else reversed(kinds):
            before = _page_faults()
            times[kind].append(timed(kind))
            if kind == "step" and before is not None and (after := _page_faults()) is not None:
                faults.append(after - before)
        start = begin()
        result = program.function(*feed.again())
        times["dispatch"].append(time.perf_counter() - start)
        program.wait_for(result)
    kept = {name: values[1:] for name, values in times.items() if values}
    measured = {"step": kept["step"], "dispatch": kept["dispatch"]}
    # Differences within a round, since the machine's other load changes more slowly.
    if program.separable:
        measured["communication"] = _differences(kept["step"], kept["alone"])
    if feed.moves:
        measured["input"] = _differences(kept["loop"], kept["step"])
    seconds = {name: max(0.0, statistics.median(values)) for name, values in measured.items()}
    if not program.collectives:
        seconds["communication"] = 0.0
    if "communication" in seconds:
        seconds["compute"] = max(0.0, seconds["step"] - seconds["communication"])
    return {
        "seconds": {name: seconds.get(name) for name in TIMES},
        "spread": {name: _spread(values) for name, values in measured.items()} if rounds > 1 else {},
        "page_faults": statistics.median(faults[1:]) / (steps + 1) if faults else None,
    }


def _differences(longer: list[float], shorter: list[float]) -> list[float]:
    return [one - other for one, other in zip(longer, shorter)]


def _spread(values: list[float]) -> float:
    """Returns half of the interquartile range."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


class _Program:
    """The compiled program of a step, and the same without its communication."""

    def __init__(self, function: Function, args: tuple[Tree, ...]):
        self.function = function
        program, call = program_of(function, args, {})
        self._program, self.level, self.takes = program, program.level, len(program.reads)
        self._entries = calls_of(function).programs.entries[call.key]
        self._compiled = program.lower(call).compile()
        self.collectives = hlo.collectives(self._compiled.as_text() or "")
        self.left: list[hlo.Collective] = []  # those that remain without communication
        if self.collectives:
            self._alone = program.computing(_without_communication.alone(program.jaxpr))
            self.left = hlo.collectives(self._alone.lower(call).compile().as_text() or "")

    @property
    def separable(self) -> bool:
        """True if there is communication that can be taken out."""
        return len(self.left) < len(self.collectives)

    @contextlib.contextmanager
    def without_communication(self) -> Iterator[None]:
        """Returns a context in which calls of the function run the program without its communication."""
        place = self._entries.index(self._program)
        self._entries[place] = self._alone
        try:
            yield
        finally:
            self._entries[place] = self._program

    @contextlib.contextmanager
    def variables_kept(self) -> Iterator[Callable[[], None]]:
        """Yields a function that restores the variables' values; they are restored at the end too."""
        frame, written = frames.frame(), list(self.level.written.values())
        kept = [storage_of(variable).home.copied(frame.fetch(variable)) for variable in written]

        def restore() -> None:
            for variable, leaves in zip(written, kept):
                frame.store(variable, storage_of(variable).home.copied(leaves))

        try:
            yield restore
        finally:
            restore()

    def wait_for(self, result: Tree) -> None:
        """Waits until the call has ended that returned `result`."""
        arrays = [x for x in element_arrays(result) if isinstance(x, jax.Array)]
        jax.block_until_ready([self._program.state(), arrays])

    def devices(self) -> list[str]:
        """Returns the names of the devices of this process that it runs on."""
        shardings = jax.tree.leaves((self._compiled.input_shardings, self._compiled.output_shardings))
        found = {device for sharding in shardings for device in sharding.addressable_devices}
        return [_devices.short_name(device) for device in sorted(found, key=lambda device: device.id)]

    def bytes_per_device(self) -> dict[str, int]:
        """Returns the memory of a device that the step needs; of variables, that of the device that holds most."""
        held: dict[jax.Device, int] = {}
        for variable in self.level.variables.values():
            for leaf in frames.frame().fetch(variable):
                raw = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
                for shard in raw.addressable_shards:
                    held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
        found = {"variables": max(held.values(), default=0)}
        if (memory := self._compiled.memory_analysis()) is not None:
            found["arguments"] = memory.argument_size_in_bytes
            found["outputs"] = memory.output_size_in_bytes
            found["in place"] = memory.alias_size_in_bytes
            found["temporary"] = memory.temp_size_in_bytes
        return found

    def flops(self) -> float | None:
        """Returns the floating-point operations of a device in a step, as XLA counts them; None where it does not."""
        costs: dict[str, float] = self._compiled.cost_analysis() or {}
        return costs.get("flops")


class _Feed:
    """The arguments of each call: with the same element again and again, or with a fresh one."""

    def __init__(self, strategy: Strategy, batch: Tree):
        self._dataset: DistributedDataset | Dataset | None = None  # started anew at its end
        self._iterator: ElementIterator | None = None
        self._given: tuple[Tree, ...] | None = None  # arguments with an iterator, from which the step takes elements
        self._taken: list[Tree] | None = None  # elements of the user's own iterator, which go back to it
        if isinstance(batch, Dataset):
            batch = strategy.experimental_distribute_dataset(batch)
        batch = for_this_process(batch)
        iterators = [x for x in batch if isinstance(x, ElementIterator)] if isinstance(batch, tuple) else []
        if isinstance(batch, (DistributedDataset, Dataset)):
            self._dataset, self._iterator = batch, iter(batch)
        elif isinstance(batch, ElementIterator) or len(iterators) == 1:
            self._given = batch if iterators else None
            self._iterator, self._taken = (iterators or [batch])[0], []
        self.gives = int(self._given is not None)  # elements that a call takes itself
        self.moves = self._iterator is not None  # True if there are fresh elements
        self._first = batch if self._iterator is None else self._pulled()
        self._key = CallSignature((self._first,), {}).key

    def again(self) -> tuple[Tree, ...]:
        """Returns the arguments with the first element."""
        return self._arguments(self._first)

    def fresh(self) -> tuple[Tree, ...]:
        """Returns the arguments with the next element of the first one's shapes."""
        element = self._pulled()
        while CallSignature((element,), {}).key != self._key:  # the last batch of an epoch, of another size
            element = self._pulled()
        return self._arguments(element)

    def unused(self) -> None:
        """Takes the pushed-back element out of the iterator, after arguments that were passed to no call."""
        if self._given is not None and self._iterator is not None:
            pull(self._iterator)

    def _arguments(self, element: Tree) -> tuple[Tree, ...]:
        if self._given is not None and self._iterator is not None:
            push_back(self._iterator, element)
            return self._given
        return element if isinstance(element, tuple) else (element,)

    def _pulled(self) -> Tree:
        assert self._iterator is not None
        element: Tree
        try:
            element = pull(self._iterator)
        except StopIteration:
            if self._dataset is None:
                raise ValueError(
                    "The iterator has too few elements for a benchmark. Give its dataset, which starts anew at its "
                    "end, or fewer `rounds` and `steps`."
                ) from None
            self._end()
            self._iterator = iterator = iter(self._dataset)
            try:
                element = pull(iterator)
            except StopIteration:
                raise ValueError("The dataset of a benchmark has no elements.") from None
        if self._taken is not None:
            self._taken.append(element)
        return element

    def close(self) -> None:
        """Gives the elements back to the user's iterator."""
        for element in reversed(self._taken or []):
            assert self._iterator is not None
            push_back(self._iterator, element)
        if self._dataset is not None:
            self._end()

    def _end(self) -> None:
        if isinstance(self._iterator, DistributedIterator):  # which has a thread
            self._iterator.close()


def _page_faults() -> int | None:
    """Returns the number of page faults of this process so far; None where the system does not count them."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
