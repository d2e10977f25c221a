"""Control flow, order, devices, and names that in TensorFlow concern graphs."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from replicax.tf import _config
from replicax.tf._core import (
    RaggedTensor,
    RaggedTensorSpec,
    Tree,
    active_tapes,
    autograph_switch,
    cond_and_loops,
    dataset_reads,
    devices,
    errors,
    frames,
    is_composite,
    shown,
    thread_state,
    traced_block,
)
from replicax.tf._core import nest as _nest
from replicax.tf._host import jnp, lax
from replicax.tf._ops import convert_to_tensor
from replicax.tf._ragged import map_rows
from replicax.tf._types import TensorLike

_Pairs: TypeAlias = dict[TensorLike, Callable[[], Tree]] | Iterable[builtins.tuple[TensorLike, Callable[[], Tree]]]


def _traced(*values: object) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in values)


def _tensors(nest: Tree) -> Tree:
    return _nest.map_values(convert_to_tensor, nest)


# Branches and loops: Python's where the condition is known, else JAX's operations.


def cond(
    pred: TensorLike,
    true_fn: Callable[[], Tree] | None = None,
    false_fn: Callable[[], Tree] | None = None,
    name: str | None = None,
) -> Tree:
    """Calls `true_fn` or `false_fn`; the condition may be a tracer in compiled code."""
    if true_fn is None or false_fn is None or not callable(true_fn) or not callable(false_fn):
        raise TypeError("tf.cond needs a function for each branch: true_fn and false_fn.")
    pred = convert_to_tensor(pred)
    true_fn, false_fn = autograph_switch.converted(true_fn), autograph_switch.converted(false_fn)
    if not _traced(pred):
        return true_fn() if bool(pred) else false_fn()
    names = (name or "the result",)
    return cond_and_loops.cond(pred.astype(bool).reshape(()), lambda: (true_fn(),), lambda: (false_fn(),), names)[0]


def case(
    pred_fn_pairs: _Pairs,
    default: Callable[[], Tree] | None = None,
    exclusive: bool = False,
    strict: bool = False,
    name: str = "case",
) -> Tree:
    """Calls the function of the first condition that is true, else `default`; compiled code needs no default.

    With `exclusive`, raises `InvalidArgumentError` if more than one condition is known to be true.
    """
    pairs = list(pred_fn_pairs.items() if isinstance(pred_fn_pairs, dict) else pred_fn_pairs)
    preds = [convert_to_tensor(pred) for pred, _ in pairs]
    functions = [fn for _, fn in pairs]
    if exclusive and not _traced(*preds) and sum(bool(p) for p in preds) > 1:
        raise errors.InvalidArgumentError("More than one condition evaluated as True but exclusive=True.")
    if default is None:
        if not _traced(*preds) and not any(bool(p) for p in preds):
            raise errors.InvalidArgumentError("None of the conditions evaluated as True, and there is no default.")
        default = functions[-1]
    result: Callable[[], Tree] = default
    for pred, fn in reversed(list(zip(preds, functions))):
        result = functools.partial(cond, pred, fn, result)
    return result()


def switch_case(
    branch_index: TensorLike,
    branch_fns: dict[int, Callable[[], Tree]] | Sequence[Any],
    default: Callable[[], Tree] | None = None,
    name: str = "switch_case",
) -> Tree:
    """Calls the function with this index, else `default` (by default the last function)."""
    numbered: dict[int, Callable[[], Tree]]
    if isinstance(branch_fns, dict) or branch_fns and isinstance(branch_fns[0], (list, builtins.tuple)):
        numbered = dict(branch_fns)
    else:
        numbered = dict(enumerate(branch_fns))
    numbers = sorted(numbered)
    other: Callable[[], Tree] = numbered[numbers[-1]] if default is None else default
    index, result = convert_to_tensor(branch_index), other
    for number in numbers:
        result = functools.partial(cond, index == number, numbered[number], result)
    return result()


def while_loop(
    cond: Callable[..., TensorLike],
    body: Callable[..., Tree],
    loop_vars: Tree,
    shape_invariants: object = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    maximum_iterations: TensorLike = None,
    name: str | None = None,
) -> Tree:
    """Calls `body` as long as `cond` holds. In compiled code its gradient is of first order, as AutoGraph's is."""
    limit = None if maximum_iterations is None else convert_to_tensor(maximum_iterations)
    one = not isinstance(loop_vars, (list, builtins.tuple))
    variables = _tensors([loop_vars] if one else list(loop_vars))

    cond, body = autograph_switch.converted(cond), autograph_switch.converted(body)

    def step(values: Sequence[Tree]) -> list[Tree]:
        result = body(*values)
        answer: list[Tree] = _tensors(list(result) if type(result) in (list, builtins.tuple) else [result])
        return answer

    if not frames.is_tracing():
        rounds = 0
        while bool(convert_to_tensor(cond(*variables))) and (limit is None or rounds < int(limit)):
            variables, rounds = step(variables), rounds + 1
    else:

        def more(values: Sequence[Tree]) -> jax.Array:
            return convert_to_tensor(cond(*values)).reshape(())

        names = [f"loop_vars[{i}]" for i in range(len(variables))]
        variables = cond_and_loops.while_loop(more, step, variables, names, limit)
    return (
        variables[0] if one else type(loop_vars)(variables) if type(loop_vars) in (list, builtins.tuple) else variables
    )


