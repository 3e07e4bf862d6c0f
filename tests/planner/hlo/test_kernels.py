"""FLOPs of matmuls and bytes of memory traffic of single instructions, compared with counts by hand."""

import pytest

from jgt.planner.hardware.rates import AttentionWork, MatmulWork
from jgt.planner.hlo.kernels import KernelCost, is_kernel, kernel_cost
from jgt.planner.hlo.text import Module

BF16, F32, S32 = 2, 4, 4


def module(text):
    return Module.parse(f"HloModule one\n\n{text}")


def of(text):
    """The cost of the instruction that is a program's result."""
    found = module(text)
    return kernel_cost(found, found.computations[found.entry].root)


def test_dot():
    found = of("""\
ENTRY %main (x: bf16[4,8], y: bf16[8,16]) -> f32[4,16] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = bf16[8,16]{1,0} parameter(1)
  ROOT %dot = f32[4,16]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
""")
    assert found == KernelCost(matmuls=(MatmulWork("bf16", 1, 4, 16, 8),), num_bytes=(4 * 8 + 8 * 16) * BF16 + 4 * 16 * F32)


def test_dot_with_batch_dims_and_two_contracting_dims():
    found = of("""\
ENTRY %main (x: f32[2,3,5,7], y: f32[2,5,11,7]) -> f32[2,3,11] {
  %x = f32[2,3,5,7]{3,2,1,0} parameter(0)
  %y = f32[2,5,11,7]{3,2,1,0} parameter(1)
  ROOT %dot = f32[2,3,11]{2,1,0} dot(%x, %y), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, rhs_batch_dims={0}, rhs_contracting_dims={1,3}
}
""")
    assert found.matmuls == (MatmulWork("f32", 2, 3, 11, 5 * 7),)
    assert found.flops == 2 * (2 * 3 * 11) * (5 * 7)


def test_dot_inside_a_fusion():
    found = of("""\
%fused (p: f32[4,8], q: f32[8,16]) -> f32[4,16] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[8,16]{1,0} parameter(1)
  %dot = f32[4,16]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %tanh = f32[4,16]{1,0} tanh(%dot)
}

ENTRY %main (x: f32[4,8], y: f32[8,16]) -> f32[4,16] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[8,16]{1,0} parameter(1)
  ROOT %fusion = f32[4,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused
}
""")
    assert found == KernelCost(matmuls=(MatmulWork("f32", 1, 4, 16, 8),), num_bytes=(4 * 8 + 8 * 16 + 4 * 16) * F32)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__onednn$matmul"])
def test_matmuls_of_libraries_without_their_workspace(target):
    found = of(f"""\
ENTRY %main (x: f32[8,4], y: f32[8,16]) -> (f32[4,16], s8[4194304]) {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %y = f32[8,16]{{1,0}} parameter(1)
  ROOT %gemm = (f32[4,16]{{1,0}}, s8[4194304]{{0}}) custom-call(%x, %y), custom_call_target="{target}", \
backend_config={{"gemm_backend_config":{{"alpha_real":1,\
"dot_dimension_numbers":{{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"]}}}}}}
}}
""")
    assert found == KernelCost(matmuls=(MatmulWork("f32", 1, 4, 16, 8),), num_bytes=(8 * 4 + 8 * 16 + 4 * 16) * F32)


@pytest.mark.parametrize(("target", "mask", "matmuls"), [("", "CAUSAL", 1), ("", "NO_MASK", 2), ("Backward", "PADDING_CAUSAL", 2.5)])
def test_attention_of_cudnn(target, mask, matmuls):
    """Two matmuls with the scores [2, 4, 16, 16] forward and five backward. A causal mask halves their FLOPs."""
    found = of(f"""\
ENTRY %main (q: bf16[2,16,4,8], k: bf16[2,16,4,8]) -> (bf16[2,16,4,8], u8[0]) {{
  %q = bf16[2,16,4,8]{{3,2,1,0}} parameter(0)
  %k = bf16[2,16,4,8]{{3,2,1,0}} parameter(1)
  ROOT %one = (bf16[2,16,4,8]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k), custom_call_target="__cudnn$fmhaSoftmax{target}", \
backend_config={{"cudnn_fmha_backend_config": {{\
"intermediate_tensor_shape": {{"element_type": "BF16", "dimensions": ["2", "4", "16", "16"]}}, \
"mask_type": "{mask}"}}}}
}}
""")
    flops = matmuls * 2 * (2 * 4 * 16 * 16) * 8
    assert (found.matmuls, found.flops) == ((), flops)
    assert found.attention == AttentionWork(flops, 16, 8, is_backward=target == "Backward")


