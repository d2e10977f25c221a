"""The timeline of a compiled program, what its operations cost, and its largest temporaries: by hand on an H100."""

import jax
import jax.numpy as jnp
import pytest

from replicax._benchmark.hlo_collectives import Collective, collectives
from replicax._benchmark.hlo_module import Module
from replicax._plan import schedule
from replicax._plan.chips import CHIPS, parse
from replicax._plan.least_time import Costs, links_and_network
from replicax._plan.live_buffers import largest_buffers
from replicax._plan.source_lines import SourceLines

H100 = CHIPS["h100"]
CALL = (
    'custom_call_target="__cublas$lt$matmul", '
    'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}'
)
HEAD = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "/usr/lib/python3.11/site-packages/optax/losses.py"
2 "/home/me/train.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=90 end_line=90 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=31 end_line=31 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
"""
# 16 GFLOP in TF32, beside which 16 MiB are gathered; then a sum for which the computation waits.
STEP = f"""\
{HEAD}
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (p: f32[512,2048], w: f32[2048,256]) -> f32[2048,2048] {{
  %p = f32[2048,2048]{{1,0}} parameter(0)
  %w = f32[2048,256]{{1,0}} parameter(1)
  %gather = (f32[2048,256]{{1,0}}, f32[2048,2048]{{1,0}}) all-gather-start(%w), replica_groups=[1,8]<=[8], dimensions={{1}}
  %product = (f32[2048,2048]{{1,0}}, s8[1024]{{0}}) custom-call(%p, %p), {CALL}, metadata={{op_name="jit(step)/dot_general" stack_frame_id=2}}
  %whole = f32[2048,2048]{{1,0}} all-gather-done(%gather)
  %left = f32[2048,2048]{{1,0}} get-tuple-element(%product), index=0
  %sum = f32[2048,2048]{{1,0}} all-reduce(%left), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %out = f32[2048,2048]{{1,0}} add(%sum, %whole), metadata={{op_name="jit(step)/add" stack_frame_id=1}}
}}
"""  # noqa: E501
MATRIX = 2048 * 2048 * 4


def timeline(text, topology="h100:8"):
    return schedule.timeline(Module(text), parse(topology), SourceLines(text))


def test_collectives_run_beside_the_computation_that_does_not_wait_for_them():
    gather, product, reduced, added = timeline(STEP)
    product_time = 2 * 2048**3 / H100.rates["tf32"]
    gather_time = MATRIX * 7 / 8 / H100.link_speed
    assert (product.kind, product.start, product.end) == ("product", 0.0, pytest.approx(product_time))
    assert (gather.kind, gather.start, gather.end) == ("all-gather", 0.0, pytest.approx(gather_time))
    assert gather.size == MATRIX * 7 / 8 and gather.exposed == 0.0 < product_time - gather_time
    assert reduced.start == product.end and reduced.end - reduced.start == pytest.approx(2 * gather_time)
    assert reduced.exposed == pytest.approx(2 * gather_time)  # nothing runs beside it
    assert (added.kind, added.start) == ("other", reduced.end)
    assert added.end - added.start == pytest.approx(3 * MATRIX / H100.memory_speed)
    exposed = schedule.exposed_communication([gather, product, reduced, added])
    assert exposed == pytest.approx((MATRIX * 7 / 4, 2 * gather_time))
    assert (product.line, product.operation) == ("train.py:31", "jit(step)/dot_general")  # not Optax's line
    assert added.line == "train.py:31" and timeline(STEP, "8") == ()


def test_a_collective_that_takes_longer_than_the_work_beside_it_is_exposed_for_the_rest():
    slow = STEP.replace("f32[2048,256]", "f32[2048,1024]").replace(
        "f32[2048,2048]{1,0}) all-gather", "f32[2048,8192]{1,0}) all-gather"
    )
    slow = slow.replace("%whole = f32[2048,2048]", "%whole = f32[2048,8192]")
    gather, product, *_ = timeline(slow)
    assert gather.end == pytest.approx(4 * MATRIX * 7 / 8 / H100.link_speed)
    assert gather.exposed == pytest.approx(gather.end - product.end) and gather.exposed > 0
    assert gather.exposed_bytes == pytest.approx(gather.size * gather.exposed / gather.end)


@pytest.mark.parametrize(
    ("kind", "links", "network"),
    [  # of 1000 bytes among two hosts of eight
        ("all-gather", 7 / 8, 1 / 16),
        ("reduce-scatter", 7 / 8, 1 / 16),
        ("all-reduce", 14 / 8, 2 / 16),
        ("all-to-all", 7 / 16, 8 / 16),
        ("collective-permute", 0, 1),
    ],
)
def test_what_goes_over_links_and_over_the_network(kind, links, network):
    everyone = (tuple(range(16)),)
    found = links_and_network(Collective(kind, 1000, 16, False, groups=everyone), parse("h100:2x8"))
    assert found == pytest.approx((1000 * links / H100.link_speed, 1000 * network / H100.network_speed))
    within = tuple(range(8)), tuple(range(8, 16))
    assert links_and_network(Collective(kind, 1000, 8, False, groups=within), parse("h100:2x8"))[1] == 0
    pairs = tuple((i, i + 8) for i in range(8))
    assert links_and_network(Collective(kind, 1000, 2, False, groups=pairs), parse("h100:2x8"))[0] == 0


LOOP = """\
%body (s: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %s = (s32[], f32[64,64]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[64,64] get-tuple-element(%s), index=1
  %y = f32[64,64] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[64,64]) tuple(%i, %y)
}