def _iterate(
    fn: Callable[[Tree, Tree], builtins.tuple[Tree, Tree]], carry: Tree, elements: Tree, reverse: bool = False
) -> builtins.tuple[Tree, Tree]:
    """Runs `carry, out = fn(carry, element)` for each row; returns the last carry and the stacked outputs."""
    if frames.is_tracing():
        return jax.lax.scan(fn, carry, elements, reverse=reverse)
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(elements)}
    if len(lengths) != 1:
        raise ValueError(f"The elements must have the same first dimension, got {sorted(lengths)}.")
    outs = []
    order = list(np.arange(lengths.pop()))
    for i in reversed(order) if reverse else order:
        carry, out = fn(carry, jax.tree.map(lambda leaf: leaf[i], elements))  # noqa: B023
        outs.append(out)
    if not outs:
        return jax.lax.scan(fn, carry, elements)
    return carry, jax.tree.map(lambda *rows: jnp.stack(rows), *(outs[::-1] if reverse else outs))


def map_fn(
    fn: Callable[[Tree], Tree],
    elems: Tree,
    dtype: object = None,
    parallel_iterations: int | None = None,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    name: str | None = None,
    fn_output_signature: object = None,
) -> Tree:
    """Calls `fn` for each row of a structure of tensors, and stacks the results. `vectorized_map` is faster in compiled
    code.

    Tensors may be ragged. Results of different lengths need a RaggedTensorSpec as `fn_output_signature`.
    """
    signature = dtype if fn_output_signature is None else fn_output_signature
    kinds = (RaggedTensor, RaggedTensorSpec)
    if any(isinstance(x, kinds) for x in jax.tree.leaves((elems, signature), is_leaf=is_composite)):
        return map_rows(fn, elems, signature)
    return _iterate(lambda carry, row: (carry, _tensors(fn(row))), (), _tensors(elems))[1]


def vectorized_map(
    fn: Callable[[Tree], Tree], elems: Tree, fallback_to_while_loop: bool = True, warn: bool = True
) -> Tree:
    """Computes `fn` for all rows of a structure of tensors at once."""
    return jax.vmap(lambda row: _tensors(fn(row)))(_tensors(elems))


