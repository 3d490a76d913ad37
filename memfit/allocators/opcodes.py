"""Checks what a pickle would do, without doing any of it.

Python's unpickler calls what a pickle names, and ten bytes can make it reserve gigabytes (a memo index, a length). This module
reads the opcodes first, in order, and accepts only those that make None, numbers, text, bytes, lists, tuples and dicts.
Not covered: pickles of protocol 0 and 1, which torch does not write.
"""

from __future__ import annotations

import re

_LENGTHS = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x42: 4, 0x43: 1, 0x8A: 1, 0x8B: 4}
"""Opcodes and the bytes of their length field. As many bytes of text (the first three), bytes or a long integer follow."""
_TEXTS = (0x58, 0x8C, 0x8D)
_PROTO, _LONG_BINPUT, _STOP, _GLOBAL, _INST, _STACK_GLOBAL = 0x80, 0x72, 0x2E, 0x63, 0x69, 0x93
_CROWDED, _FEW = 4, 1000
"""Fewest bytes per list or dict in a pickle with more than a few of them. A snapshot has dozens of bytes for each. Empty ones
are the danger: each takes 60 bytes of memory for one byte of the file."""
# Tuples may hold numbers, True, False and None. Nested tuples would be hashed by recursion, to any depth. A frame may begin
# before each of them (PEP 3154): Python's pickler ends one every 64 KiB.
_LONG = rb"\x8a(?:\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_SCALAR = rb"(?:(?:\x95.{8})?(?:[N\x88\x89]|K.|M..|J.{4}|G.{8}|" + _LONG + rb"))"
_TUPLE = rb"\)|" + _SCALAR + rb"\x85|" + _SCALAR + rb"{2}\x86|" + _SCALAR + rb"{3}\x87|\(" + _SCALAR + rb"{4,16}t"
# Matches many opcodes with arguments of fixed length at once. Bounded, because the regex engine stores every iteration.
_FIXED = _TUPLE + rb"|[(}\]aesudlN\x88\x89\x94]|[hqK].|M..|[jJ].{4}|[G\x95].{8}|\x80[\x02-\x05]"
_RUN = re.compile(rb"(?:" + _FIXED + rb"){1,512}", re.DOTALL)
_NESTED = (0x74, 0x85, 0x86, 0x87)
_OF_FIXED_LENGTH = re.compile(rb"[(}\])taesudlN\x85-\x89\x94hqKMjJG\x95\x80]")
_NAMES = {
    0x52: "REDUCE, a call", 0x62: "BUILD, a call", 0x81: "NEWOBJ, a new object", 0x92: "NEWOBJ_EX, a new object",
    0x6F: "OBJ, a new object", 0x50: "PERSID, a reference outside the file", 0x51: "BINPERSID, a reference outside the file",
    0x82: "EXT1, a registered name", 0x83: "EXT2, a registered name", 0x84: "EXT4, a registered name",
}  # fmt: skip


def objection(data: bytes) -> str | None:
    """Explain why the pickle must not be loaded; None if it holds only containers and scalars."""
    if data.count(b"}") + data.count(b"]") > _FEW + len(data) // _CROWDED:
        return f"it has a list or a dict for every {_CROWDED} bytes or fewer, which no snapshot has"
    at, texts = 0, ["?", "?"]
    while at < len(data):
        run = _RUN.match(data, at)
        if run is not None:
            at = run.end()
            continue
        code = data[at]
        if code == _STOP:
            return None
        if code in _LENGTHS:
            start = at + 1 + _LENGTHS[code]
            end = start + int.from_bytes(data[at + 1 : start], "little")
            if end > len(data):
                return _cut_off(data)
            if code in _TEXTS:
                texts = [texts[1], data[start : min(end, start + 80)].decode(errors="replace")]
            at = end
        elif code == _LONG_BINPUT and at + 5 <= len(data):
            if int.from_bytes(data[at + 1 : at + 5], "little") > at:
                return f"at byte {at} it numbers more objects than it can hold"
            at += 5
        else:
            return _wrong(data, at, texts)
    return _cut_off(data)


def _cut_off(data: bytes) -> str:
    return f"it is truncated after {len(data)} bytes"


def _wrong(data: bytes, at: int, texts: list[str]) -> str:
    code = data[at]
    if code in _NESTED:
        return f"at byte {at} it has a tuple of non-numbers, which no snapshot has"
    if _OF_FIXED_LENGTH.match(data, at) or code == _LONG_BINPUT:
        whole = code == _PROTO and at + 1 < len(data)
        return f"its protocol is {data[at + 1]}, not one of 2 to 5" if whole else _cut_off(data)
    if code == _STACK_GLOBAL:
        return f"at byte {at} it names {'.'.join(texts)}, which is code"
    if code in (_GLOBAL, _INST):
        words = data[at + 1 : at + 200].split(b"\n")[:2]
        return f"at byte {at} it names {b'.'.join(words).decode(errors='replace')}, which is code"
    return f"at byte {at} it has {_NAMES.get(code, f'the opcode {code:#04x}')}, which no list, dict, number or text needs"
