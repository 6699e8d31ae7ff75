"""Runs PTX without a GPU: a kernel of one pointer, by turning each of its threads into a Python generator that
stops at barriers.

Knows the instructions that comm/fingerprint.ptx has and refuses others. Memory is arrays of bytes at
addresses of the test's choice; an access that is not inside one of them, or not aligned as the instruction
asks for, is an error.
"""

import re

WIDTH = {"8": 1, "32": 4, "64": 8}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OPERATION = {"add": "+", "sub": "-", "mul.lo": "*", "and": "&", "or": "|", "xor": "^"}


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

    def store(self, at, n, value):
        if at % n:
            raise ValueError(f"{at:#x} is not aligned to {n}")
        array, start = self._find(at, n)
        array[start : start + n] = value.to_bytes(n, "little")


def signed(value, bits):
    return value - (1 << bits) if value >> bits - 1 else value


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


def _statement(opcode, args, symbols):
    """One instruction as a Python statement."""
    parts = opcode.split(".")
    type_ = parts[-1]
    bits = _bits(type_) if type_ not in ("sync", "ret") and re.search(r"\d|pred", type_) else 0
    mask = (1 << bits) - 1

    def value(i, width=None):
        return _value(args[i], width or bits, symbols)

    to = args[0].lstrip("%") if args else ""
    name = ".".join(parts[:-1])
    if name == "setp" or parts[0] == "setp":
        sign = (lambda x: f"signed({x}, {bits})") if type_[0] == "s" else str
        return f"{to} = {sign(value(1))} {COMPARE[parts[1]]} {sign(value(2))}"
    if name in OPERATION:
        return f"{to} = ({value(1)} {OPERATION[name]} {value(2)}) & {mask}"
    if name == "mul.wide":
        return f"{to} = {value(1)} * {value(2)}"
    if name == "shl":
        return f"{to} = ({value(1)} << {value(2, 32)}) & {mask} if {value(2, 32)} < {bits} else 0"
    if name == "shr" and type_[0] == "u":
        return f"{to} = {value(1)} >> {value(2, 32)}"
    if name in ("mov", "cvta.to.global"):
        return f"{to} = {value(1)}"
    if opcode in ("cvt.u32.u64", "cvt.u64.u32"):
        return f"{to} = {value(1, 64)} & {(1 << 32) - 1}"
    if name == "max" and type_[0] == "u":
        return f"{to} = max({value(1)}, {value(2)})"
    if name == "bfi":  # the lowest of args[1], at args[3] in args[2]; so many
        position, length = int(args[3]), int(args[4])
        field = ((1 << length) - 1) << position & mask
        return f"{to} = {value(2)} & {mask & ~field} | {value(1)} << {position} & {field}"
    if name == "selp":
        return f"{to} = {value(1)} if {args[3].lstrip('%')} else {value(2)}"
    if name == "ld.param":
        return f"{to} = parameter"
    if name in ("ld.global.nc", "ld.volatile.global"):
        return f"{to} = memory.load({_address(args[1], symbols)}, {bits // 8}, {bits // 8})"
    if name == "ld.global.nc.v2":
        low, high = (register.lstrip("%") for register in args[0].strip("{}").split(","))
        at = _address(args[1], symbols)
        return f"{low}, {high} = memory.load({at}, 8, 16), memory.load({at} + 8, 8, 8)"
    if name == "ld.shared":
        return f"{to} = shared.load({_address(args[1], symbols)}, {bits // 8}, {bits // 8})"
    if name == "st.shared":
        return f"shared.store({_address(args[0], symbols)}, {bits // 8}, {value(1)})"
    if name == "st.volatile.global":
        return f"memory.store({_address(args[0], symbols)}, {bits // 8}, {value(1)})"
    raise NotImplementedError(f"{opcode} {', '.join(args)}")


def translated(text):
    """The kernel as Python source, and the bytes of shared memory: basic blocks under a number, as Python has no
    goto."""
    text = re.sub(r"//.*", "", text)
    body = text[text.index("{") + 1 : text.rindex("}")]
    symbols = {}
    at = 0
    for align, name, size in re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\]", body):
        at = (at + int(align) - 1) // int(align) * int(align)
        symbols[name] = at
        at += int(size)
    lines = [line for line in re.findall(r"\$?\w+:|[^;:\s][^;:]*;", body) if not line.startswith(".")]
    labels = {}
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = len(labels) + 1
    source = ["def kernel(tid, ctaid, parameter, memory, shared):", " at = 0", " while True:", "  if at == 0:"]
    for line in lines:
        if line.endswith(":"):
            source += [f"   at = {labels[line[:-1]]}", f"  if at == {labels[line[:-1]]}:"]
            continue
        guard, opcode, rest = re.match(r"(@!?%\w+\s+)?([\w.]+)\s*([^;]*);", line, re.DOTALL).groups()
        args = [arg.strip() for arg in re.findall(r"\{[^}]*\}|[^,]+", rest)]
        indent = "   "
        if guard:
            negated, register = re.match(r"@(!?)%(\w+)", guard).groups()
            source.append(f"   if {'not ' if negated else ''}{register}:")
            indent = "    "
        if opcode.startswith("bra"):
            source += [f"{indent}at = {labels[args[0]]}", f"{indent}continue"]
        elif opcode == "bar.sync":
            source.append(f"{indent}yield")
        elif opcode == "ret":
            source.append(f"{indent}return")
        else:
            source.append(indent + _statement(opcode, args, symbols))
    return "\n".join(source) + "\n", at


class Kernel:
    def __init__(self, text):
        source, self.shared_bytes = translated(text)
        names = {"signed": signed}
        exec(compile(source, "kernel.ptx", "exec"), names)
        self.run_thread = names["kernel"]

    def launch(self, n_blocks, n_threads, parameter, memory):
        """Threads in turn, from barrier to barrier; the order of threads and of blocks is turned round every
        other time."""
        for block in reversed(range(n_blocks)):
            shared = Memory({0: bytearray(self.shared_bytes)})
            threads = [self.run_thread(t, block, parameter, memory, shared) for t in range(n_threads)]
            while threads:
                left = [thread for thread in threads if next(thread, thread) is None]
                if left and len(left) != len(threads):
                    raise RuntimeError(f"{len(threads) - len(left)} threads ended where {len(left)} wait at a barrier")
                threads = left[::-1]
