"""What one instruction of a compiled program costs a device: FLOPs of its matmuls, and bytes to and from memory."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jgt.plan.hlo import Array, Computation, Instruction, Module

CONTROL = {"while", "conditional", "call"}
"""Ops that run other computations, one instruction after another."""
_NAMES = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "partition-id", "replica-id", "get-dimension-size"}
_ORDER = {"after-all", "opt-barrier", "add-dependency", "domain"}
_FREE = CONTROL | _NAMES | _ORDER
"""Ops that do no work of their own."""
_GEMM = re.compile(r'custom_call_target="(__cublas\$(?:lt\$matmul\S*|gemm)|__onednn\$matmul|__triton_gemm)"')
_CONVOLUTION = re.compile(r'custom_call_target="__cudnn\$conv(?:BiasActivation)?Forward"')
_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?"')
_SCORES = re.compile(r'"intermediate_tensor_shape":\{[^\[]*"dimensions":\[([^\]]*)\]')
_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\["?([\d",]*)\]')


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """dtype: of the operands of its matmuls; empty without one. num_bytes: read and written."""

    flops: int = 0
    dtype: str = ""
    num_bytes: int = 0


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction does work of its own on the device."""
    return instruction.op not in _FREE and not instruction.op.endswith(("-start", "-done", "-update"))


def kernel(module: Module, computation: Computation, instruction: Instruction) -> Kernel:
    """The cost of one run of an instruction, the computations that it fuses included."""
    dots = list(_dots(module, computation, instruction))
    return Kernel(
        flops=sum(count for count, _ in dots),
        dtype=max(dots, default=(0, ""))[1],
        num_bytes=_bytes(module, computation, instruction),
    )


def _dots(module: Module, computation: Computation, instruction: Instruction) -> Iterator[tuple[int, str]]:
    """FLOPs and element type of each matmul."""
    if instruction.op == "fusion":
        inner = module.computations[instruction.called[0]]
        for one in inner.instructions.values():
            yield from _dots(module, inner, one)
        return
    left = computation.instructions[instruction.operands[0]] if instruction.operands else None
    if left is None or not left.arrays:
        return
    dims = left.arrays[0].dims
    if instruction.op == "dot":
        contracted = instruction.dims("lhs_contracting_dims")
    elif instruction.op == "custom-call" and _GEMM.search(instruction.text):
        found = _CONTRACTING.search(instruction.text)
        contracted = tuple(int(n) for n in re.findall(r"\d+", found[1])) if found else (len(dims) - 1,)
    elif instruction.op == "convolution" or (instruction.op == "custom-call" and _CONVOLUTION.search(instruction.text)):
        right = computation.instructions[instruction.operands[1]].arrays[0]
        label = instruction.attribute("dim_labels").partition("_")[2].partition("->")[0]
        yield 2 * instruction.arrays[0].size * (right.size // right.dims[label.index("o")]), left.arrays[0].dtype
        return
    elif instruction.op == "custom-call" and (found := _ATTENTION.search(instruction.text)):
        yield _attention_flops(instruction.text, dims[-1], is_backward=found[1] is not None), left.arrays[0].dtype
        return
    else:
        return
    yield 2 * instruction.arrays[0].size * math.prod(dims[d] for d in contracted), left.arrays[0].dtype


def _attention_flops(text: str, head_size: int, *, is_backward: bool) -> int:
    """FLOPs of cuDNN's attention: two matmuls with the scores [b, n, s, t] forward, five backward; half of a causal mask is left out."""
    found = _SCORES.search(re.sub(r"\s", "", text))
    scores = math.prod(int(n) for n in re.findall(r"\d+", found[1])) if found else 0
    return (10 if is_backward else 4) * scores * head_size // (2 if 'CAUSAL"' in text else 1)


def _bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Operands and results; of what is sliced or updated in place, the slice."""
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.op == "fusion":
        inner = module.computations[instruction.called[0]]
        read = [_read(inner, number, _size(operand)) for number, operand in enumerate(operands)]
        return sum(read) + _written(inner, instruction)
    if instruction.op == "dynamic-update-slice":
        return 2 * _size(operands[1])
    if instruction.op in ("dynamic-slice", "slice", "gather", "broadcast"):
        return 2 * _size(instruction) if instruction.op != "broadcast" else _size(instruction)
    results = instruction.arrays
    if instruction.op == "custom-call" and len(results) > 1 and results[-1].dtype in ("s8", "u8"):
        # The last one is workspace, of which a library uses what it needs.
        results = results[:-1]
    return sum(map(_size, operands)) + _shape_bytes(results)


def _read(inner: Computation, number: int, whole: int) -> int:
    """What a fusion reads of an operand: slices where it takes nothing else, and nothing where it only writes into it."""
    name = inner.parameters.get(number)
    users = [inner.instructions[user] for user in inner.users.get(name, ())] if name else []
    total = 0
    for user in _through(inner, users):
        if user.op in ("dynamic-slice", "slice", "gather"):
            total += _size(user)
        elif user.op != "dynamic-update-slice" or _target(inner, user) != name:
            return whole
    return min(total, whole)


def _through(inner: Computation, users: list[Instruction]) -> Iterator[Instruction]:
    for user in users:
        if user.op == "bitcast":
            yield from _through(inner, [inner.instructions[n] for n in inner.users.get(user.name, ())])
        else:
            yield user


def _target(inner: Computation, update: Instruction) -> str:
    at = inner.instructions[update.operands[0]]
    while at.op == "bitcast":
        at = inner.instructions[at.operands[0]]
    return at.name


def _written(inner: Computation, instruction: Instruction) -> int:
    """What a fusion writes: of an array that it updates in place, the update."""
    root = inner.instructions[inner.root]
    parts = [inner.instructions[name] for name in root.operands] if root.op == "tuple" else [root]
    total = 0
    for part in parts:
        at = part
        while at.op == "bitcast":
            at = inner.instructions[at.operands[0]]
        total += _size(inner.instructions[at.operands[1]]) if at.op == "dynamic-update-slice" else _size(part)
    return total if parts else _size(instruction)


@functools.lru_cache(maxsize=65536)
def _shape_bytes(arrays: tuple[Array, ...]) -> int:
    return sum(array.num_bytes for array in arrays)


def _size(instruction: Instruction) -> int:
    return _shape_bytes(instruction.arrays)
