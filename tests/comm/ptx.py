"""Runs PTX without a GPU: a kernel of one pointer, by turning each of its threads into a Python generator that
stops at barriers, and where the lanes of a warp meet.

Knows the instructions that FCDP's kernels have and refuses others. Memory is arrays of bytes at addresses of the
test's choice; an access that is not inside one of them, or not aligned as the instruction asks for, is an error.
Shared memory has anything at first.
"""

import random
import re

WARP = 32
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OPERATION = {"add": "+", "sub": "-", "mul.lo": "*", "and": "&", "or": "|", "xor": "^"}
GLOBAL_LOADS = ("ld.global", "ld.global.nc", "ld.volatile.global")
GLOBAL_STORES = ("st", "st.global", "st.volatile.global")  # no address of shared memory is ever generic
CLAMP = {"up": 0, "bfly": WARP - 1, "idx": WARP - 1}
GROUP = 16  # basic blocks that a jump goes past at once


class Memory:
    def __init__(self, arrays):
        self.arrays = arrays  # {address: bytearray}

    def _find(self, at, n):
        for base, array in self.arrays.items():
            if base <= at and at + n <= base + len(array):
                return array, at - base
        raise IndexError(f"{n} bytes at {at:#x} are outside of every buffer")

    def load(self, at, n, aligned):
        if at % aligned:
            raise ValueError(f"{at:#x} is not aligned to {aligned}")
        array, start = self._find(at, n)
        return int.from_bytes(array[start : start + n], "little")

    def store(self, at, n, value, aligned=None):
        if at % (aligned or n):
            raise ValueError(f"{at:#x} is not aligned to {aligned or n}")
        array, start = self._find(at, n)
        array[start : start + n] = value.to_bytes(n, "little")

    def atomic_or(self, at, n, value):
        was = self.load(at, n, n)
        self.store(at, n, was | value)
        return was


def signed(value, bits):
    return value - (1 << bits) if value >> bits - 1 else value


def prmt(low, high, how):
    """Bytes of eight, by four digits; 8 more: the byte's sign."""
    both, result = low | high << 32, 0
    for i in range(4):
        digit = how >> 4 * i
        byte = both >> 8 * (digit & 7) & 0xFF
        if digit & 8:
            byte = 0xFF * (byte >> 7)
        result |= byte << 8 * i
    return result


def _bits(type_):
    return 1 if type_ == "pred" else int(re.sub(r"\D", "", type_))


def _value(operand, bits, symbols):
    """A register, a number or a symbol, as a Python expression without a sign."""
    if operand.startswith("%"):
        return {"%tid.x": "tid", "%ctaid.x": "ctaid"}.get(operand, operand[1:])
    if operand in symbols:
        return str(symbols[operand])
    return str(int(operand, 0) & (1 << bits) - 1)


def _address(operand, symbols):
    base, _, offset = operand.strip("[]").partition("+")
    return f"({_value(base, 64, symbols)} + {int(offset or 0)})"


def _load(memory, to, address, bits, many):
    n = bits // 8
    if not many:
        return f"{to} = {memory}.load({address}, {n}, {n})"
    parts = [register.strip().lstrip("%") for register in to.strip("{}").split(",")]
    whole = f"whole = {memory}.load({address}, {n * many}, {n * many}); "
    return whole + "; ".join(f"{part} = whole >> {i * bits} & {(1 << bits) - 1}" for i, part in enumerate(parts))


def _store(memory, address, values, bits):
    n = bits // 8 * len(values)
    mask = (1 << bits) - 1
    return (
        f"{memory}.store({address}, {n}, {' | '.join(f'({v} & {mask}) << {i * bits}' for i, v in enumerate(values))})"
    )


def _meeting(opcode, args, symbols, place):
    """An instruction at which all lanes of a warp meet: what each says there, and what it hears."""
    parts = opcode.split(".")
    values = [_value(arg, 32, symbols) for arg in args[1:]]
    to = args[0].lstrip("%")
    if opcode == "bar.warp.sync":
        return f"yield {place}, 'warp', {_value(args[0], 32, symbols)}"
    if opcode in ("vote.sync.ballot.b32", "vote.sync.any.pred"):
        said = args[1].lstrip("!%")
        return f"{to} = yield {place}, '{parts[2]}', {values[1]}, {'not ' if args[1][0] == '!' else ''}{said}"
    if parts[:2] == ["shfl", "sync"] and parts[2] in CLAMP:
        value, valid = (name.strip("%") for name in args[0].split("|")) if "|" in args[0] else (to, "_")
        return f"{value}, {valid} = yield {place}, '{parts[2]}', {values[3]}, {values[0]}, {values[1]}, {values[2]}"
    return None


