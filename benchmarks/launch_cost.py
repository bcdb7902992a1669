"""Measures the host's time to launch Triton kernels, without a GPU: `python -m benchmarks.launch_cost`.

Launches go as far as the driver, which is a stand-in: nothing is compiled, and nothing runs. For each operation of a
layer this prints microseconds of processor time of a call, of its launches by kernels/triton/launcher.py, and of the
same launches by Triton alone; each is the median of the rounds. The model is of the shape of Qwen3-0.6B.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import click
import torch

_DTYPE = torch.bfloat16
_CALLS = 200


class Compiled:
    """Stands for a kernel that Triton has compiled."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        pass

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: None


def without_a_gpu() -> None:
    """Make Triton launch kernels without compiling them."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def compile_nothing(self: Any, key: Any, signature: Any, device: int, *others: Any) -> Compiled:
        kernel = self.device_caches[device][0][key] = Compiled()
        return kernel

    target = GPUTarget("cuda", 90, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    JITFunction._do_compile = compile_nothing


def operations() -> dict[str, Callable[[], object]]:
    """Calls for one token. Imports Triton."""
    from pagewick.kernels import kv_cache
    from pagewick.kernels import options as ops
    from pagewick.kernels.triton import attention, elementwise, norm, rope

    x, weight = torch.zeros(1, 1024, dtype=_DTYPE), torch.ones(1024, dtype=_DTYPE)
    gate_up, qkv = torch.zeros(1, 2 * 3072, dtype=_DTYPE), torch.zeros(1, 32 * 128, dtype=_DTYPE)
    heads, rotation = ops.HeadLayout(16, 8, 128), ops.Rotation(torch.ones(1, 64), torch.ones(1, 64))
    of_heads = ops.HeadNorm(weight[:128], None, 1e-6)
    options = ops.HeadOptions(rotation, of_heads, of_heads)
    cache = kv_cache.heads_cache(torch.zeros(40, 65536, dtype=torch.uint8), _DTYPE, 8, 16, 128, is_packed=False)
    slots, q = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 16, 128, dtype=_DTYPE)
    batch = ops.AttentionMetadata(
        torch.zeros(1, 33, dtype=torch.int32), torch.ones(1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32), 1,
    )  # fmt: skip
    return {
        "add_rms_norm": lambda: norm.add_rms_norm(x, x, weight, 1e-6),
        "rope_and_store": lambda: rope.rope_and_store(qkv, cache, slots, heads, options),
        "paged_attention": lambda: attention.paged_attention(q, cache, batch, ops.ScoreOptions(0.1)),
        "gated_activation": lambda: elementwise.gated_activation(gate_up, "silu"),
    }


def microseconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    for _ in range(_CALLS):
        call()
    return (time.process_time() - started) / _CALLS * 1e6


@click.command()
@click.option("--rounds", default=7, show_default=True)
def main(rounds: int) -> None:
    """Print medians of the rounds."""
    from pagewick.kernels.triton.launcher import Launcher

    without_a_gpu()
    kept = Launcher.launch
    launches: list[tuple[Launcher, tuple[int, ...], Mapping[str, Any]]] = []

    def noted(self: Launcher, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        launches.append((self, grid, dict(arguments)))

    def by_triton(self: Launcher, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        self.launch_by_triton(grid, arguments)

    print(f"{'operation':18}{'launches':>10}{'a call':>10}{'launches':>10}{'by Triton':>10}")
    with torch.inference_mode():
        for name, call in operations().items():
            launches.clear()
            Launcher.launch = noted  # type: ignore[method-assign]
            call()
            Launcher.launch = kept  # type: ignore[method-assign]

            def launch_all(way: Callable[[Launcher, tuple[int, ...], Mapping[str, Any]], None]) -> None:
                for launcher, grid, arguments in launches:
                    way(launcher, grid, arguments)

            ways = [call, lambda: launch_all(kept), lambda: launch_all(by_triton)]
            found = [[microseconds(way) for way in ways] for _ in range(rounds + 1)][1:]
            medians = [statistics.median(times) for times in zip(*found, strict=True)]
            print(f"{name:18}{len(launches):10}" + "".join(f"{each:10.1f}" for each in medians), flush=True)


if __name__ == "__main__":
    main()
