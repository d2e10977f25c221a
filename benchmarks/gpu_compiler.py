"""A training step compiled for GPUs that are not there: replicax beside the same step written by hand in JAX.

    replicax plan --install gpu
    python benchmarks/gpu_compiler.py
    python benchmarks/gpu_compiler.py --models mlp --topologies h100:8 --modes "sharded variables"

The real compiler for GPUs reports the memory of each program's temporaries on a GPU, and its collectives. Its schedule,
with the least time of each operation, gives the bytes that a GPU sends while its computation waits.
Nothing runs, so nothing here depends on the machine. The page on performance has the table.
"""

from __future__ import annotations

from typing import Any

from sides import Table, Target, finish, names, parsed, parser

REPLICAX = "replicax"
TOPOLOGIES = ["h100:8", "h100:2x8"]
MODELS = ["mlp", "cnn", "language model", "language model; bfloat16"]
MODES = ["replicated", "sharded state", "sharded variables"]


def plan_contenders(model: str, topology: str, mode: str) -> dict[str, dict[str, Any]]:
    """The compiler's figures of each contender's step."""
    import gpu_steps

    of = gpu_steps.MODELS[model]
    plans = {REPLICAX: gpu_steps.plan_with_replicax(of, mode, topology)}
    for form in gpu_steps.FORMS[mode]:
        plans[form] = plan_by_hand(of, mode, form, topology)
    return {name: figures_of(name, plan) for name, plan in plans.items()}


def plan_by_hand(model: Any, mode: str, form: str, topology: str) -> Any:
    """The plan of a step by hand, which is lowered without any value."""
    import gpu_steps
    import jax
    from jax import export

    from replicax._plan import apart, chips
    from replicax._plan.exports import Lowered
    from replicax._plan.report import Inputs, report

    where = chips.parse(topology)
    by_hand = gpu_steps.step_by_hand(model, mode, form, where.size)
    leaves, tree = jax.tree.flatten((by_hand.state, *by_hand.batch))  # as types of Optax cannot be exported

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(by_hand.step(*jax.tree.unflatten(tree, leaves)))

    exported = export.export(jax.jit(flat), platforms=[where.compiler])(*leaves)
    specs = [list(leaf.sharding.spec) for leaf in leaves]
    donated = list(range(len(jax.tree.leaves(by_hand.state))))
    lowered = Lowered(bytes(exported.serialize()), {"replica": where.size}, specs, donated, where.size, Inputs())
    return report(where, where.size, Inputs(), apart.compile_apart(lowered, where))


def figures_of(name: str, plan: Any) -> dict[str, Any]:
    """The figures of one plan."""
    if plan.memory is None:
        raise SystemExit(f"The step {name!r} does not compile for {plan.topology}: {plan.error}")
    collectives = {}
    for collective in plan.collectives:
        count, overlapping = collectives.get(collective.kind, (0, 0))
        overlapping += collective.times * collective.overlaps
        collectives[collective.kind] = count + collective.times, overlapping
    return {
        "temporaries": plan.memory.temporaries,
        "arguments": plan.memory.arguments,
        "collectives": collectives,
        "sent": sum(collective.sent for collective in plan.collectives),
        "exposed": plan.exposed,
        "seconds": max((event.end for event in plan.timeline), default=0.0),
    }


def tables(results: dict[str, Any]) -> dict[str, Table]:
    case = ["model", "topology", "variables"]
    head = [*case, "contender", "temporaries, MB", "MB sent", "exposed, MB", "ms at least", "collectives that overlap"]
    pairs = ["temporaries, MB", "by hand", "exposed, MB", "by hand", "ms at least", "by hand", "best form by hand"]
    rows, summary = [], []
    for r in results["gpu steps"]:
        names = [r["model"], r["topology"], r["mode"]]
        for name, of in r["of"].items():
            kinds = ", ".join(f"{b} of {a} {kind}" for kind, (a, b) in sorted(of["collectives"].items()))
            rows.append([*names, name, _mb(of, "temporaries"), _mb(of, "sent"), _mb(of, "exposed"), _ms(of), kinds])
        ours, form = r["of"][REPLICAX], best(r["of"])
        hand = r["of"][form]
        sizes = [_mb(of, size) for size in ("temporaries", "exposed") for of in (ours, hand)]
        summary.append([*names, *sizes, _ms(ours), _ms(hand), form])
    return {
        "gpu steps, all": ("A step on GPUs, by the compiler", head, rows),
        "gpu steps": ("A step on GPUs against the best form by hand", [*case, *pairs], summary),
    }


def _mb(of: dict[str, Any], size: str) -> str:
    return f"{of[size] / 1e6:.1f}"


def _ms(of: dict[str, Any]) -> str:
    return f"{1e3 * of['seconds']:.2f}"


def best(of: dict[str, dict[str, Any]]) -> str:
    """The form by hand that exposes the fewest tenths of a megabyte; of equal ones, the one with the least memory."""
    forms = [name for name in of if name != REPLICAX]
    return min(forms, key=lambda name: (round(of[name]["exposed"] / 1e5), of[name]["temporaries"]))


def targets(results: dict[str, Any]) -> list[Target]:
    memory, exposed = {}, {}
    for r in results["gpu steps"]:
        case, ours, hand = f"{r['model']}, {r['topology']}, {r['mode']}", r["of"][REPLICAX], r["of"][best(r["of"])]
        memory[case] = f"{ours['temporaries'] / hand['temporaries']:.3f}"
        exposed[case] = f"{max(0, ours['exposed'] - hand['exposed']) / 1e6:.2f}"
    title = "a step on GPUs against the form by hand that exposes least: "
    return [
        Target(title + "temporaries", 1.02, memory),
        Target(title + "further MB exposed", 0.2, exposed),  # a microsecond less of work exposes as much
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--models", type=names, default=MODELS)
    arguments.add_argument("--topologies", type=names, default=TOPOLOGIES)
    arguments.add_argument("--modes", type=names, default=MODES)
    options = parsed(arguments)
    import side_jax

    side_jax.set_devices("cpu", 2)
    results = {
        "gpu steps": [
            {"model": model, "topology": topology, "mode": mode, "of": plan_contenders(model, topology, mode)}
            for model in options.models
            for topology in options.topologies
            for mode in options.modes
        ]
    }
    finish(options, "the compiler for GPUs", ("jax", "optax"), results, tables(results), targets(results))


if __name__ == "__main__":
    main()
