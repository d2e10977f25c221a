"""Checks of compiled replica functions: no collective where some replicas may not come, which results differ, and which
depend on the former value of a variable.

A collective inside of a branch (`lax.cond`) or an open-ended loop (`lax.while_loop`) is fine as long as all replicas
take the same way. Where the condition may differ between replicas, some would wait for ever; that is refused while
the function is traced. Values differ between replicas when they come from per-replica arguments, on-read variables or
the replica id, and have not been through a collective since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax.extend.core as jex

from replicax._base.jaxprs import AnyJaxpr, Atom, equations, jaxprs_in, opened, parts_of_scan
from replicax._passes.interpret import Interpreter, Rule
from replicax._passes.primitives import COLLECTIVES, SAME_EVERYWHERE
from replicax._tracing import frames


def check(
    jaxpr: jex.ClosedJaxpr, varying_inputs: list[bool], varying_slots: set[int], results: bool = False
) -> list[bool]:
    """Raises RuntimeError where a collective depends on a condition that may differ between replicas.

    Args:
        jaxpr: of the replica function.
        varying_inputs: which of its inputs differ between replicas.
        varying_slots: the slots of those variables that do (see `_tracing.frames`).
        results: whether the result of this function is wanted.

    Returns:
        Which results of the jaxpr may differ. What a collective of groups of replicas gives may (see `has_groups`).
    """
    inner, _ = opened(jaxpr)
    if not results and not _has_collective(inner):
        return []
    return _Flow(varying_slots, of_replicas=True).run(jaxpr, varying_inputs)


def check_shared(level: frames.TraceFrame, jaxpr: jex.ClosedJaxpr, differ: list[bool]) -> None:
    """Raises ValueError where replicas assign to a variable that they share different values computed from its own.

    One after the other they would see what those before them have assigned, which replicas that compute side by side
    do not. What all assign alike, such as an optimizer's new state, counts once.

    Args:
        level: of the replica function.
        jaxpr: the function, whose results end with the level's `shared_leaves`.
        differ: which of its results may differ between replicas, from `check`.
    """
    assert level.mesh is not None  # that of the replicas
    sizes = [*map(len, level.mesh.groups or ())] or [level.mesh.size]
    if not level.shared or max(sizes) < 2:
        return
    inner, _ = opened(jaxpr)
    first = len(inner.outvars) - len(level.shared_leaves)
    replaced = set()
    for variable, method, leaves in level.shared:
        own = _Flow(set(level.inputs.get(id(variable), ())), of_replicas=False)
        depend = own.run(jaxpr, [False] * len(inner.invars))
        found = any(differ[i] and depend[i] for i in range(first, first + len(leaves)))
        first += len(leaves)
        if found or (method != "assign" and id(variable) in replaced):
            raise ValueError(
                f"{variable.name} was made outside of the strategy's scope, so that all replicas share it, and they "
                "assign values to it that depend on its former one. One after the other, each would see what those "
                "before it have assigned, which replicas in compiled code do not. Make the variable, or the layer, "
                "metric or optimizer that it belongs to, in `with strategy.scope():`. To add up what replicas "
                "compute without it, `assign_add` alone works too."
            )
        if method == "assign":
            replaced.add(id(variable))


def reduces_copies(
    jaxpr: jex.ClosedJaxpr, varying_inputs: list[bool], varying_slots: set[int], common: Iterable[object]
) -> tuple[bool, list[bool]]:
    """Return whether replicas reduce what all of them compute alike from `common` arrays, and which results are such.

    Collectives inside of branches, loops and calls are not looked at.
    """
    inner, _ = opened(jaxpr)
    differ = _Flow(varying_slots, of_replicas=True).environment(jaxpr, varying_inputs)
    depend = _Flow(set(), of_replicas=False, constants=common).environment(jaxpr, [False] * len(inner.invars))

    def copies(atoms: Sequence[Atom]) -> list[bool]:
        return [b and not a for a, b in zip(differ.of(atoms), depend.of(atoms))]

    reduced = any(any(copies(eqn.invars)) for eqn in inner.eqns if eqn.primitive.name in SAME_EVERYWHERE)
    return reduced, copies(inner.outvars)


def _has_collective(jaxpr: AnyJaxpr) -> bool:
    return any(eqn.primitive.name in COLLECTIVES for eqn in equations(jaxpr))


def differing(jaxpr: AnyJaxpr, inputs: Sequence[bool]) -> set[jex.Var]:
    """Returns the variables of a replica's jaxpr whose values may differ between replicas, as `inputs` says of its."""
    found = _Flow(set(), of_replicas=True).environment(jaxpr, inputs).known
    return {var for var, differs in found.items() if differs}


