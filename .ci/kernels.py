"""Compile the GPU kernels to PTX, which hvpipe carries: csrc/gpu/kernels.cu -> csrc/gpu/kernels.ptx.

    python .ci/kernels.py           # write kernels.ptx, after a change of kernels.cu or what it includes
    python .ci/kernels.py --check   # exit code 1 if it would change

PTX is CUDA's assembly language. A driver compiles it for its GPU, if it knows the version of the PTX. So the
compiler is an old one: NVRTC 11.8, whose PTX every driver since 520 takes, for V100 and later. `make cuda`
fetches it (the wheel nvidia-cuda-nvrtc-cu11) into build/. Its API: https://docs.nvidia.com/cuda/nvrtc/
"""

from __future__ import annotations

import ctypes
import difflib
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
PTX = CSRC / "gpu/kernels.ptx"
OPTIONS = ("--gpu-architecture=compute_70", "--std=c++17", "--fmad=false")  # the CPU rounds each product, too

# NVRTC has no standard library. This is all that the kernels use of it.
STANDARD_HEADERS = {
    "cstddef": "namespace std { using size_t = decltype(sizeof 0); }",
    "cstdint": """
        namespace std {
        using uint16_t = unsigned short;
        using uint32_t = unsigned int;
        using uintptr_t = unsigned long long;
        }""",
    "type_traits": """
        namespace std {
        template <typename A, typename B> constexpr bool is_same_v = false;
        template <typename A> constexpr bool is_same_v<A, A> = true;
        template <bool choice, typename A, typename B> struct Conditional { using type = A; };
        template <typename A, typename B> struct Conditional<false, A, B> { using type = B; };
        template <bool choice, typename A, typename B>
        using conditional_t = typename Conditional<choice, A, B>::type;
        }""",
}


def compiled() -> str:
    """Return the PTX of the kernels.

    Raises:
        SystemExit: If there is no NVRTC, or it finds errors.
    """
    found = sorted(ROOT.glob("build/nvrtc-*/nvidia/cuda_nvrtc/lib/libnvrtc.so.*"))
    if not found:
        sys.exit("kernels.py: there should be NVRTC in build/nvrtc-*: run `make cuda`, which fetches it")
    nvrtc = ctypes.CDLL(str(found[-1]))
    headers = dict(STANDARD_HEADERS)
    for name in ("gpu/cast_tile.h", "base/half.h"):
        headers[name] = (CSRC / name).read_text()
    program = ctypes.c_void_p()
    _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            *(ctypes.byref(program), (CSRC / "gpu/kernels.cu").read_bytes(), b"kernels.cu", len(headers)),
            *(_strings(headers.values()), _strings(headers)),
        ),
    )
    outcome = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), _strings(OPTIONS))
    if said := _text(nvrtc, "ProgramLog", program):
        print(said, file=sys.stderr)
    _check(nvrtc, outcome)
    return _text(nvrtc, "PTX", program)


def main() -> None:
    """Run the command."""
    new = compiled()
    if sys.argv[1:] != ["--check"]:
        PTX.write_text(new)
        print(f"wrote {PTX.relative_to(ROOT)}")
    elif new != PTX.read_text():
        difference = difflib.unified_diff(PTX.read_text().splitlines(), new.splitlines(), lineterm="", n=1)
        print(*list(difference)[:40], sep="\n")
        sys.exit("kernels.py: kernels.ptx should be compiled from kernels.cu: run `python .ci/kernels.py`")


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _text(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text.value.decode().strip("\n") + "\n" if text.value.strip() else ""


def _check(nvrtc: ctypes.CDLL, code: int) -> None:
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    if code != 0:
        sys.exit(f"kernels.py: NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")


if __name__ == "__main__":
    main()
