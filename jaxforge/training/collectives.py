"""Which collectives a compiled program runs: read from the text of its HLO.

The text is what `compiled.as_text()` gives: computations of instructions, callees before callers, the entry last
(https://openxla.org/xla/operation_semantics).  Device numbers in it are positions in the mesh, not hardware ids.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jaxforge.config.model_rules import divisors

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
IRREGULAR = ("irregular",)  # the axes of groups that no combination of mesh axes makes, nor equal blocks along one

Groups = frozenset[frozenset[int]]


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of message that every device takes part in.

    Attributes:
      kind: one of KINDS.
      axes: the mesh axes over which devices exchange, those of more than one device, outermost first; or one name for
        blocks of the devices along them.
      bytes: of one execution on one device: the whole buffer, that is what an all-gather gives, what a reduce-scatter
        takes, what the other kinds give and take, and room for what a ragged all-to-all gives.
      count: executions in one run of the program: loops count as often as they turn.  A loop whose number of turns
        the compiler doesn't know counts once.
      in_loop: whether it lies in a loop (microbatches, layers).
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    in_loop: bool


@dataclasses.dataclass(frozen=True)
class _Instruction:
    computation: str
    shape: str
    opcode: str
    rest: str  # operands and attributes


def find_collectives(hlo: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """The collectives of a compiled program, equal ones counted together, those that move most bytes first.

    Args:
      hlo: text of the compiled module.
      mesh_shape: axis name -> size, outermost first, of the mesh it is compiled for.
    """
    instructions = list(_instructions(hlo))
    runs = _executions(instructions, _entry(hlo))
    names = _axes_by_groups(mesh_shape)
    counts: dict[tuple, int] = collections.Counter()
    for instruction in instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        count, in_loop = runs.get(instruction.computation, (0, False))
        if kind == "collective-permute":
            axes, group_size = _permuted_axes(instruction.rest, mesh_shape), 1
        else:
            groups = _groups(instruction.rest, math.prod(mesh_shape.values()))
            axes = IRREGULAR if groups is None else names.get(groups, IRREGULAR)
            group_size = len(next(iter(groups))) if groups else 1
        if count and axes:  # a group of one device exchanges nothing
            counts[kind, axes, _buffer_bytes(instruction, kind, group_size), in_loop] += count
    found = [
        Collective(kind, axes, size, count, in_loop) for (kind, axes, size, in_loop), count in counts.items()
    ]
    return sorted(found, key=lambda one: (-one.bytes * one.count, one.kind, one.axes, one.in_loop))


# ---- instructions and the computations that hold them


_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = (?P<shape>.*?) (?P<opcode>[a-z][a-z0-9\-]*)\((?P<rest>.*)$")
_CALLEES = re.compile(
    r"\b(?:body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def _instructions(hlo: str) -> Iterator[_Instruction]:
    computation = ""
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            computation = header["name"]
        elif match := _INSTRUCTION.match(line):
            yield _Instruction(computation, match["shape"], match["opcode"], match["rest"])


def _entry(hlo: str) -> str:
    match = re.search(r"^ENTRY %?([^\s(]+) ", hlo, re.MULTILINE)
    if match is None:
        raise ValueError("the HLO text has no ENTRY computation")
    return match[1]


def _executions(instructions: list[_Instruction], entry: str) -> dict[str, tuple[int, bool]]:
    """For each computation that runs: how often, and whether in a loop."""
    callers: dict[str, list[tuple[str, int, bool]]] = collections.defaultdict(list)
    for instruction in instructions:
        if instruction.opcode.endswith(("-done", "-update")):
            continue  # an asynchronous call is named again where it is awaited
        is_loop = instruction.opcode == "while"
        trips = _TRIP_COUNT.search(instruction.rest) if is_loop else None
        for callee in _CALLEES.findall(instruction.rest):
            for name in re.findall(r"[\w.\-]+", callee):
                callers[name].append((instruction.computation, int(trips[1]) if trips else 1, is_loop))

    runs = {entry: (1, False)}

    def runs_of(name: str) -> tuple[int, bool]:
        if name not in runs:
            count, in_loop = 0, False
            for caller, trips, is_loop in callers[name]:
                caller_count, caller_in_loop = runs_of(caller)
                count += caller_count * trips
                in_loop |= bool(caller_count) and (is_loop or caller_in_loop)
            runs[name] = (count, in_loop)
        return runs[name]

    return {instruction.computation: runs_of(instruction.computation) for instruction in instructions}


# ---- sizes


_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")


def _bytes(shape: str) -> int:
    """Bytes of an array type, or of all arrays of a tuple type."""
    total = 0
    for name, bits, dims in _ARRAY.findall(shape):
        size = math.prod(int(dim) for dim in dims.split(",") if dim)
        total += size if name == "pred" else -(-size * int(bits) // 8)
    return total


def _buffer_bytes(instruction: _Instruction, kind: str, group_size: int) -> int:
    shape = re.sub(r"/\*.*?\*/", "", instruction.shape)
    if not instruction.opcode.endswith("-start"):
        return _bytes(shape) * (group_size if kind == "reduce-scatter" else 1)
    parts = _elements(shape)
    if kind == "ragged-all-to-all":
        return _bytes(parts[1])  # its operands are what is sent, and an array like the result
    if kind == "all-reduce" and not parts[0].startswith("("):
        return _bytes(shape)  # the older form has the type of the result alone
    return max(_bytes(part) for part in parts[:2])  # operands, results; then perhaps synchronisation words


def _elements(shape: str) -> list[str]:
    """The outermost elements of a tuple type; an array type is its own only one."""
    if not shape.startswith("("):
        return [shape]
    elements, depth, start = [], 0, 1
    for place, letter in enumerate(shape):
        if depth == 1 and letter in ",)":
            elements.append(shape[start:place].strip())
            start = place + 1
        depth += (letter in "([{") - (letter in ")]}")
    return elements


# ---- groups of devices, and the axes that make them


def _axes_by_groups(mesh_shape: Mapping[str, int]) -> dict[Groups, tuple[str, ...]]:
    """The groups of every combination of the mesh's axes, with its names.

    And those of equal blocks of the devices along them, such as the nodes that an axis spans: "expert in blocks of 8",
    and "expert across blocks of 8" for devices with the same place in their block.
    """
    large = [name for name, size in mesh_shape.items() if size > 1]
    combinations = list(
        itertools.chain.from_iterable(itertools.combinations(large, count) for count in range(len(large) + 1))
    )
    found = {_groups_along(axes, mesh_shape): axes for axes in combinations}
    for axes in combinations:
        rows = _rows_along(axes, mesh_shape)
        for block in divisors(rows.shape[1])[1:-1]:
            blocks = rows.reshape(len(rows), -1, block)
            name = f"{' x '.join(axes)} {{}} blocks of {block}"
            found.setdefault(_as_groups(blocks.reshape(-1, block)), (name.format("in"),))
            across = blocks.swapaxes(1, 2).reshape(-1, blocks.shape[1])
            found.setdefault(_as_groups(across), (name.format("across"),))
    return found


def _groups_along(axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> Groups:
    return _as_groups(_rows_along(axes, mesh_shape))


def _rows_along(axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> np.ndarray:
    """Numbers of the devices of each group, in the order of their ranks."""
    devices = np.arange(math.prod(mesh_shape.values())).reshape(tuple(mesh_shape.values()))
    dims = [list(mesh_shape).index(axis) for axis in axes]
    last = range(devices.ndim - len(dims), devices.ndim)
    return np.moveaxis(devices, dims, last).reshape(-1, math.prod(mesh_shape[axis] for axis in axes))


def _as_groups(rows: np.ndarray | list[list[int]]) -> Groups:
    return frozenset(frozenset(map(int, row)) for row in rows)


_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](, device_ids=\S+)? \{([^}]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")


def _groups(attributes: str, num_devices: int) -> Groups | None:
    """The groups of `replica_groups`, which HLO writes in three forms; None for one that isn't read here."""
    if match := _MESH_GROUPS.search(attributes):
        shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
        axes = tuple(match[3].replace("'", "").replace(" ", "").split(","))
        if match[2] or not set(axes) <= shape.keys():  # devices in another order, or a part of an axis
            return None
        return _groups_along(axes, shape)
    if match := _IOTA_GROUPS.search(attributes):
        groups, dims, order = (tuple(_integers(part or "")) for part in match.groups())
        devices = np.arange(math.prod(dims)).reshape(dims)
        return _as_groups((devices.transpose(order) if order else devices).reshape(groups))
    if match := _LISTED_GROUPS.search(attributes):
        listed = [_integers(group) for group in re.findall(r"\{([\d,]*)\}", match[1])]
        return _as_groups(listed or [list(range(num_devices))])  # {} is one group of all
    return None


def _permuted_axes(attributes: str, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which some device sends to another."""
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if match is None:
        return IRREGULAR
    pairs = np.array([_integers(pair) for pair in re.findall(r"\{([\d,]+)\}", match[1])]).reshape(-1, 2)
    source, target = (np.unravel_index(column, tuple(mesh_shape.values())) for column in pairs.T)
    return tuple(name for name, s, t in zip(mesh_shape, source, target, strict=True) if (s != t).any())


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