def _met(said):
    """What each lane hears, of what the lanes of one warp have said at one place."""
    _, kind, mask, *_ = said[0]
    if any(each[2] != mask for each in said) or mask != (1 << len(said)) - 1:
        raise RuntimeError(f"a {kind} of lanes {mask:#x}, where {len(said)} lanes are")
    if kind == "warp":
        return [None] * len(said)
    if kind == "ballot":
        return [sum(bool(each[3]) << i for i, each in enumerate(said))] * len(said)
    if kind == "any":
        return [any(each[3] for each in said)] * len(said)
    heard = []
    for i, (*_, value, by, clamp) in enumerate(said):
        if clamp != CLAMP[kind]:
            raise NotImplementedError(f"shfl.sync.{kind} within {clamp:#x}, a part of a warp")
        other = {"up": i - by, "bfly": i ^ by, "idx": by & WARP - 1}[kind]
        valid = 0 <= other < len(said)
        heard.append((said[other][3] if valid else value, valid))
    return heard


def _statement(opcode, args, symbols):
    """One instruction as a Python statement."""
    parts = opcode.split(".")
    type_ = parts[-1]
    bits = _bits(type_) if type_ not in ("sync", "ret") and re.search(r"\d|pred", type_) else 0
    mask = (1 << bits) - 1

    def value(i, width=None):
        return _value(args[i], width or bits, symbols)

    def number(i, width=None):
        return f"signed({value(i, width)}, {width or bits})" if type_[0] == "s" else value(i, width)

    to = args[0].lstrip("%") if args else ""
    name = ".".join(parts[:-1])
    many = int(parts[-2][1]) if len(parts) > 1 and parts[-2] in ("v2", "v4") else 0
    access = ".".join(parts[: -2 if many else -1])
    if parts[0] == "setp" and len(parts) == 3:
        return f"{to} = {number(1)} {COMPARE[parts[1]]} {number(2)}"
    if opcode == "not.pred":
        return f"{to} = not {value(1)}"
    if name in OPERATION:
        return f"{to} = ({value(1)} {OPERATION[name]} {value(2)}) & {mask}"
    if name == "not":
        return f"{to} = {value(1)} ^ {mask}"
    if name == "neg":
        return f"{to} = -{value(1)} & {mask}"
    if name == "mad.lo":
        return f"{to} = ({value(1)} * {value(2)} + {value(3)}) & {mask}"
    if name == "mul.wide":
        return f"{to} = {number(1)} * {number(2)} & {(1 << 2 * bits) - 1}"
    if name == "shl":
        return f"{to} = ({value(1)} << {value(2, 32)}) & {mask} if {value(2, 32)} < {bits} else 0"
    if name == "shr":
        return f"{to} = {number(1)} >> {value(2, 32)} & {mask}"
    if opcode == "shf.l.wrap.b32":
        return f"{to} = (({value(1)} | {value(2)} << 32) << ({value(3)} & 31)) >> 32 & {mask}"
    if opcode == "shf.r.wrap.b32":
        return f"{to} = ({value(1)} | {value(2)} << 32) >> ({value(3)} & 31) & {mask}"
    if opcode == "prmt.b32":
        return f"{to} = prmt({value(1)}, {value(2)}, {value(3)})"
    if name == "popc":
        return f"{to} = {value(1)}.bit_count()"
    if name == "clz":
        return f"{to} = {bits} - {value(1)}.bit_length()"
    if name in ("mov", "cvta.to.global"):
        return f"{to} = {value(1)}"
    if parts[0] == "cvt" and len(parts) == 3:
        return f"{to} = {number(1, bits)} & {(1 << _bits(parts[1])) - 1}"
    if name in ("max", "min"):
        return f"{to} = {name}({number(1)}, {number(2)}) & {mask}"
    if name == "bfi":  # the lowest of args[1], at args[3] in args[2]; so many
        position, length = int(args[3]), int(args[4])
        field = ((1 << length) - 1) << position & mask
        return f"{to} = {value(2)} & {mask & ~field} | {value(1)} << {position} & {field}"
    if name == "selp":
        return f"{to} = {value(1)} if {args[3].lstrip('%')} else {value(2)}"
    if name == "ld.param":
        return f"{to} = parameter"
    if access in GLOBAL_LOADS:
        return _load("memory", args[0].lstrip("%"), _address(args[1], symbols), bits, many)
    if access == "ld.shared":
        return _load("shared", args[0].lstrip("%"), _address(args[1], symbols), bits, many)
    if access in GLOBAL_STORES or access == "st.shared":
        values = [_value(each.strip(), bits, symbols) for each in args[1].strip("{}").split(",")]
        return _store("shared" if access == "st.shared" else "memory", _address(args[0], symbols), values, bits)
    if opcode in ("atom.shared.or.b32", "atom.shared.or.b64"):
        return f"{to} = shared.atomic_or({_address(args[1], symbols)}, {bits // 8}, {value(2)})"
    raise NotImplementedError(f"{opcode} {', '.join(args)}")


