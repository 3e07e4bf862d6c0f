"""The work of an instruction for a device: the FLOPs of its matmuls, and the bytes that it reads and writes.

FLOPs are counted for matmuls and convolutions only; the rest of a step is limited by memory. A matmul can be a `dot`, a `dot` inside a
fusion, or a custom call to a library:

    %fusion = f32[4,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused
    %gemm = (f32[4,16]{1,0}, s8[4194304]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config={...}

A fusion runs as one kernel, so its bytes are the sizes of operands and results, except where it touches only a slice: in the body of a loop
over layers, a fusion that slices one layer out of the stacked parameters reads that layer, and one that updates a stack in place writes
only the update.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jgt.planner.hardware.rates import AttentionWork, MatmulWork
from jgt.planner.hlo.custom_calls import attention_of, custom_call_flops
from jgt.planner.hlo.instruction import Array, Instruction
from jgt.planner.hlo.text import Module

CONTROL = {"while", "conditional", "call"}
"""Ops that run other computations, one instruction after another. A fusion is not one: it is a single kernel."""
_NAMES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "partition-id", "replica-id", "get-dimension-size"}
_FREE = CONTROL | _NAMES | {"after-all", "opt-barrier", "add-dependency", "domain"}
"""Ops that do no work of their own: they call, name, or order what others compute."""
# Matrix products of cuBLAS and cuBLASLt (GPU), oneDNN (CPU) and Triton, which XLA calls instead of compiling a dot.
_GEMM = re.compile(r'custom_call_target="(__cublas\$(?:lt\$matmul\S*|gemm)|__onednn\$matmul|__triton_gemm)"')
_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv(?:BiasActivation)?Forward"')
_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\["?([\d",]*)\]')
_BATCH = re.compile(r'"lhs_batch_dimensions":\["?([\d",]*)\]')


@dataclass(frozen=True, kw_only=True)
class KernelCost:
    """The work of one kernel. matmuls: in it; attention: if it is one of fused attention; num_bytes: read from and written to memory."""

    matmuls: tuple[MatmulWork, ...] = ()
    attention: AttentionWork | None = None
    num_bytes: int = 0

    @property
    def flops(self) -> int:
        """The FLOPs of all its matmuls."""
        return sum(matmul.flops for matmul in self.matmuls) + (self.attention.flops if self.attention else 0)


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction is work for the device itself. Collectives of an asynchronous pair are not: the links do the work."""
    return instruction.op not in _FREE and not instruction.op.endswith(("-start", "-done", "-update"))


def kernel_cost(module: Module, instruction: Instruction) -> KernelCost:
    """The work of one run of an instruction, including the computation that it fuses."""
    return KernelCost(
        matmuls=tuple(_matmuls(module, instruction)),
        attention=_attention(module, instruction),
        num_bytes=_bytes(module, instruction),
    )


def _attention(module: Module, instruction: Instruction) -> AttentionWork | None:
    if instruction.op != "custom-call":
        return None
    arrays = [array for operand in module.operands(instruction)[:1] for array in operand.arrays]
    return attention_of(instruction.text, arrays[0].dims) if arrays else None