%condition (s: (s32[], f32[64,64])) -> pred[] {
  %s = (s32[], f32[64,64]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64] parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[64,64]) tuple(%zero, %p)
  %loop = (s32[], f32[64,64]) while(%first), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"ROUNDS"}}
  ROOT %out = f32[64,64] get-tuple-element(%loop), index=1
}
"""  # noqa: E501


@pytest.mark.parametrize("rounds", [3, 10**6])
def test_the_rounds_of_a_loop_take_their_time_in_few_events(rounds):
    events = timeline(LOOP.replace("ROUNDS", str(rounds)))
    once = 3 * 64 * 64 * 4 / H100.memory_speed
    assert events[-1].end == pytest.approx(rounds * once)
    assert sum(event.size for event in events) == pytest.approx(rounds * 2 * 64**3)
    assert len(events) == rounds if rounds == 3 else len(events) <= schedule.MOST_EVENTS


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 0), (1, 3))])
@pytest.mark.parametrize(("strides", "image_step", "kernel_step"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_operations_of_convolutions_are_those_that_xla_counts(padding, strides, image_step, kernel_step):
    if image_step > 1 and padding in ("SAME", "VALID"):
        padding = ((1, 1), (1, 1))
    options = {"lhs_dilation": (image_step,) * 2, "rhs_dilation": (kernel_step,) * 2}
    names = ("NHWC", "HWIO", "NHWC")

    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (strides,) * 2, padding, dimension_numbers=names, **options)

    x, w = jax.ShapeDtypeStruct((2, 9, 8, 3), jnp.float32), jax.ShapeDtypeStruct((3, 2, 3, 5), jnp.float32)
    lowered = jax.jit(convolve).lower(x, w)
    text = lowered.compiler_ir("hlo").as_hlo_text()
    text = text.replace(" convolution(", " convolution(%").replace(", Arg", ", %Arg").replace("%%", "%")
    counted = Costs(Module(_with_marks(text)), "tpu").total().products
    assert counted == {"float32": lowered.cost_analysis()["flops"]}


def _with_marks(text):
    """Return HLO as compiled programs have it, with a mark before each name."""
    lines = []
    for line in text.splitlines():
        if " = " in line:
            name, rest = line.strip().removeprefix("ROOT ").split(" = ", 1)
            start, end = rest.index("("), rest.index(")")
            operands = ", ".join(f"%{each.strip().lstrip('%')}" for each in rest[start + 1 : end].split(","))
            if "parameter(" in rest:
                operands = rest[start + 1 : end]
            line = f"  %{name} = {rest[:start]}({operands}{rest[end:]}"
        lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("f32[8,4]", "tf32"),
        ("bf16[8,4]", "bfloat16"),
        ("f16[8,4]", "bfloat16"),
        ("f8e4m3fn[8,4]", "float8"),
        ("s8[8,4]", "integer"),
    ],
)
def test_products_are_counted_by_the_type_of_their_factors(text, kind):
    program = f"""\
ENTRY %main (p: {text}) -> {text} {{
  %p = {text} parameter(0)
  ROOT %out = (f32[8,8], s8[64]) custom-call(%p, %p), {CALL}
}}
"""
    assert Costs(Module(program), "gpu").total().products == {kind: 2 * 8 * 8 * 4}
    exact = program.replace("backend_config={", 'backend_config={"precision_config":{"operand_precision":["HIGHEST"]},')
    assert Costs(Module(exact), "gpu").total().products == {"float32" if kind == "tf32" else kind: 512}


@pytest.mark.parametrize(("name", "products"), [("fmhaSoftmax", 2), ("fmhaSoftmaxBackward", 5)])
@pytest.mark.parametrize(("mask", "share"), [("CAUSAL", 2), ("NO_MASK", 1)])
def test_attention_of_cudnn_is_two_products_and_five_backward(name, products, mask, share):
    attributes = '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "128", "128"]}'
    program = f"""\
ENTRY %main (q: bf16[2,128,4,64]) -> bf16[2,128,4,64] {{
  %q = bf16[2,128,4,64] parameter(0)
  ROOT %out = (bf16[2,128,4,64], u8[0]) custom-call(%q, %q, %q), custom_call_target="__cudnn${name}", backend_config={{"cudnn_fmha_backend_config": {{{attributes}, "mask_type": "{mask}"}}}}
}}
"""  # noqa: E501
    multiplications = products * 2 * 4 * 128 * 128 * 64 // share
    assert Costs(Module(program), "gpu").total().products == {"bfloat16": 2 * multiplications}


def test_the_largest_temporaries_are_those_that_exist_at_the_peak():
    # The product and the gathered array exist at the same time; the sum takes the place of the product.
    found = largest_buffers(Module(STEP), SourceLines(STEP))
    assert [(each.size, each.name, each.line) for each in found[:2]] == [
        (MATRIX, "gather", ""),
        (MATRIX, "product", "train.py:31"),
    ]
    assert len(collectives(STEP, 8)) == 2 and len(found) == 3 and found[2].size == 1024  # the workspace


def test_buffers_of_one_line_are_one_entry():
    lines = "\n".join(f'  %x{i} = f32[1024] exponential(%p), metadata={{op_name="jit(step)/exp"}}' for i in range(3))
    program = f"""\
ENTRY %main (p: f32[1024]) -> f32[] {{
  %p = f32[1024] parameter(0)
{lines}
  ROOT %out = f32[] custom-call(%x0, %x1, %x2), custom_call_target="sum"
}}
"""
    (buffer,) = largest_buffers(Module(program), SourceLines(program))
    assert (buffer.count, buffer.size, buffer.operation) == (3, 4096, "jit(step)/exp")
