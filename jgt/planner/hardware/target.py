"""Targets: hosts with devices of one chip. The machine that plans needs none of them. Imports no JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from jgt.document import InputError, nearest, read
from jgt.planner.hardware.chip import CHIP_FOLDER, CPU_KIND, Chip, chip_names, load_chip, name_of, read_chip, unmeasured_cpu
from jgt.planner.hardware.network import Network

# `h100` alone matches too, so that the message can say what is missing.
_TARGET = re.compile(r"([\w.-]+?)(?::(\d+)(?:x(\d+))?)?")
USABLE = 0.95
"""The share of a GPU's memory that a program may use. A run on GPUs asks JAX for it (XLA_CLIENT_MEM_FRACTION)."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Hosts with devices of one kind. text: the target as written, such as h100:8x8.

    file, changes: the chip file and the changed figures that make it with `parse`.
    """

    chip: Chip
    text: str
    num_hosts: int
    per_host: int
    file: str | None = None
    changes: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, file: str | None = None, changes: Sequence[str] = ()) -> Self:
        """Reads a target: `h100:8x8` is 8 hosts with 8 H100s each. Raises InputError.

        file: a chip file of the user's own, whose chip has the file's name: `mine:8x8` for mine.yaml. changes: of figures, see `read_chip`.
        """
        match = _TARGET.fullmatch(text.strip())
        name = match[1].lower() if match else text
        own = None if file is None else Path(file).stem.lower()
        names = [*chip_names(), *([] if own is None else [own])]
        if name == CPU_KIND and own is None:
            remedy = "Measure it with jgt calibrate, and add --chip cpu.yaml"
            raise InputError(
                [f"target {text}: jgt has no figures of this machine's processor. {remedy}. Without a target a plan has no times"]
            )
        if name not in names:
            near = nearest(name, [one for one in names if one[:1] == name[:1]], lists=False)
            known = (
                f"{near} The chips are {', '.join(names)}. Write CHIP:HOSTSxGPUS, such as h100:8x8, or describe another chip: --chip FILE"
            )
            raise InputError([f"target {text}: {name!r} is not a chip that jgt knows. {known.lstrip()} (docs/plan.md)"])
        if own is not None and name != own:
            raise InputError([f"target {text}: --chip {file} describes the chip {own!r}. Write --target {own}:8x8, or leave --chip out"])
        if not match or match[3] is None or int(match[2]) < 1 or int(match[3]) < 1:
            alone = f", and {name}:1x{match[2]} one host" if match and match[2] and match[3] is None else ""
            why = f"say how many hosts, and how many GPUs on each: {name}:8x8 is 8 hosts with 8 GPUs each{alone}"
            raise InputError([f"target {text}: {why}"])
        chip = load_chip(name) if file is None and not changes else read_chip(file or CHIP_FOLDER / f"{name}.yaml", changes)
        num_hosts, per_host = int(match[2]), int(match[3])
        count = num_hosts * per_host
        if chip.devices is not None and chip.devices != count:
            why = f"the chip's figures are of {chip.devices} devices that share a processor, and the target has {count}"
            raise InputError([f"target {match[0].strip()}: {why}. Measure that number: jgt calibrate --devices {count}"])
        # Plans of one target with different figures are plans of different hardware.
        text = f"{name}:{num_hosts}x{per_host}" + (f" with {', '.join(changes)}" if changes else "")
        return cls(chip=chip, text=text, num_hosts=num_hosts, per_host=per_host, file=file, changes=tuple(changes))

    @classmethod
    def of_devices(cls, device_kind: str, count: int) -> Self:
        """One host with `count` devices, by JAX's `device_kind`. A CPU gets rough figures.

        Raises InputError for a device without a chip file.
        """
        if device_kind == CPU_KIND:
            return cls(chip=unmeasured_cpu(count), text=f"{CPU_KIND}:1x{count}", num_hosts=1, per_host=count)
        name = name_of(device_kind)
        if name is None:
            known = ", ".join(chip_names())
            raise InputError([f"jgt has no chip file for the device {device_kind}, so there are no times for it. Known chips: {known}"])
        return cls.parse(f"{name}:1x{count}")

    @property
    def num_devices(self) -> int:
        """The number of devices on all hosts."""
        return self.num_hosts * self.per_host

    @property
    def is_described(self) -> bool:
        """Whether XLA compiles for a description of the devices. For CPU_KIND devices it compiles for JAX's own."""
        return self.chip.platform != CPU_KIND

    @property
    def chip_name(self) -> str:
        """The chip's name in a target, such as h100."""
        return self.text.partition(":")[0]

    @property
    def usable_bytes(self) -> float:
        """The bytes of a device's memory that a program may use."""
        return USABLE * self.chip.hbm_gb * 1e9

    @staticmethod
    def memory_fits(stats: MemoryStats, limit_bytes: int) -> bool:
        """Whether a compiled program fits into the usable share of a device's memory."""
        used = used_bytes(stats)
        return min(used, stats.peak_memory_in_bytes or used) <= USABLE * limit_bytes

    def network(self, hosts: Sequence[int] | None = None) -> Network:
        """The links between the devices. hosts: the host of each device, in the mesh's order; by default host by host."""
        hosts = [device // self.per_host for device in range(self.num_devices)] if hosts is None else hosts
        return Network(chip=self.chip, per_host=self.per_host, hosts=hosts)

    @staticmethod
    def read_prices(path: str | Path, targets: Sequence[Target]) -> dict[str, float]:
        """The prices of a YAML file: dollars for an hour of one GPU, by the name of its chip. It has to have those of the targets.

        Raises InputError with every problem.
        """
        chips = dict.fromkeys(target.chip_name for target in targets)
        root, problems, prices = read(path), list[str](), dict[str, float]()
        # A chip of the user's own may have a price, too.
        names = list(dict.fromkeys([*chip_names(), *chips]))
        for name, node in root.children.items():
            price = node.value
            if name not in names:
                problems.append(node.problem(f"is not a chip that jgt knows. {nearest(name, names)}"))
            elif isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < math.inf:
                problems.append(node.problem(f"must be the dollars for an hour of one GPU, such as 2.5, not {node.in_words()}"))
            else:
                prices[name] = float(price)
        missing = [name for name in chips if name not in root.children]
        problems += [f"{path}: the price of {name} is missing. Add a line such as {name}: 2.5" for name in missing]
        if problems:
            raise InputError(problems)
        return prices


class MemoryStats(Protocol):
    """JAX's CompiledMemoryStats: bytes on one device. The alias size counts outputs in the memory of donated arguments."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    peak_memory_in_bytes: int
    host_argument_size_in_bytes: int
    host_temp_size_in_bytes: int


def used_bytes(stats: MemoryStats) -> int:
    """The bytes of a program's arguments, outputs and temporaries."""
    # A donated argument's memory is its output's, and XLA counts it in both.
    new_outputs = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    return stats.argument_size_in_bytes + new_outputs + stats.temp_size_in_bytes
