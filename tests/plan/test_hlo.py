"""What is read in the text of compiled programs: collectives, their bytes, and what they overlap with."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax._base.planning import PlanError
from replicax._benchmark import hlo_collectives as hlo
from replicax._benchmark.hlo_module import Module
from replicax._plan import compiler
from replicax._plan.chips import CHIPS, parse
from replicax._plan.least_time import Costs
from replicax._plan.report import Inputs, report
from replicax._plan.table import text

SCHEDULE = Path(__file__).with_name("schedule.hlo").read_text()


def test_every_way_to_write_a_collective_is_read():
    found = [(c.kind, c.bytes, c.devices, c.overlaps, c.times, c.source) for c in hlo.collectives(SCHEDULE, 8)]
    assert found == [
        ("all-reduce", 128 + 6, 4, False, 1, "jit(step)/psum"),  # of two arrays, f32 and bf16
        ("all-reduce", 128, 8, True, 1, ""),  # a fusion runs meanwhile
        ("collective-permute", 128, 8, False, 1, ""),  # a copy is no computation
        ("all-gather", 128, 4, True, 1, "jit(step)/all_gather"),  # in three fusions, of which the second computes
        ("reduce-scatter", 64, 4, False, 3, ""),  # of 16 floats, in each round of a loop
    ]


LOOP = """\
HloModule loop, is_scheduled=true

%condition (state: (s32[], f32[8,4], s32[])) -> pred[] {
  %end = s32[] constant(12)
  %state = (s32[], f32[8,4], s32[]) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%count, %end), direction=LT
}

%product (a: f32[8,4], b: f32[4,4]) -> f32[8,4] {
  %a = f32[8,4] parameter(0)
  %b = f32[4,4] parameter(1)
  ROOT %convolution = f32[8,4] convolution(%a, %b), dim_labels=bf_io->bf
}