def translated(text):
    """The kernel as Python source, and the bytes of shared memory: basic blocks under a number, as Python has no
    goto, and these in groups, or a jump would compare its number with each."""
    text = re.sub(r"//.*", "", text)
    body = text[text.index("{") + 1 : text.rindex("}")]
    body = re.sub(r"\{\s*\n|\n\s*\}", "\n", body)  # around inlined assembly
    symbols = {}
    at = 0
    for align, type_, name, n in re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?", body):
        at = (at + int(align) - 1) // int(align) * int(align)
        symbols[name] = at
        at += _bits(type_) // 8 * int(n or 1)
    lines = [line for line in re.findall(r"\$?\w+:|[^;:\s][^;:]*;", body) if not line.startswith(".")]
    labels = {}
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = len(labels) + 1
    source = ["def kernel(tid, ctaid, parameter, memory, shared):", " at = 0", " while True:"]
    source += [f"  if at < {GROUP}:", "   if at == 0:"]
    for place, line in enumerate(lines):
        if line.endswith(":"):
            number = labels[line[:-1]]
            source.append(f"    at = {number}")
            if number % GROUP == 0:
                source.append(f"  if at < {number + GROUP}:")
            source.append(f"   if at == {number}:")
            continue
        guard, opcode, rest = re.match(r"(@!?%\w+\s+)?([\w.]+)\s*([^;]*);", line, re.DOTALL).groups()
        args = [arg.strip() for arg in re.findall(r"\{[^}]*\}|[^,\s][^,]*", rest)]
        indent = "    "
        if guard:
            negated, register = re.match(r"@(!?)%(\w+)", guard).groups()
            source.append(f"    if {'not ' if negated else ''}{register}:")
            indent = "     "
        if opcode in ("bra", "bra.uni"):
            source += [f"{indent}at = {labels[args[0]]}", f"{indent}continue"]
        elif opcode == "bar.sync":
            source.append(f"{indent}yield")
        elif opcode == "ret":
            source.append(f"{indent}return")
        else:
            statement = _meeting(opcode, args, symbols, place) if ".sync" in opcode else None
            source.append(indent + (statement or _statement(opcode, args, symbols)))
    return "\n".join(source) + "\n", at


class Kernel:
    def __init__(self, text):
        source, self.shared_bytes = translated(text)
        names = {"signed": signed, "prmt": prmt}
        exec(compile(source, "kernel.ptx", "exec"), names)
        self.run_thread = names["kernel"]

    def _run_warp(self, lanes, backwards):
        """To the next barrier of the block; True: to the end. Lanes in turn from where they meet to where they meet,
        every other time from the last."""
        heard = [None] * len(lanes)
        while True:
            said = [None] * len(lanes)
            for i in reversed(range(len(lanes))) if backwards else range(len(lanes)):
                try:
                    said[i] = lanes[i].send(heard[i])
                except StopIteration:
                    said[i] = "end"
            places = {each if each in (None, "end") else each[0] for each in said}
            if len(places) > 1:
                raise RuntimeError(f"lanes of one warp are at {len(places)} places")
            if said[0] in (None, "end"):
                return said[0] == "end"
            heard = _met(said)
            backwards = not backwards

    def launch(self, n_blocks, n_threads, parameter, memory):
        """Warps in turn, from barrier to barrier; the order of warps, of lanes and of blocks is turned round every
        other time."""
        for block in reversed(range(n_blocks)):
            shared = Memory({0: bytearray(random.randbytes(self.shared_bytes))})
            threads = [self.run_thread(t, block, parameter, memory, shared) for t in range(n_threads)]
            warps = [threads[i : i + WARP] for i in range(0, n_threads, WARP)]
            backwards = False
            while warps:
                left = [warp for warp in warps if not self._run_warp(warp, backwards)]
                if left and len(left) != len(warps):
                    raise RuntimeError(f"{len(warps) - len(left)} warps ended where {len(left)} wait at a barrier")
                warps = left[::-1]
                backwards = not backwards
