"""Launches kernels by Triton's own functions, without a GPU: nothing is compiled, and nothing runs.

Triton compiles a form of a kernel for each combination of types, of numbers that are 1 or multiples of 16, of aligned
addresses and of constants. This prints the forms, as JSON, that appear for some sizes of a batch and for others: a list
of kernels for each. A form that is new in the middle of serving makes all requests wait for the compiler.

It runs in a process of its own, because kernels that are interpreted cannot be launched.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pagewick.expert_routing import Routing
from pagewick.kernels import fp8_activations, kv_cache
from pagewick.kernels import options as ops
from pagewick.kernels.block_choice import BlockChoice
from pagewick.kernels.triton import (
    attention,
    block_attention,
    blocks,
    channel_scan,
    compress,
    delta,
    edits,
    elementwise,
    full_attention,
    head_blocks,
    hyper,
    index,
    latents,
    layouts,
    logits,
    mla,
    moe,
    norm,
    quantized,
    rope,
    rotate_heads,
    routing,
    sampling,
    scan,
    short_convolution,
    window_attention,
)
from pagewick.kernels.triton.launcher import Launcher

# One size for each kind of tile: see kind_for and kind_for_choices. Few are 1 or multiples of 16.
FIRST = (1, 2, 3, 17, 300)
FURTHER = (1, 4, 5, 8, 15, 16, 18, 31, 32, 33, 64, 80, 100, 160, 255, 256, 301, 512, 1000)
# Blocks of a sequence, the longest.
FIRST_WIDTHS = (3, 33)
FURTHER_WIDTHS = (1, 3, 16, 33, 48)
# New tokens of a sequence that is long for attention.
_LONG = 5
_LIMITS = 2**31 - 1, 65535, 65535
_BF16, _F32, _I32, _I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64

found: list[str] = []
_launch = Launcher.launch


def _note_form(self: Any, key: Any, signature: Any, device: int, *others: Any) -> Any:
    """In place of JITFunction._do_compile."""
    found.append(self.fn.__name__)

    kernel = self.device_caches[device][0][key] = _Compiled(self.fn.__name__)
    return kernel


class _Compiled:
    """A kernel that Triton has compiled. given: the grid and all arguments of its last launch."""

    function = packed_metadata = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: tuple[Any, ...] = ()

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.run(*grid, 0, None, None, None, None, None, *arguments)

    def run(self, x: int, y: int, z: int, *arguments: Any) -> None:
        """The first arguments after the grid are Triton's: a stream, handles and hooks."""
        # A grid of 2^31 programs or more is silently not launched.
        assert all(size <= limit for size, limit in zip((x, y, z), _LIMITS, strict=True)), (self.name, x, y, z)
        assert x * y * z < 2**31, (self.name, x, y, z)
        self.given = (x, y, z, *arguments[6:])