def _matmuls(module: Module, instruction: Instruction) -> Iterator[MatmulWork]:
    """The matrix products of an instruction; a convolution is one of patches."""
    if instruction.op == "fusion":
        for inner in module.computations[instruction.called[0]].instructions.values():
            yield from _matmuls(module, inner)
        return
    operands = module.operands(instruction)
    if not operands or not operands[0].arrays:
        return
    left, is_call, shared = operands[0].arrays[0], instruction.op == "custom-call", ()
    if instruction.op == "dot":
        contracted = math.prod(left.dims[d] for d in instruction.dims("lhs_contracting_dims"))
        shared = instruction.dims("lhs_batch_dims")
    elif is_call and _GEMM.search(instruction.text):
        # A call that does not say what it contracts is x @ w: it contracts the last dim of x.
        found = _numbers(_CONTRACTING, instruction)
        contracted, shared = math.prod(left.dims[n] for n in found or (-1,)), _numbers(_BATCH, instruction)
    elif instruction.op == "convolution" or (is_call and _CONVOLUTION.search(instruction.text)):
        right = operands[1].arrays[0]
        # dim_labels=b01f_01io->b01f names the dims of input, kernel and output. An output element takes the kernel without its `o` dim.
        label = instruction.attribute("dim_labels").partition("_")[2].partition("->")[0]
        channels = right.dims[label.index("o")]
        contracted = right.size // channels
        yield MatmulWork(left.dtype, 1, instruction.arrays[0].size // max(channels, 1), channels, contracted)
        return
    else:
        if is_call and attention_of(instruction.text, left.dims) is None and (flops := custom_call_flops(instruction.text, left.dims)):
            # Lists, such as the sizes of groups, come before the rows that are multiplied.
            rows = next((a for operand in operands for a in operand.arrays if len(a.dims) > 1), left)
            m, k = rows.dims[0], rows.dims[-1]
            yield MatmulWork(rows.dtype, 1, m, max(flops // (2 * m * k), 1), k)
        return
    yield _matmul(left, instruction.arrays[0], contracted, math.prod(left.dims[d] for d in shared))


def _matmul(left: Array, result: Array, contracted: int, batch: int) -> MatmulWork:
    """A product by its left operand and its result: each element of the result takes a multiply-add for every contracted index."""
    m = left.size // max(contracted * batch, 1)
    return MatmulWork(left.dtype, batch, m, result.size // max(batch * m, 1), contracted)


def _numbers(pattern: re.Pattern[str], instruction: Instruction) -> tuple[int, ...]:
    found = pattern.search(instruction.text)
    return tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else ()


def _bytes(module: Module, instruction: Instruction) -> int:
    """The bytes of operands and results; for a slice, or an update in place, of the slice only."""
    operands = module.operands(instruction)
    if instruction.op == "fusion":
        parameters = module.computations[instruction.called[0]].parameters
        read = [_bytes_read(module, parameters[number], operand.num_bytes) for number, operand in enumerate(operands)]
        return sum(read) + _bytes_written(module, module.computations[instruction.called[0]].root)
    if instruction.op == "dynamic-update-slice":
        # Outside a fusion too, XLA updates in place: the update is read, and written into the array.
        return 2 * operands[1].num_bytes
    if instruction.op in ("dynamic-slice", "slice", "gather", "broadcast"):
        # A slice is read and written. A broadcast reads next to nothing.
        return 2 * instruction.num_bytes if instruction.op != "broadcast" else instruction.num_bytes
    results = instruction.arrays
    if instruction.op == "custom-call" and len(results) > 1 and results[-1].dtype in ("s8", "u8"):
        # The last result is scratch space for the library, most of which it never touches.
        results = results[:-1]
    return sum(i.num_bytes for i in operands) + sum(array.num_bytes for array in results)


def _bytes_read(module: Module, parameter: Instruction, whole: int) -> int:
    """The bytes that a fusion reads of an operand of `whole` bytes: its slices if it is only sliced, none if it is only written into."""
    total = 0
    for user in _behind_bitcasts(module, parameter):
        if user.op in ("dynamic-slice", "slice", "gather"):
            total += user.num_bytes
        # An update in place (operand 0 of dynamic-update-slice) reads nothing of the array.
        elif user.op != "dynamic-update-slice" or _without_bitcasts(module, module.operands(user)[0]) != parameter:
            return whole
    # Overlapping slices read no more than everything: the rest comes from a cache.
    return min(total, whole)


def _behind_bitcasts(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The users, with each bitcast replaced by its own users: a bitcast only gives the same bytes another shape."""
    for user in module.users(instruction):
        if user.op == "bitcast":
            yield from _behind_bitcasts(module, user)
        else:
            yield user


def _without_bitcasts(module: Module, instruction: Instruction) -> Instruction:
    while instruction.op == "bitcast":
        instruction = module.operands(instruction)[0]
    return instruction


def _bytes_written(module: Module, root: Instruction) -> int:
    """The bytes that a fusion writes: its results, but only the update of an array that it updates in place."""
    results = module.operands(root) if root.op == "tuple" else [root]
    ends = [(result, _without_bitcasts(module, result)) for result in results]
    return sum((module.operands(end)[1] if end.op == "dynamic-update-slice" else result).num_bytes for result, end in ends)
