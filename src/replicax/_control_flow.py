"""Checks of compiled replica functions: no collective where some replicas may not come, and which results differ.

A collective inside of a branch (`lax.cond`) or an open-ended loop (`lax.while_loop`) is fine as long as all replicas
take the same way. Where the condition may differ between replicas, some would wait for ever; that is refused while
the function is traced. Values differ between replicas when they come from per-replica arguments, on-read variables or
the replica id, and have not been through a collective since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

COLLECTIVES = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_to_all",
    "reduce_scatter", "psum_scatter", "ppermute", "pbroadcast",
}  # fmt: skip
_SAME_EVERYWHERE = {"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


def check(jaxpr: Any, varying_inputs: list[bool], varying_slots: set[int], results: bool = False) -> list[bool]:
    """`RuntimeError` where a collective depends on a condition that may differ between replicas.

    Args:
        jaxpr: of the replica function.
        varying_inputs: which of its inputs differ between replicas.
        varying_slots: the slots of those variables that do (see `_levels`).
        results: whether the result of this function is wanted.

    Returns:
        Which results of the jaxpr differ; for none where collectives of groups of replicas leave that open.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    if not results and not _has_collective(inner):
        return []
    differ = _walk(inner, varying_inputs, varying_slots)
    return [False] * len(differ) if _has_groups(inner) else differ


def _jaxprs(value: Any) -> Iterator[Any]:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        yield getattr(value, "jaxpr", value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in _jaxprs(value):
                yield from _equations(inner)


def _has_collective(jaxpr: Any) -> bool:
    return any(eqn.primitive.name in COLLECTIVES for eqn in _equations(jaxpr))


def _has_groups(jaxpr: Any) -> bool:
    return any(eqn.params.get("axis_index_groups") for eqn in _equations(jaxpr))


def _walk(jaxpr: Any, varying_inputs: list[bool], slots: set[int]) -> list[bool]:
    """Checks one jaxpr; which of its outputs may differ between replicas."""
    varying = {var for var, flag in zip(jaxpr.invars, varying_inputs) if flag}

    def differs(atom: Any) -> bool:
        return not hasattr(atom, "val") and atom in varying

    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        flags = [differs(atom) for atom in eqn.invars]
        inner = [j for value in eqn.params.values() for j in _jaxprs(value)]
        out = [any(flags) or name == "axis_index" or name in COLLECTIVES or bool(inner and not eqn.invars)] * len(
            eqn.outvars
        )
        if name == "replicax_input":
            out = [eqn.params["slot"] in slots]
        elif name in _SAME_EVERYWHERE and not eqn.params.get("axis_index_groups"):
            out = [False] * len(eqn.outvars)
        elif name == "optimization_barrier":
            out = flags
        elif name == "cond":
            out = _cond(eqn, flags, slots)
        elif name == "while":
            out = _while(eqn, flags, slots)
        elif name == "scan" and inner:
            out = _scan(eqn, inner[0], flags, slots)
        elif len(inner) == 1 and len(inner[0].invars) == len(flags):  # jit, checkpoint, custom derivatives ...
            out = _walk(inner[0], flags, slots)
        varying.update(var for var, flag in zip(eqn.outvars, out) if flag)
    return [differs(atom) for atom in jaxpr.outvars]


def _refuse(what: str) -> None:
    raise RuntimeError(
        f"`merge_call`, `all_reduce` or another meeting of the replicas stands inside of {what} whose condition may "
        "differ between replicas, so that some would wait for others for ever. Meet outside of it, or make the "
        "condition the same on all replicas (from values that all replicas share, or that went through all_reduce)."
    )


def _cond(eqn: Any, flags: list[bool], slots: set[int]) -> list[bool]:
    branches = list(_jaxprs(eqn.params["branches"]))
    if flags[0] and any(_has_collective(branch) for branch in branches):
        _refuse("a branch")
    outs = [_walk(branch, flags[1:], slots) for branch in branches]
    return [flags[0] or any(column) for column in zip(*outs)]


def _while(eqn: Any, flags: list[bool], slots: set[int]) -> list[bool]:
    (cond,), (body,) = list(_jaxprs(eqn.params["cond_jaxpr"])), list(_jaxprs(eqn.params["body_jaxpr"]))
    cond_count, body_count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = flags[:cond_count], flags[cond_count : cond_count + body_count]
    carry = flags[cond_count + body_count :]
    for _ in range(len(carry) + 1):
        new = [a or b for a, b in zip(carry, _walk(body, body_consts + carry, slots))]
        if new == carry:
            break
        carry = new
    if _walk(cond, cond_consts + carry, slots)[0]:
        if _has_collective(body) or _has_collective(cond):
            _refuse("a loop")
        return [True] * len(carry)
    return carry


def _scan(eqn: Any, body: Any, flags: list[bool], slots: set[int]) -> list[bool]:
    # What is scanned over has one dimension less in the body; the rest are constants and the carry, which comes out.
    carried = sum(out.aval.ndim == inner.aval.ndim for out, inner in zip(eqn.outvars, body.outvars))
    scanned = sum(arg.aval.ndim != inner.aval.ndim for arg, inner in zip(eqn.invars, body.invars))
    consts = len(eqn.invars) - carried - scanned
    carry = flags[consts : consts + carried]
    outs: list[bool] = []
    for _ in range(len(carry) + 1):
        outs = _walk(body, flags[:consts] + carry + flags[consts + carried :], slots)
        new = [a or b for a, b in zip(carry, outs[:carried])]
        if new == carry:
            break
        carry = new
    return carry + outs[carried:]
