"""Runs instructions that are written by hand, as a kernel of one argument; and parts of kernels with products."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from tests.kernels.triton.ptx.device_memory import DeviceMemory
from tests.kernels.triton.ptx.machine import Launch, run_launch
from tests.kernels.triton.ptx.parsing import parse

FRAME = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid {threads}
{{
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    ld.param.b64 %rd1, [kernel_param_0];
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    {body}
    ret;
}}
"""


def run(body: str, out: Tensor, *, threads: int = 32, programs: int = 1, shared_bytes: int = 0) -> Tensor:
    """Run instructions with the thread in %r1, the program in %r2, out in %rd1, and the thread's place in %rd2."""
    program = parse(FRAME.format(threads=threads, body=body))
    bits = {"kernel_param_0": np.array([out.data_ptr()], np.uint64)}
    memory = DeviceMemory([("out", out)], 4)
    run_launch(Launch(program, (programs, 1, 1), bits, memory, shared_bytes, {"global": 4, "shared": 2}))
    return out


# Threads of a warpgroup.
NUM_THREADS = 128
# These instructions must stand between writes to shared memory and the products that read it, and after the products.
FENCES = "fence.proxy.async; bar.sync 0; wgmma.fence.sync.aligned;"
END = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{number}" for number in range(first, first + count)) + "}"


def filled(num_bytes: int) -> str:
    """Copy the begin of the argument to shared memory."""
    steps = ["shl.b32 %r3, %r1, 4; mad.wide.u32 %rd3, %r1, 16, %rd1;"]
    for begin in range(0, num_bytes, 16 * NUM_THREADS):
        steps.append(f"ld.global.v4.b32 {registers(4, 4)}, [%rd3 + {begin}];")
        steps.append(f"st.shared.v4.b32 [%r3 + {begin}], {registers(4, 4)};")
    return "\n".join(steps)


def stored(num_columns: int, begin: int) -> str:
    """Write the accumulators behind what the argument begins with, those of a thread after each other."""
    count = num_columns // 2
    place = f"mad.wide.u32 %rd4, %r1, {4 * count}, %rd1;"
    return place + "\n".join(f"st.global.b32 [%rd4 + {begin + 4 * i}], %r{1000 + i};" for i in range(count))


def product(name: str, left: str, right: str, options: str, num_columns: int) -> str:
    """Multiply matrices of a type of numbers: left and right are descriptors, or left is a list of registers."""
    inner, total = {"bf16": 16, "f16": 16, "tf32": 8}.get(name, 32), "s32" if name == "s8" else "f32"
    opcode = f"wgmma.mma_async.sync.aligned.m64n{num_columns}k{inner}.{total}.{name}.{name}"
    return f"{opcode} {registers(1000, num_columns // 2)}, {left}, {right}, {options};"