def _launch_both_ways(self: Launcher, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """In place of Launcher.launch: what it keeps must be what Triton would choose, with the same arguments."""
    _launch(self, grid, arguments)
    kept = self._kept[self._key(arguments)]
    given = kept.given
    assert self.launch_by_triton(grid, arguments) is kept, kept.name
    assert all(one is other or one == other for one, other in zip(given, kept.given, strict=True)), kept.name


def _attend(num_tokens: int, widths: Sequence[int]) -> None:
    heads, rotation = ops.HeadLayout(32, 8, 128), ops.Rotation(torch.ones(num_tokens, 64), torch.ones(num_tokens, 64))
    latent_cache = torch.zeros(40, 32, 576, dtype=_BF16)
    for dtype, num_bytes in ((_BF16, 131072), (torch.float8_e4m3fn, 65536 + 2048), (kv_cache.INT4, 32768 + 2048)):
        memory = torch.zeros(40, num_bytes, dtype=torch.uint8)
        cache = kv_cache.heads_cache(memory, dtype, 8, 32, 128, is_packed=False)
        qkv, slots = torch.zeros(num_tokens, 48 * 128, dtype=_BF16), torch.zeros(num_tokens, dtype=_I64)
        q = rope.rope_and_store(qkv, cache, slots, heads, ops.HeadOptions(rotation))
        for width in widths:
            for each in (1, _LONG, num_tokens):
                batch = _metadata([*range(0, num_tokens, each), num_tokens], width)
                attention.paged_attention(q, cache, batch, ops.ScoreOptions(0.1))
    turned = ops.Rotation(torch.ones(num_tokens, 32), torch.ones(num_tokens, 32), interleaved=True)
    q_rope = latents.rope_and_store_latent(
        torch.zeros(num_tokens, 16, 192, dtype=_BF16), torch.zeros(num_tokens, 576, dtype=_BF16), latent_cache,
        torch.zeros(num_tokens, dtype=_I64), norm_weight=torch.ones(512, dtype=_BF16), norm_eps=1e-6, rotation=turned,
    )  # fmt: skip
    for width in widths:
        batch = _metadata(list(range(num_tokens + 1)), width)
        mla.latent_attention(
            torch.zeros(num_tokens, 16, 512, dtype=_BF16), q_rope, latent_cache, batch, softmax_scale=0.1
        )
    _select(num_tokens, widths, rotation)
    _select_blocks(num_tokens, widths, rotation)


def _select(num_tokens: int, widths: Sequence[int], rotation: ops.Rotation) -> None:
    """Select tokens of DeepSeek-V3.2, for one token of each sequence and for several."""
    cache, weights = torch.zeros(2, 64, 128, dtype=_BF16), torch.zeros(num_tokens, 64)
    queries = torch.zeros(num_tokens, 64, 128, dtype=_BF16)
    index.store_index_keys(queries[:, 0], cache, torch.zeros(num_tokens, dtype=_I64), rotation=rotation)
    for each, width, top_k in itertools.product((1, _LONG), widths, (100, 2048)):
        batch = _metadata([*range(0, num_tokens, each), num_tokens], width)
        index.select_keys(queries, weights, cache, batch, batch.block_tables, rotation=rotation, top_k=top_k)
    # A million keys.
    one, batch = queries[:1].float(), _metadata([0, 1], 2**20 // 64)
    angles = ops.Rotation(*(each[:1] for each in rotation[:2]))
    index.select_keys(one, weights[:1], cache.float(), batch, batch.block_tables, rotation=angles, top_k=100)


def _select_blocks(num_tokens: int, widths: Sequence[int], rotation: ops.Rotation) -> None:
    """Select blocks of MiniMax-M3, and attend to them."""
    keys, queries = torch.zeros(2, 64, 128, dtype=_BF16), torch.zeros(num_tokens, 64, 128, dtype=_BF16)
    memory, scores = torch.zeros(40, 2 * 4 * 64 * 128 * 2, dtype=torch.uint8), ops.ScoreOptions(0.1)
    cache = kv_cache.heads_cache(memory, _BF16, 4, 64, 128, is_packed=False)
    for each, width, top_k in itertools.product((1, _LONG), widths, (1, 16)):
        batch = _metadata([*range(0, num_tokens, each), num_tokens], width)
        selected = head_blocks.select_blocks(
            queries[:, :4], keys, batch, rotation=rotation, choice=BlockChoice(128, top_k, 1)
        )
        block_attention.block_attention(queries, cache, batch, scores, selected, 128)


def _compress(num_tokens: int, widths: Sequence[int]) -> None:
    """Make the entries of DeepSeek V4, and mix its streams."""
    slots, weight = torch.zeros(num_tokens, dtype=_I64), torch.ones(512, dtype=_BF16)
    # As parts of wider angles.
    rotation = ops.Rotation(*torch.ones(2, num_tokens, 300)[:, :, 44:], interleaved=True)
    index.store_index_keys(torch.zeros(num_tokens, 512, dtype=_BF16), torch.zeros(2, 64, 512, dtype=_BF16), slots,
                           rotation=rotation)  # fmt: skip
    for ratio, width in itertools.product((4, 128), widths):
        size = 2048 if ratio == 4 else 1024
        options = ops.CompressOptions(ratio, ratio == 4, torch.zeros(ratio, size // 2), weight, 1e-6)
        cache, entries = torch.zeros(2, 128, size, dtype=_BF16), torch.zeros(2, 128 // ratio, 512, dtype=_BF16)
        compress.compress_rows(
            torch.zeros(num_tokens, size, dtype=_BF16), cache, slots,
            _metadata(list(range(num_tokens + 1)), width), entries, slots, rotation=rotation, options=options,
        )  # fmt: skip
    _attend_windows(num_tokens, widths)
    streams = torch.zeros(num_tokens, 4, 4096, dtype=_BF16)
    options = ops.HyperOptions(torch.zeros(24), torch.zeros(3), 20, 1e-6, 1e-6)
    weights = hyper.stream_weights(torch.zeros(num_tokens, 24), streams, options)
    hyper.expand_streams(streams, hyper.collapse_streams(streams, weights.before), weights)
    options = ops.HyperOptions(torch.zeros(4), torch.zeros(1), 20, 1e-6, 1e-6)
    hyper.stream_weights(torch.zeros(num_tokens, 4), streams, options)


def _attend_windows(num_tokens: int, widths: Sequence[int]) -> None:
    queries, cache = torch.zeros(num_tokens, 64, 512, dtype=_BF16), torch.zeros(2, 64, 512, dtype=_BF16)
    counts, scores = torch.zeros(num_tokens, dtype=_I32), ops.ScoreOptions(0.1, 128, sinks=torch.zeros(64))
    selected = ops.SelectedKeys(torch.zeros(num_tokens, 500, dtype=_I32), counts, counts)
    for width, each in itertools.product(widths, (1, _LONG)):
        batch = _metadata([*range(0, num_tokens, each), num_tokens], width)
        of_one, of_four = (ops.Entries(cache[:, :size], batch.block_tables, 64 // size) for size in (1, 16))
        for entries in (None, of_one, of_four._replace(selected=selected)):
            window_attention.window_attention(queries, cache, batch, scores, entries)


def _advance(num_tokens: int) -> None:
    """With the sizes of Qwen3-Next, and with decays of channels."""
    for num_key_heads, num_decays in ((16, 32), (32, 32 * 128)):
        num_channels, by_channel = (2 * num_key_heads + 32) * 128, num_decays > 32
        options = ops.DeltaOptions(
            num_key_heads, 32, 128, 128, torch.zeros(num_channels, 4), torch.zeros(32), torch.zeros(num_decays),
            torch.zeros(128), 1e-6, has_channel_decay=by_channel, has_sigmoid_gate=by_channel,
        )  # fmt: skip
        states = torch.zeros(3, 4 * (3 * num_channels + 32 * 128 * 128), dtype=torch.uint8)
        # As parts of one product.
        sizes = (num_channels, 4096, 32, num_decays)
        qkv, gate, beta, decay = torch.zeros(num_tokens, sum(sizes), dtype=_BF16).split(sizes, dim=1)
        for each in (1, num_tokens):
            delta.gated_delta_net(
                qkv, gate, beta, decay, states, _metadata([*range(0, num_tokens, each), num_tokens], 3), options
            )


def _scan(num_tokens: int) -> None:
    """As parts of one product, whose rows are those of Granite 4.0-H; LFM2's convolutions, and Falcon Mamba's scan."""
    zeros, size, channels = torch.zeros, 48 * 64, 48 * 64 + 2 * 128
    options = ops.ScanOptions(
        48, 1, 64, 128, zeros(channels, 4), zeros(channels), zeros(48), zeros(48), zeros(48), zeros(size), 1e-6
    )
    states = zeros(3, 4 * (3 * channels + size * 128), dtype=torch.uint8)
    gate, xbc, dt = zeros(num_tokens, size + channels + 48, dtype=_BF16).split((size, channels, 48), dim=1)
    bcx, weights = zeros(num_tokens, 3 * 2048, dtype=_BF16), ops.ConvolutionOptions(zeros(2048, 3))
    for each in (1, num_tokens):
        batch = _metadata([*range(0, num_tokens, each), num_tokens], 3)
        scan.selective_scan(xbc, gate, dt, states, batch, options)
        short_convolution.short_convolution(bcx, states, batch, weights)
    x, gate, dt = (zeros(num_tokens, 2 * 8192, dtype=_BF16).chunk(2, dim=1)[1] for _ in range(3))
    keys, queries = zeros(num_tokens, 256 + 2 * 16, dtype=_BF16)[:, 256:].chunk(2, dim=1)
    of_channels = ops.ChannelScanOptions(zeros(16, 8192), zeros(8192), zeros(8192), 3 * 8192)
    states = zeros(3, 4 * (3 + 16) * 8192, dtype=torch.uint8)
    for each in (1, num_tokens):
        batch = _metadata([*range(0, num_tokens, each), num_tokens], 3)
        channel_scan.channel_scan(x, gate, dt, keys, queries, states, batch, of_channels)


def _see(num_patches: int) -> None:
    """Attend with the patches of one picture, and with those of windows, as parts of one product."""
    rotation = ops.Rotation(torch.ones(num_patches, 36), torch.ones(num_patches, 36))
    parts = torch.zeros(num_patches, 3 * 16 * 72, dtype=_BF16).chunk(3, dim=1)
    q, k, v = (part.unflatten(1, (16, 72)) for part in parts)
    q, k = rotate_heads.rotate_heads(q, rotation), rotate_heads.rotate_heads(k, rotation)
    for each in (num_patches, _LONG):
        full_attention.full_attention(q, k, v, [*range(0, num_patches, each), num_patches], 0.1)


def _metadata(starts: Sequence[int], width: int) -> ops.AttentionMetadata:
    num_seqs, longest = len(starts) - 1, starts[1]
    tables, lengths = torch.zeros(num_seqs, width, dtype=_I32), torch.full((num_seqs,), longest, dtype=_I32)
    return ops.AttentionMetadata(tables, lengths, torch.tensor(starts, dtype=_I32), longest)


def _multiply(num_tokens: int) -> None:
    x, weight = torch.zeros(num_tokens, 4096, dtype=_BF16), torch.ones(4096, dtype=_BF16)
    norm.add_rms_norm(x, norm.rms_norm(x, weight, 1e-6), weight, 1e-6)
    elementwise.gated_activation(torch.zeros(num_tokens, 2 * 14336, dtype=_BF16), "silu")
    # At an address that is not aligned.
    elementwise.gated_activation(torch.zeros(1 + num_tokens * 64, dtype=_BF16)[1:].view(num_tokens, 64), "silu")
    for name in ("Q4_K", "fp8_g128"):
        data = torch.zeros(layouts.packed_shape(name, 64, 4096), dtype=torch.uint8)
        stored = ops.StoredQuantized(data, 64, 4096, name, is_packed=True)
        quantized.quantized_linear(x, stored, weight[:64])
        if name == "fp8_g128":
            with patch.object(fp8_activations, "is_required", lambda: True):
                quantized.quantized_linear(x, stored, weight[:64])
        quantized.gather_quantized_rows(torch.zeros(num_tokens, dtype=_I64), stored, _BF16)
    gate_up = ops.StoredExperts(torch.zeros(128, 64, 64, dtype=_BF16), 128, 64, 64, is_packed=False)
    down = ops.StoredExperts(torch.zeros(128, 64, 32, dtype=_BF16), 128, 64, 32, is_packed=False)
    moe.fused_moe(x[:, :64], torch.zeros(num_tokens, 128), gate_up, down, Routing(top_k=8))
    for choice in (torch.zeros(256), torch.zeros(num_tokens, 6, dtype=_I64)):
        routing.root_logits(torch.zeros(num_tokens, 256), choice, 6)


def _sample(num_rows: int) -> None:
    rows, ids = torch.zeros(num_rows, 2**15), torch.zeros(num_rows, dtype=_I64)
    share = torch.ones(num_rows, dtype=torch.float64)
    columns = torch.ones(num_rows), share, ids, share, share
    logits.log_softmax_stats(rows)
    logits.philox_uniform(ids, ids, ids, 1)
    sampling.sample_tokens(rows, ops.DrawOptions(*columns), torch.full((num_rows, 2**12), 255, dtype=torch.uint8))
    starts = torch.zeros(len(ops.EditStep) * num_rows + 1, dtype=_I64)
    edits.edit_tokens(rows, ops.TokenEdits(ids, starts, ids, torch.ones(num_rows)))


def _move(num_blocks: int) -> None:
    ids, layers = torch.zeros(num_blocks, dtype=_I64), [torch.zeros(3, 131072, dtype=torch.uint8) for _ in range(2)]
    blocks.scatter_blocks(ids, layers, blocks.gather_blocks(ids, layers))


def forms_of(sizes: Sequence[int], widths: Sequence[int]) -> list[str]:
    """Return the kernels of which there is a new form, one for each."""
    found.clear()
    for size in sizes:
        _attend(size, widths)
        _compress(size, widths)
        _multiply(size)
        _sample(size)
        _move(size)
        _see(size)
        _advance(size)
        _scan(size)
    return list(found)


def main() -> None:
    target = GPUTarget("cuda", 90, 32)
    gpu = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    driver.set_active(gpu)
    JITFunction._do_compile = _note_form
    Launcher.launch = _launch_both_ways  # type: ignore[method-assign]
    # So that chunks are among the first forms.
    channel_scan.LONG = 256  # type: ignore[misc]
    with torch.inference_mode():
        first, further = forms_of(FIRST, FIRST_WIDTHS), forms_of(FURTHER, FURTHER_WIDTHS)
    print(json.dumps({"first": first, "further": further}))


if __name__ == "__main__":
    main()