def scan(
    fn: Callable[[Tree, Tree], Tree],
    elems: Tree,
    initializer: Tree = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    infer_shape: bool = True,
    reverse: bool = False,
    name: str | None = None,
) -> Tree:
    """Runs `a = fn(a, row)` for each row, and stacks every `a`. Without an initializer the first row is the first
    `a`.
    """
    start, rows, first = _start(elems, initializer, reverse)

    def step(carry: Tree, row: Tree) -> builtins.tuple[Tree, Tree]:
        new = _tensors(fn(carry, row))
        return new, new

    outs = _iterate(step, start, rows, reverse)[1]
    if initializer is None:
        outs = jax.tree.map(lambda a, b: jnp.concatenate([b, a] if reverse else [a, b]), first, outs)
    return outs


def _start(elems: Tree, initializer: Tree, reverse: bool) -> builtins.tuple[Tree, Tree, Tree]:
    elems = _tensors(elems)
    if initializer is not None:
        return _tensors(initializer), elems, None
    edge = slice(-1, None) if reverse else slice(0, 1)
    rest = slice(0, -1) if reverse else slice(1, None)
    first = jax.tree.map(lambda leaf: leaf[edge], elems)
    return jax.tree.map(lambda leaf: leaf[0], first), jax.tree.map(lambda leaf: leaf[rest], elems), first


def _fold(reverse: bool, doc: str) -> Callable[..., Tree]:
    def op(
        fn: Callable[[Tree, Tree], Tree],
        elems: Tree,
        initializer: Tree = None,
        parallel_iterations: int = 10,
        back_prop: bool = True,
        swap_memory: bool = False,
        name: str | None = None,
    ) -> Tree:
        start, rows, _ = _start(elems, initializer, reverse)
        return _iterate(lambda carry, row: (_tensors(fn(carry, row)), ()), start, rows, reverse)[0]

    op.__doc__ = doc
    return op


foldl = _fold(False, "Runs `a = fn(a, row)` for each row from first to last, and returns the last `a`.")
foldr = _fold(True, "Runs `a = fn(a, row)` for each row from last to first, and returns the last `a`.")


# Gradients.


def stop_gradient(input: TensorLike, name: str | None = None) -> jax.Array:
    """Returns the tensor, which may be ragged or sparse, as a constant for differentiation."""
    if is_composite(input):
        constant: jax.Array = jax.tree.map(stop_gradient, input)
        return constant
    return lax.stop_gradient(convert_to_tensor(input))


def custom_gradient(f: Callable[..., builtins.tuple[Tree, Callable[..., Tree]]]) -> Callable[..., Tree]:
    """Returns a function with the given gradient: `f(*args)` returns the result and a function from gradients to
    gradients.
    """

    def call(*args: Tree, **kwargs: Tree) -> Tree:
        wrapped = jax.custom_vjp(lambda *args: _tensors(f(*args, **kwargs)[0]))

        def forward(*args: Tree) -> builtins.tuple[Tree, jax.tree_util.Partial]:
            result, gradient = f(*args, **kwargs)
            if "variables" in inspect.signature(gradient).parameters:
                raise NotImplementedError(
                    f"The gradient function of {shown(f)} takes `variables`: pass their values to the "
                    "function as arguments, for which it returns gradients as for the others."
                )
            result, pulled = _tensors(result), jax.tree.map(jnp.zeros_like, args)

            def pull(cotangents: Tree) -> builtins.tuple[Tree, ...]:
                found = gradient(*(cotangents if isinstance(cotangents, (list, builtins.tuple)) else [cotangents]))
                found = list(found) if isinstance(found, (list, builtins.tuple)) else [found]
                return builtins.tuple(zero if g is None else convert_to_tensor(g) for g, zero in zip(found, pulled))

            return result, _packed(pull, result)

        wrapped.defvjp(forward, lambda packed, cotangents: packed(cotangents))
        return wrapped(*(_tensors(a) for a in args))

    return call


def _packed(pull: Callable[[Tree], Tree], example: Tree) -> jax.tree_util.Partial:
    """Returns a function as a pytree of the arrays that it captures."""
    converted, arrays = jax.closure_convert(pull, example)
    return jax.tree_util.Partial(lambda arrays, cotangents: converted(cotangents, *arrays), arrays)