def differing_in(eqn: jex.JaxprEqn, operands: Sequence[bool]) -> list[bool]:
    """Returns which inputs of the jaxpr of a loop (`scan`) or a call may differ between replicas."""
    if eqn.primitive.name != "scan":
        return list(operands)
    consts, carried = parts_of_scan(eqn)
    results = _Flow(set(), of_replicas=True).rule(eqn)(eqn, list(operands))
    return [*operands[:consts], *results[:carried], *operands[consts + carried :]]


def has_groups(jaxpr: AnyJaxpr) -> bool:
    """Returns whether a replica function has collectives of groups of replicas, after which values may still differ."""
    return any(eqn.params.get("axis_index_groups") for eqn in equations(jaxpr))


def _refuse(what: str) -> None:
    raise RuntimeError(
        f"`merge_call`, `all_reduce` or another meeting of the replicas stands inside of {what} whose condition may "
        "differ between replicas, so that some would wait for others for ever. Meet outside of it, or make the "
        "condition the same on all replicas (from values that all replicas share, or that went through all_reduce)."
    )


class _Flow(Interpreter[bool]):
    """Follows values through jaxprs: which of them come from the variables of some slots, or from some constants.

    With `of_replicas`, which of them differ between replicas: those that come from the slots or the replica id, as long
    as they have not been through a collective. Collectives that some replicas may not come to are refused.
    """

    def __init__(self, slots: set[int], of_replicas: bool, constants: Iterable[object] = ()):
        self._slots, self._of_replicas = slots, of_replicas
        self._constants = {*map(id, constants)}

    def literal(self, literal: jex.Literal) -> bool:
        return False

    def constant(self, value: object) -> bool:
        return id(value) in self._constants

    def rule(self, eqn: jex.JaxprEqn) -> Rule[bool]:
        return {"cond": self._cond, "while": self._while, "scan": self._scan}.get(eqn.primitive.name, self._equation)

    def _equation(self, eqn: jex.JaxprEqn, flags: list[bool]) -> list[bool]:
        name, count = eqn.primitive.name, len(eqn.outvars)
        inner = list(jaxprs_in([*eqn.params.values()]))
        if frames.is_input(eqn):
            return [eqn.params["slot"] in self._slots]
        if self._of_replicas and name in SAME_EVERYWHERE and not eqn.params.get("axis_index_groups"):
            return [False] * count
        if name == "optimization_barrier":
            return flags
        if len(inner) == 1 and len(opened(inner[0])[0].invars) == len(flags):  # jit, checkpoint, custom derivatives ...
            return self.run(inner[0], flags)
        own = name == "axis_index" or name in COLLECTIVES or bool(inner and not eqn.invars)
        return [any(flags) or (own and self._of_replicas)] * count

    def _cond(self, eqn: jex.JaxprEqn, flags: list[bool]) -> list[bool]:
        branches = list(jaxprs_in(eqn.params["branches"]))
        if self._of_replicas and flags[0] and any(_has_collective(branch) for branch in branches):
            _refuse("a branch")
        outs = [self.run(branch, flags[1:]) for branch in branches]
        return [flags[0] or any(column) for column in zip(*outs)]

    def _while(self, eqn: jex.JaxprEqn, flags: list[bool]) -> list[bool]:
        (cond,), (body,) = list(jaxprs_in(eqn.params["cond_jaxpr"])), list(jaxprs_in(eqn.params["body_jaxpr"]))
        cond_count, body_count = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond_consts, body_consts = flags[:cond_count], flags[cond_count : cond_count + body_count]
        carry = flags[cond_count + body_count :]
        carry = _settled(carry, lambda carry: self.run(body, body_consts + carry))
        if self.run(cond, cond_consts + carry)[0]:
            if self._of_replicas and (_has_collective(body) or _has_collective(cond)):
                _refuse("a loop")
            return [True] * len(carry)
        return carry

    def _scan(self, eqn: jex.JaxprEqn, flags: list[bool]) -> list[bool]:
        consts, carried = parts_of_scan(eqn)

        def iteration(carry: list[bool]) -> list[bool]:
            return self.run(eqn.params["jaxpr"], flags[:consts] + carry + flags[consts + carried :])

        return _settled(flags[consts : consts + carried], iteration)


def _settled(carry: list[bool], iteration: Callable[[list[bool]], list[bool]]) -> list[bool]:
    """Returns the flags of what a loop gives, its carry first, once another iteration adds none to the carry."""
    while True:
        outs = iteration(carry)
        after = [a or b for a, b in zip(carry, outs)]
        if after == carry:
            return carry + outs[len(carry) :]
        carry = after
