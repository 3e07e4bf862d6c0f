# pyright: basic
"""The operations of a program that may be computed wrongly, with the layouts that Shardy chooses for their arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from jgt.sharding.partitioner.dims import READERS, OperationDims
from jgt.sharding.partitioner.faults import better_layouts
from jgt.sharding.partitioner.grid import AxisGrid, Splits
from jgt.sharding.partitioner.mends import MENDS, Mend, mends_for
from jgt.sharding.partitioner.shardy import NUMBER, choose_layouts, inline_calls, meshes_of, operations, sharding_of, type_shape

_STILL = ("stablehlo.dot_general", "stablehlo.gather")
"""Operations along whose dims nothing moves."""


@dataclass(frozen=True, kw_only=True)
class OperationLayout:
    """The layouts of an operation's arrays, as Shardy chooses them and as they should be.

    number: its number among the operations that are read. arrays: numbers among its operands and results. moves: whether something moves
    along a dim, which must be whole.
    """

    number: int
    moves: bool
    arrays: tuple[int, ...]
    given: tuple[Splits, ...]
    better: tuple[Splits, ...]
    grid: AxisGrid
    mesh: ir.Attribute


@dataclass(frozen=True, kw_only=True)
class MendedOperation:
    """An operation that needs a mend. number: its number among the operations that are read."""

    number: int
    mend: Mend


def readable(module: ir.Module | ir.Operation) -> list[ir.Operation]:
    """The operations of a module that are read, in a fixed order."""
    return [op for op in operations(module) if op.name in READERS or op.name in MENDS]


def may_have_faults(module: ir.Module, platform: str) -> bool:
    """Whether it is worth asking Shardy: a matmul or a gather can be wrong only where there are two axes."""
    axes = max((sum(sdy.MeshAxisAttr(axis).size > 1 for axis in mesh.axes) for mesh in meshes_of(module).values()), default=0)
    return axes > 0 and any(_may_be_wrong(op, axes) or bool(mends_for(op, platform)) for op in readable(module))


def _may_be_wrong(op: ir.Operation, axes: int) -> bool:
    if op.name not in READERS or op.name in _STILL:
        return op.name in READERS and axes > 1
    return _moves(op, READERS[op.name](op))


def _moves(op: ir.Operation, dims: OperationDims) -> bool:
    values = [*op.operands, *op.results]
    return any(dims.moving(n, len(type_shape(values[array]))) for n, array in enumerate(dims.arrays))


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A copy of a program in which Shardy has chosen the layout of each array.

    copy: its module, without which MLIR would free the operations.
    ops: the operations that are read.
    meshes: its meshes by name.
    """

    copy: ir.Operation
    ops: list[ir.Operation]
    meshes: dict[str, sdy.MeshAttr]

    @classmethod
    def of(cls, module: ir.Module) -> Self:
        """The module is left as it is."""
        copy = module.operation.clone()
        inline_calls(copy)
        meshes, integer = meshes_of(copy), ir.IntegerType.get_signless(64)
        for number, op in enumerate(readable(copy)):
            op.attributes[NUMBER] = ir.IntegerAttr.get(integer, number)
        choose_layouts(copy)
        return cls(copy=copy, ops=readable(copy), meshes=meshes)

    def layouts(self) -> list[OperationLayout]:
        """The layouts of the operations that another layout could mend."""
        found: list[OperationLayout] = []
        for op in (op for op in self.ops if op.name in READERS):
            dims = READERS[op.name](op)
            values = [[*op.operands, *op.results][n] for n in dims.arrays]
            if (read := self._read(op, values)) is not None:
                given, grid, mesh = read
                better = better_layouts(dims, given, [type_shape(value) for value in values], grid)
                n, arrays, moves = _number_of(op), dims.arrays, dims.even is None and op.name not in _STILL and _moves(op, dims)
                found.append(OperationLayout(number=n, moves=moves, arrays=arrays, given=given, better=better, grid=grid, mesh=mesh))
        return found

    def mended(self, platform: str) -> list[MendedOperation]:
        """The operations that need mends on a platform."""
        found: list[MendedOperation] = []
        for op in self.ops:
            if (mends := mends_for(op, platform)) and (read := self._read(op, [*op.operands, *op.results])) is not None:
                found += [MendedOperation(number=_number_of(op), mend=mend) for mend in mends if mend.is_wrong(op, read[0])]
        return found

    def _read(self, op: ir.Operation, values: list[ir.Value]) -> tuple[tuple[Splits, ...], AxisGrid, ir.Attribute] | None:
        """The layouts of values of an operation, the devices around it and its mesh; None where no axis can split any."""
        shardings = [sharding_of(value) for value in values]
        # A value without a layout is whole, but another operation may read a part of it.
        mesh = next(
            (s.mesh_or_ref for s in shardings if s is not None),
            ir.FlatSymbolRefAttr.get(max(self.meshes, key=lambda name: len(self.meshes[name].axes))),
        )
        grid = AxisGrid.around(op, self.meshes[mesh.value] if isinstance(mesh, ir.FlatSymbolRefAttr) else sdy.MeshAttr(mesh), shardings)
        if all(size == 1 for _, _, size in grid.sub_axes):
            return None
        given = tuple(grid.layout(sharding, len(type_shape(value))) for sharding, value in zip(shardings, values, strict=True))
        return given, grid, mesh


def _number_of(op: ir.Operation) -> int:
    return ir.IntegerAttr(op.attributes[NUMBER]).value