def recompute_grad(f: Callable[..., Tree]) -> Callable[..., Tree]:
    """Returns the function, with intermediate results recomputed for its gradient to save memory in compiled code.

    It may read and assign variables. Eager calls keep their intermediate results.
    """

    @functools.wraps(f)
    def call(*args: Tree, **kwargs: Tree) -> Tree:
        return _recompute(f, args, kwargs)

    return call


def _recompute(f: Callable[..., Tree], args: builtins.tuple[Tree, ...], kwargs: dict[str, Tree]) -> Tree:
    """Call `f` so that its gradient computes intermediate values again. Eagerly, this is a plain call.

    Each call traces `f` anew: `jax.checkpoint` would keep the jaxpr, with the values of variables that `f` reads.
    """
    if not frames.is_tracing():
        return f(*args, **kwargs)
    if not isinstance(frames.frame(), frames.TraceFrame):  # in a `jax.jit` of the user's
        return jax.checkpoint(lambda *args, **kwargs: f(*args, **kwargs))(*args, **kwargs)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda x: x is None or active_tapes.is_variable(x))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def code(*tracers: jax.Array) -> builtins.tuple[Tree]:
        given = dict(zip(places, tracers))
        own_args, own_kwargs = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return (f(*own_args, **own_kwargs),)

    arrays = [leaves[i] for i in places]
    block = traced_block.TracedBlock(("the result",), code, arrays)
    state, written = traced_block.state_of(block)
    results, after = jax.checkpoint(lambda arrays, state: block.run(arrays, state, written))(arrays, state)
    traced_block.write(written, after)
    return block.values[0].rebuilt(results)


def grad_pass_through(f: Callable[[jax.Array], TensorLike]) -> Callable[[TensorLike], jax.Array]:
    """Returns the function with the gradient of the identity."""

    def call(x: TensorLike) -> jax.Array:
        x = convert_to_tensor(x)
        return x + lax.stop_gradient(convert_to_tensor(f(x)) - x)

    return call


# Order: JAX runs side effects in the order of the program.


@contextlib.contextmanager
def control_dependencies(control_inputs: object) -> Iterator[None]:
    """Returns a context without effect: operations run in the program's order."""
    yield


def group(*inputs: object, **kwargs: object) -> None:
    """Returns None: the operations have run already."""


def no_op(name: str | None = None) -> None:
    """Returns None."""


def tuple(
    tensors: Iterable[TensorLike], control_inputs: object = None, name: str | None = None
) -> list[jax.Array | None]:
    """Returns the tensors, as a list."""
    return [None if x is None else convert_to_tensor(x) for x in tensors]


# Devices and modes of execution.


def device(device_name: str | jax.Device | None) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which operations run on this device.

    JAX chooses the device for None and, unless `tf.config.set_soft_device_placement(False)` was called, for the name of
    a device that this process lacks.
    """
    try:
        return contextlib.nullcontext() if device_name is None else jax.default_device(devices.find_device(device_name))
    except errors.DeviceError:
        if not _config.get_soft_device_placement():
            raise
        return contextlib.nullcontext()


def executing_eagerly() -> bool:
    """Returns whether operations run immediately: False while a function is traced."""
    return not frames.is_tracing()


def inside_function() -> bool:
    """Returns whether a function is being traced."""
    return frames.is_tracing()


def init_scope() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which operations run immediately, also while a function is traced."""
    return dataset_reads.outside()


def get_current_name_scope() -> str:
    """Returns the prefix of the names of new variables."""
    return "/".join(thread_state.current.names)


def is_symbolic_tensor(tensor: object) -> bool:
    """Returns whether a tensor is a tracer, whose value is not known."""
    return _traced(tensor)


def get_logger() -> logging.Logger:
    """Returns the logger "tensorflow"."""
    return logging.getLogger("tensorflow")


def timestamp(name: str | None = None) -> jax.Array:
    """Returns the seconds since 1970, float64. In a traced function this is the time of tracing."""
    return jnp.asarray(time.time(), np.float64)