@pytest.mark.parametrize(("target", "widths"), [("", 24 + 16), ("Backward", 3 * 24 + 2 * 16)])
def test_attention_of_cudnn_with_values_of_another_width(target, widths):
    found = of(f"""\
ENTRY %main (q: bf16[2,16,4,24], k: bf16[2,16,4,24], v: bf16[2,16,4,16]) -> (bf16[2,16,4,16], u8[0]) {{
  %q = bf16[2,16,4,24]{{3,2,1,0}} parameter(0)
  %k = bf16[2,16,4,24]{{3,2,1,0}} parameter(1)
  %v = bf16[2,16,4,16]{{3,2,1,0}} parameter(2)
  ROOT %one = (bf16[2,16,4,16]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmax{target}", \
operand_layout_constraints={{bf16[2,16,4,24]{{3,2,1,0}}, bf16[2,16,4,24]{{3,2,1,0}}, bf16[2,16,4,16]{{3,2,1,0}}}}, \
backend_config={{"cudnn_fmha_backend_config": {{\
"intermediate_tensor_shape": {{"element_type": "BF16", "dimensions": ["2", "4", "16", "16"]}}, \
"mask_type": "NO_MASK"}}}}
}}
""")
    assert found.flops == 2 * (2 * 4 * 16 * 16) * widths


def test_convolution():
    found = of("""\
ENTRY %main (x: f32[2,8,8,3], w: f32[5,5,3,16]) -> f32[2,8,8,16] {
  %x = f32[2,8,8,3]{3,2,1,0} parameter(0)
  %w = f32[5,5,3,16]{3,2,1,0} parameter(1)
  ROOT %conv = f32[2,8,8,16]{3,2,1,0} convolution(%x, %w), window={size=5x5 pad=2_2x2_2}, dim_labels=b01f_01io->b01f
}
""")
    assert found == KernelCost(
        matmuls=(MatmulWork("f32", 1, 2 * 8 * 8, 16, 5 * 5 * 3),), num_bytes=(2 * 8 * 8 * 3 + 5 * 5 * 3 * 16 + 2 * 8 * 8 * 16) * F32
    )


def test_convolution_in_groups_sees_the_inputs_of_its_own_group():
    found = of("""\
ENTRY %main (x: f32[2,8,6], w: f32[3,2,9]) -> f32[2,8,9] {
  %x = f32[2,8,6]{2,1,0} parameter(0)
  %w = f32[3,2,9]{2,1,0} parameter(1)
  ROOT %conv = f32[2,8,9]{2,1,0} convolution(%x, %w), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f, feature_group_count=3
}
""")
    assert found.flops == 2 * (2 * 8 * 9) * (3 * 2)


def test_an_elementwise_op_has_bytes_and_no_flops():
    found = of("""\
ENTRY %main (x: f32[4,8], y: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[4,8]{1,0} parameter(1)
  ROOT %add = f32[4,8]{1,0} add(%x, %y)
}
""")
    assert found == KernelCost(num_bytes=3 * 4 * 8 * F32)


# -- slices ------------------------------------------------------------------------------------------------------

READ = """\
%fused (stack: f32[10,4,4], at: s32[]) -> f32[4,4] {{
  %stack = f32[10,4,4]{{2,1,0}} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,4,4]{{2,1,0}} dynamic-slice(%stack, %at, %zero, %zero), dynamic_slice_sizes={{1,4,4}}
  {rest}
}}

ENTRY %main (x: f32[10,4,4], n: s32[]) -> f32[{result}] {{
  %x = f32[10,4,4]{{2,1,0}} parameter(0)
  %n = s32[] parameter(1)
  ROOT %fusion = f32[{result}] fusion(%x, %n), kind=kLoop, calls=%fused
}}
"""