%body (state.1: (s32[], f32[8,4], s32[])) -> (s32[], f32[8,4], s32[]) {
  %state.1 = (s32[], f32[8,4], s32[]) parameter(0)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  %copied = s32[]{:T(128)S(6)} copy(%count.1)
  %x = f32[8,4] get-tuple-element(%state.1), index=1
  %step = s32[] get-tuple-element(%state.1), index=2
  %next = s32[] add(%copied, %step)
  %w = f32[4,4] all-gather(%x), replica_groups={{0,1}}, dimensions={0}
  %y = f32[8,4] fusion(%x, %w), kind=kOutput, calls=%product
  ROOT %result = (s32[], f32[8,4], s32[]) tuple(%next, %y, %step)
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4] parameter(0)
  %zero = s32[] constant(2)
  %start = s32[] copy(%zero)
  %one = s32[] constant(STEP)
  %first = (s32[], f32[8,4], s32[]) tuple(%start, %p, %one)
  %loop = (s32[], f32[8,4], s32[]) while(%first), condition=%condition, body=%body
  ROOT %out = f32[8,4] get-tuple-element(%loop), index=1
}
"""


def test_rounds_of_a_loop_are_read_from_its_counter():
    for step, rounds in (("1", 10), ("3", 4), ("-1", 1), ("0", 1)):
        loop = LOOP.replace("STEP", step)
        assert [(c.kind, c.times) for c in hlo.collectives(loop, 2)] == [("all-gather", rounds)]
        costs = Costs(Module(loop), "tpu")
        once = {"float32": 2 * 8 * 4 * 4}
        assert costs.total(all_rounds=False).products == once
        assert costs.total().products == {"float32": rounds * once["float32"]}
    unknown = LOOP.replace("constant(12)", "parameter(1)")
    assert [c.times for c in hlo.collectives(unknown, 2)] == [1]


@pytest.mark.parametrize("rounds", [1, 5])
def test_operations_of_all_rounds_are_counted(rounds):
    def step(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    kinds = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((rounds, 128, 128), jnp.float32)
    plan = report(parse(1), 1, Inputs(), compiler.measure(jax.jit(step).lower(*kinds).compile(), 1.0))
    products = rounds * 2 * 64 * 128 * 128
    assert products <= plan.flops <= 1.1 * products


def test_what_a_device_sends_in_a_ring():
    of = hlo.Collective
    assert of("all-reduce", 1000, 4, False).sent == 1500
    assert of("all-gather", 1000, 4, False, times=2).sent == 1500
    assert of("collective-permute", 1000, 4, True).sent == 1000


def test_the_figures_of_a_program_compiled_here():
    mesh = Mesh(np.array(jax.devices()[:4]), ("replica",))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("replica"))

    def step(w, x):
        gradient = jax.shard_map(
            lambda w, x: jax.lax.psum(x.T @ (x @ w), "replica"),
            mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("replica")), out_specs=PartitionSpec(), check_vma=False,
        )(w, x)  # fmt: skip
        return w - gradient

    w = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=whole)
    x = jax.ShapeDtypeStruct((4 * 16, 64), jnp.float32, sharding=rows)
    compiled = jax.jit(step, donate_argnums=0).lower(w, x).compile()
    weights, batch = 64 * 32 * 4, 16 * 64 * 4
    plan = report(parse(4), 4, Inputs(weights, 0, batch, {"w": weights}), compiler.measure(compiled, 1.0))
    assert [(c.kind, c.bytes, c.devices) for c in plan.collectives] == [("all-reduce", weights, 4)]
    assert (plan.memory.arguments, plan.memory.padding, plan.memory.outputs) == (weights + batch, 0, 0)  # w is donated
    compilers = compiled.memory_analysis()
    assert plan.memory.temporaries == compilers.temp_size_in_bytes >= weights  # the gradient
    assert plan.needed == plan.memory.total == weights + batch + plan.memory.temporaries + plan.memory.code
    assert plan.flops >= 2 * (2 * 16 * 64 * 32)
    assert plan.savings == (("w", weights * 3 // 4),)
    assert plan.fits and plan.bound is None


def test_the_bounds_of_a_step_are_of_its_chip():
    measured = {
        "memory": {"arguments": 2**30, "outputs": 0, "aliased": 0, "temporaries": 2**20, "code": 0},
        "flops": 197e12, "bytes": 819e9 / 2, "seconds": 1.0, "text": SCHEDULE,
    }  # fmt: skip
    plan = report(parse("v5e:2x4"), 8, Inputs(2**29, 2**28, 2**28), measured)
    assert plan.bounds["computation"] == sum(plan.products.values()) / 197e12
    assert plan.bounds["memory"] == plan.bytes_moved / 819e9 > 0 and "network" not in plan.bounds
    assert plan.bounds["links"] == pytest.approx(sum(c.sent for c in plan.collectives) / 200e9)
    assert plan.bound == max(plan.bounds.items(), key=lambda bound: bound[1]) and plan.bound[1] > 0
    assert plan.available == 16 * 2**30 and plan.fits
    shown = text("step", [plan])
    assert "1.00 GiB" in shown and "all-reduce of 134 B among 4 devices, does not overlap, jit(step)/psum" in shown


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm."


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (OUT_OF_MEMORY, 20.5 * 2**30),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (18.65G) "
            "exceeds available HBM (15.75G).",
            18.65 * 2**30 + 3 * 2**20,
        ),
    ],
)
def test_a_step_that_does_not_fit(error, needed):
    plan = report(parse("v5e:2x4"), 8, Inputs(2**20, 2**20, 2**20), {"error": error, "seconds": 2.0})
    assert not plan.fits and plan.needed == pytest.approx(needed) and plan.memory is None
    assert plan.available == 15.75 * 2**30
    assert "NO" in text("step", [plan]) and error[:20] in text("step", [plan])


def test_a_step_that_does_not_compile_is_reported_with_the_lines_of_xla_and_the_user():
    error = (
        'UNIMPLEMENTED: no such sort\n  at f32[8] sort(...), metadata={source_file="/home/me/train.py" source_line=7}'
    )
    with pytest.raises(
        PlanError, match=r"does not compile the step for h100:8 at train.py:7: UNIMPLEMENTED: no such sort at f32"
    ):
        report(parse("h100:8"), 8, Inputs(), {"error": error, "seconds": 2.0})


def test_what_is_not_known_of_a_step_that_does_not_fit_is_no_zero():
    plan = report(parse("v5e:2x4"), 8, Inputs(2**20, 2**20, 2**20), {"error": OUT_OF_MEMORY, "seconds": 2.0})
    cells = dict(re.split(r"\s{2,}", line.strip()) for line in text("step", [plan]).splitlines() if "  " in line)
    for name in ("temporaries", "collectives (that overlap)", "operations of a device", "bytes read and written"):
        assert cells[name] == "-"


def test_names_of_topologies():
    names = ("v5p:4x4x8", "v4:2x2x1", "cpu:3", 2, "h100:8", "H100:2x8", "rtx4090:1")
    assert [(t.size, t.platform, t.hosts) for t in map(parse, names)] == [
        (128, "tpu", 1),
        (8, "tpu", 1),  # two devices to a chip
        (3, "cpu", 1),
        (2, "cpu", 1),
        (8, "gpu", 1),
        (16, "gpu", 2),
        (1, "gpu", 1),
    ]
    assert parse("v4:2x2x1").memory == CHIPS["v4"].memory / 2
    assert parse("v5p:24x16x16").size == 6144 and parse("v5e:16x2").size == 32
    for large in ("v5e:32x8", "v5e:2x2x2", "v5p:16x20x24"):
        with pytest.raises(ValueError, match=f"There is no {large}: the largest slice of .* is"):
            parse(large)
    for large in ("h100:16", "h100:2x2x4", "a100-40gb:2x9", "l4:2000x8"):
        with pytest.raises(ValueError, match=f"There is no {large}: GPUs are named by their number, such as"):
            parse(large)
    assert parse(np.int64(8)) == parse("cpu:008") == parse(8) and parse(8192).size == 8192
    for many in (8193, 10**9, 10**5000, "9" * 5000, "cpu:8193"):
        with pytest.raises(ValueError, match="at most 8192 virtual CPU devices, got"):
            parse(many)
    for wrong in ("v5e", "v9:2x2", "v5e:0x4", "gpu:8", "h100", "h100:0", 0, -1, True, "8x", None, 2.5, b"2", [2]):
        with pytest.raises(ValueError, match="such as 'h100:8'.*The GPUs are a100-40gb, .* the TPUs are v4, v5e"):
            parse(wrong)
    with pytest.raises(
        ValueError, match="got 'a100:8' of type str. Did you mean a100-40gb:8 or a100-80gb:8 or a100-pcie:8[?]"
    ):
        parse("a100:8")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_figures_of_chips_are_in_their_order(chip):
    narrower = [chip.rate(kind) for kind in ("float32", "tf32", "bfloat16", "float8")]
    assert narrower == sorted(narrower) and chip.rate("integer") == float("inf")
    assert chip.link_speed < chip.memory_speed and chip.network_speed < chip.link_speed
    assert chip.source.startswith("https://")


def test_the_page_lists_the_figures_of_all_chips():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "planning.md").read_text()
    rows = re.findall(r"^\| `([\w-]+):[\dx]+` \| ([\d.]+) GiB \| ([^|]*) \| ([\d,]+) \| (\S+) \| (\S+) \|$", page, re.M)
    assert [row[0] for row in rows] == list(CHIPS)
    for (*_, memory, rates, speed, links, network), chip in zip(rows, CHIPS.values()):
        known = [chip.rates.get(kind) for kind in ("float32", "tf32", "bfloat16", "float8")]
        assert rates.split(", ") == ["-" if rate is None else f"{rate / 1e12:g} T" for rate in known]
        assert memory == f"{chip.memory / 2**30:.1f}" and speed == f"{chip.memory_speed / 1e9:,.0f}"
        assert links == f"{chip.link_speed / 1e9:g}" and network in (f"{chip.network_speed / 1e9:g}", "-")
