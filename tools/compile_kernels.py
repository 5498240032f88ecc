"""Compiles every Triton kernel for every card that is supported, without a GPU.

python -m tools.compile_kernels [CAPABILITY ...]    # 75 for 7.5; without any: all of CAPABILITIES
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from tools import embed

embed.bare_pack()

from anyshape.accel.kernels.compiling import FUSION  # noqa: E402
from anyshape.accel.kernels.linear_geglu import linear_geglu_kernel  # noqa: E402
from anyshape.accel.kernels.triton_ops import KERNELS  # noqa: E402

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
FLAGS = {
    "SILU": True,
    "BR": 32,
    "BC": 64,
    "BB": 16,
    "BCG": 16,
    "PENDING": 2,
    "COLS": 6,
    "BM": 64,
    "BN": 128,
    "BK": 64,
    "GROUP": 8,
    "D": 40,
    "BD": 64,
    "BT": 64,
    "BL": 32,
}
HOPPER_ONLY = (linear_geglu_kernel,)
FLOAT32 = ("part", "ab")
INTEGERS = (
    "HW", "ROWS", "BLOCKS", "C", "CG", "INNER", "H", "W", "M", "K", "T", "L", "OUT_H", "OUT_W",
)  # fmt: skip
SCALARS = {"eps": "fp32", "SCALE": "fp32", "table": "*i64"} | dict.fromkeys(INTEGERS, "i32")
DESCRIPTORS = {"x": "fp16[64, 64]", "weight": "fp16[2, 128, 64]", "out": "fp16[64, 128]"}


def _type(kernel: triton.JITFunction, name: str) -> str:
    if kernel in HOPPER_ONLY and name in DESCRIPTORS:
        return f"tensordesc<{DESCRIPTORS[name]}>"
    return SCALARS.get(name) or ("*fp32" if name in FLOAT32 else "*fp16")


def source(kernel: triton.JITFunction) -> ASTSource:
    """``kernel`` with one of its signatures."""
    names = kernel.arg_names
    constants = {p.name: FLAGS.get(p.name, True) for p in kernel.params if p.is_constexpr}
    signature = {name: "constexpr" if name in constants else _type(kernel, name) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    return ASTSource(kernel, signature, constexprs=places)


def compile_for(kernel: triton.JITFunction, capability: int) -> CompiledKernel:
    """``kernel`` as machine code for one compute capability (75 for 7.5)."""
    return triton.compile(source(kernel), target=GPUTarget("cuda", capability, 32), options=FUSION)


def main() -> None:
    """Prints a line per kernel and card; raises what the compiler raises."""
    for capability in map(int, sys.argv[1:] or CAPABILITIES):
        for kernel in KERNELS:
            if kernel in HOPPER_ONLY and capability != 90:
                continue
            compile_for(kernel, capability)
            print(f"sm_{capability} {kernel.__name__} ok")


if __name__ == "__main__":
    main()