def test_a_fusion_that_slices_reads_only_the_slice():
    found = of(READ.format(result="4,4", rest="ROOT %out = f32[4,4]{1,0} bitcast(%slice)"))
    assert found.num_bytes == (4 * 4 + 4 * 4) * F32 + S32


def test_a_fusion_that_reads_a_slice_and_the_whole_reads_the_whole():
    rest = "%whole = f32[10,4,4]{2,1,0} broadcast(%slice), dimensions={0,1,2}\n  ROOT %out = f32[10,4,4]{2,1,0} add(%whole, %stack)"
    assert of(READ.format(result="10,4,4", rest=rest)).num_bytes == 2 * 10 * 4 * 4 * F32 + S32


def test_a_fusion_that_updates_in_place_writes_the_update():
    found = of("""\
%fused (stack: f32[10,4,4], new: f32[4,4], at: s32[]) -> f32[10,4,4] {
  %stack = f32[10,4,4]{2,1,0} parameter(0)
  %new = f32[4,4]{1,0} parameter(1)
  %row = f32[1,4,4]{2,1,0} bitcast(%new)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[10,4,4]{2,1,0} dynamic-update-slice(%stack, %row, %at, %zero, %zero)
}

ENTRY %main (x: f32[10,4,4], y: f32[4,4], n: s32[]) -> f32[10,4,4] {
  %x = f32[10,4,4]{2,1,0} parameter(0)
  %y = f32[4,4]{1,0} parameter(1)
  %n = s32[] parameter(2)
  ROOT %fusion = f32[10,4,4]{2,1,0} fusion(%x, %y, %n), kind=kLoop, calls=%fused
}
""")
    assert found.num_bytes == (4 * 4 + 4 * 4) * F32 + S32


def test_a_fusion_of_several_results_writes_each():
    found = of("""\
%fused (stack: f32[10,4], new: f32[1,4], at: s32[]) -> (f32[10,4], f32[1,4]) {
  %stack = f32[10,4]{1,0} parameter(0)
  %new = f32[1,4]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  %update = f32[10,4]{1,0} dynamic-update-slice(%stack, %new, %at, %zero)
  %double = f32[1,4]{1,0} add(%new, %new)
  ROOT %both = (f32[10,4]{1,0}, f32[1,4]{1,0}) tuple(%update, %double)
}

ENTRY %main (x: f32[10,4], y: f32[1,4], n: s32[]) -> (f32[10,4], f32[1,4]) {
  %x = f32[10,4]{1,0} parameter(0)
  %y = f32[1,4]{1,0} parameter(1)
  %n = s32[] parameter(2)
  ROOT %fusion = (f32[10,4]{1,0}, f32[1,4]{1,0}) fusion(%x, %y, %n), kind=kLoop, calls=%fused
}
""")
    assert found.num_bytes == (4 + 4 + 4) * F32 + S32


@pytest.mark.parametrize(
    ("line", "num_bytes"),
    [
        ("dynamic-update-slice(%x, %row, %n, %n)", 2 * 4 * F32),
        ("broadcast(%row), dimensions={0,1}", 10 * 4 * F32),
        ("copy(%x)", 2 * 10 * 4 * F32),
    ],
)
def test_instructions_alone(line, num_bytes):
    found = of(f"""\
ENTRY %main (x: f32[10,4], row: f32[1,4], n: s32[]) -> f32[10,4] {{
  %x = f32[10,4]{{1,0}} parameter(0)
  %row = f32[1,4]{{1,0}} parameter(1)
  %n = s32[] parameter(2)
  ROOT %one = f32[10,4]{{1,0}} {line}
}}
""")
    assert found.num_bytes == num_bytes


def test_ops_without_work_of_their_own_are_not_kernels():
    found = module("""\
ENTRY %main (x: f32[4]) -> (f32[4]) {
  %x = f32[4]{0} parameter(0)
  %same = f32[2,2]{1,0} bitcast(%x)
  %sum = f32[2,2]{1,0} add(%same, %same)
  %start = (f32[4], f32[8]) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %done = f32[8] all-gather-done(%start)
  ROOT %out = (f32[4]{0}) tuple(%sum)
}
""")
    assert [i.name for i in found.instructions() if is_kernel(i)] == ["sum"]
