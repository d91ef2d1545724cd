"""Shrinks a CUDA library for transfer: `python -m bench.gpu.thin libnccl.so.2 90 | xz -3 > thin.so.xz`.

The code for all GPU generations but one (90: Hopper) becomes zeros, which compress to nothing. The library
then works only on that generation.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

# A fat binary: magic, version, bytes of this header, bytes of the entries. An entry: kind, version, bytes of
# its header, bytes of its code, 12 unknown bytes, generation. NVIDIA documents neither.
_FAT = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI")
_MAGIC = 0xBA55ED50


def thin(library: bytes, generation: int) -> bytes:
    """Return the library, of the same length, with the code for all other generations zeroed."""
    thinned = bytearray(library)
    at = library.find(_MAGIC.to_bytes(4, "little"))
    while at >= 0:
        _, version, header_bytes, entry_bytes = _FAT.unpack_from(library, at)
        entry, end = at + header_bytes, at + header_bytes + entry_bytes
        if version == 1 and header_bytes == _FAT.size and end <= len(library):
            while entry < end:
                _, _, entry_header_bytes, code_bytes, of = _ENTRY.unpack_from(library, entry)
                code = entry + entry_header_bytes
                entry = code + code_bytes
                if of != generation:
                    thinned[code:entry] = bytes(code_bytes)
        else:  # the magic number by chance
            end = at + 4
        at = library.find(_MAGIC.to_bytes(4, "little"), end)
    return bytes(thinned)


if __name__ == "__main__":
    sys.stdout.buffer.write(thin(Path(sys.argv[1]).read_bytes(), int(sys.argv[2])))
