"""The scans of Mamba-2 and Mamba-1, and short convolutions, by the native library."""

from torch import Tensor

from pagewick.kernels import reference_scan
from pagewick.kernels.cpu.binding import DTYPES, Operation, address, empty, is_plain
from pagewick.kernels.cpu.states import check_parameters, check_rows, check_states, check_status
from pagewick.kernels.cpu.structs import ChannelScanArgs, ConvolutionArgs, ScanArgs
from pagewick.kernels.options import AttentionMetadata, ChannelScanOptions, ConvolutionOptions, ScanOptions

_SELECTIVE_SCAN = Operation("selective_scan", ScanArgs)
_SHORT_CONVOLUTION = Operation("short_convolution", ConvolutionArgs)
_CHANNEL_SCAN = Operation("channel_scan", ChannelScanArgs)


def selective_scan(
    xbc: Tensor, gate: Tensor, dt: Tensor, states: Tensor, batch: AttentionMetadata, options: ScanOptions
) -> Tensor:
    """reference_scan.selective_scan.

    A pass over S takes two tokens, one after the other. The bits of a token's output depend on its own sequence and on
    the instruction set alone. Raises ValueError for tensors that do not fit together, lengths that contradict each
    other and block ids outside `states`.
    """
    if not all(is_plain(x) for x in (xbc, gate, dt)):
        return reference_scan.selective_scan(xbc, gate, dt, states, batch, options)
    num_tokens, columns = len(xbc), options.num_heads * options.head_dim
    check_rows(xbc, (num_tokens, options.num_channels), xbc.dtype, "xbc")
    check_rows(gate, (num_tokens, columns), xbc.dtype, "gate")
    check_rows(dt, (num_tokens, options.num_heads), xbc.dtype, "dt")
    _check_scan_options(options)
    reference_scan.split_scan_states(states, options)
    check_states(states, batch)
    block_tables, context_lens, cu_seqlens_q, *_ = batch
    out = empty((num_tokens, columns), xbc.dtype)
    args = ScanArgs(
        xbc=xbc.data_ptr(), gate=gate.data_ptr(), dt=dt.data_ptr(), conv_weight=options.conv_weight.data_ptr(),
        conv_bias=options.conv_bias.data_ptr(), log_decay=options.log_decay.data_ptr(), skip=options.skip.data_ptr(),
        dt_bias=options.dt_bias.data_ptr(), norm_weight=address(options.norm_weight), states=states.data_ptr(),
        block_tables=block_tables.data_ptr(), context_lens=context_lens.data_ptr(),
        cu_seqlens_q=cu_seqlens_q.data_ptr(), out=out.data_ptr(), num_tokens=num_tokens, num_seqs=len(context_lens),
        num_blocks=len(states), block_floats=states.shape[1] // 4, block_table_stride=block_tables.stride(0),
        num_heads=options.num_heads, num_groups=options.num_groups, head_dim=options.head_dim,
        state_dim=options.state_dim, conv_width=options.conv_weight.shape[1], num_norm_groups=options.num_norm_groups,
        xbc_stride=xbc.stride(0), gate_stride=gate.stride(0), dt_stride=dt.stride(0), norm_eps=options.norm_eps,
        gate_scale=options.gate_scale, dt_scale=options.dt_scale, is_norm_first=options.is_norm_first,
        dtype=DTYPES[xbc.dtype],
    )  # fmt: skip
    check_status(_SELECTIVE_SCAN.run(args), states, "xbc")
    return out


def short_convolution(bcx: Tensor, states: Tensor, batch: AttentionMetadata, options: ConvolutionOptions) -> Tensor:
    """reference_scan.short_convolution. Bits and errors are as in selective_scan."""
    if not is_plain(bcx):
        return reference_scan.short_convolution(bcx, states, batch, options)
    num_tokens, num_channels = len(bcx), len(options.weight)
    if options.weight.dim() != 2 or options.weight.numel() == 0:
        raise ValueError(f"weight must be [D, K], not {list(options.weight.shape)}")
    check_rows(bcx, (num_tokens, (3 if options.has_gates else 1) * num_channels), bcx.dtype, "bcx")
    check_parameters({"weight": (options.weight, options.weight.shape)})
    if options.bias is not None:
        check_parameters({"bias": (options.bias, (num_channels,))})
    reference_scan.split_convolution_states(states, options)
    check_states(states, batch)
    block_tables, context_lens, cu_seqlens_q, *_ = batch
    out = empty((num_tokens, num_channels), bcx.dtype)
    args = ConvolutionArgs(
        bcx=bcx.data_ptr(), weight=options.weight.data_ptr(), bias=address(options.bias), states=states.data_ptr(),
        block_tables=block_tables.data_ptr(), context_lens=context_lens.data_ptr(),
        cu_seqlens_q=cu_seqlens_q.data_ptr(), out=out.data_ptr(), num_tokens=num_tokens, num_seqs=len(context_lens),
        num_blocks=len(states), block_floats=states.shape[1] // 4, block_table_stride=block_tables.stride(0),
        num_channels=num_channels, conv_width=options.weight.shape[1], bcx_stride=bcx.stride(0),
        has_gates=options.has_gates, dtype=DTYPES[bcx.dtype],
    )  # fmt: skip
    check_status(_SHORT_CONVOLUTION.run(args), states, "bcx")
    return out


def channel_scan(
    x: Tensor,
    gate: Tensor,
    dt: Tensor,
    keys: Tensor,
    queries: Tensor,
    states: Tensor,
    batch: AttentionMetadata,
    options: ChannelScanOptions,
) -> Tensor:
    """reference_scan.channel_scan. Bits and errors are as in selective_scan."""
    if not all(is_plain(each) for each in (x, gate, dt, keys, queries)):
        return reference_scan.channel_scan(x, gate, dt, keys, queries, states, batch, options)
    if options.log_decay.dim() != 2 or options.log_decay.numel() == 0 or options.state_offset < 0:
        raise ValueError(f"log_decay must be [N, D], not {list(options.log_decay.shape)}, and state_offset at least 0")
    num_tokens, (state_dim, num_channels) = len(x), options.log_decay.shape
    for name, rows in (("x", x), ("gate", gate), ("dt", dt)):
        check_rows(rows, (num_tokens, num_channels), x.dtype, name)
    for name, rows in (("keys", keys), ("queries", queries)):
        check_rows(rows, (num_tokens, state_dim), x.dtype, name)
    check_parameters({
        "log_decay": (options.log_decay, (state_dim, num_channels)), "skip": (options.skip, (num_channels,)),
        "dt_bias": (options.dt_bias, (num_channels,)),
    })  # fmt: skip
    reference_scan.split_channel_states(states, options)
    check_states(states, batch)
    block_tables, context_lens, cu_seqlens_q, *_ = batch
    out = empty((num_tokens, num_channels), x.dtype)
    args = ChannelScanArgs(
        x=x.data_ptr(), gate=gate.data_ptr(), dt=dt.data_ptr(), keys=keys.data_ptr(), queries=queries.data_ptr(),
        log_decay=options.log_decay.data_ptr(), skip=options.skip.data_ptr(), dt_bias=options.dt_bias.data_ptr(),
        states=states.data_ptr(), block_tables=block_tables.data_ptr(), context_lens=context_lens.data_ptr(),
        cu_seqlens_q=cu_seqlens_q.data_ptr(), out=out.data_ptr(), num_tokens=num_tokens, num_seqs=len(context_lens),
        num_blocks=len(states), block_floats=states.shape[1] // 4, block_table_stride=block_tables.stride(0),
        num_channels=num_channels, state_dim=state_dim, state_offset=options.state_offset, x_stride=x.stride(0),
        gate_stride=gate.stride(0), dt_stride=dt.stride(0), key_stride=keys.stride(0), query_stride=queries.stride(0),
        dtype=DTYPES[x.dtype],
    )  # fmt: skip
    check_status(_CHANNEL_SCAN.run(args), states, "x")
    return out


OPERATIONS = {selective_scan: DTYPES, short_convolution: DTYPES, channel_scan: DTYPES}


def _check_scan_options(options: ScanOptions) -> None:
    heads, channels, columns = options.num_heads, options.num_channels, options.num_heads * options.head_dim
    if not 0 < options.num_groups <= heads or heads % options.num_groups:
        raise ValueError(f"{heads} heads are no multiple of {options.num_groups} groups")
    if min(options.head_dim, options.state_dim) < 1 or options.conv_weight.dim() != 2:
        raise ValueError(f"heads of {options.head_dim} and {options.state_dim} numbers, or conv_weight is not [C, K]")
    if options.num_norm_groups < 1 or columns % options.num_norm_groups:
        raise ValueError(f"{columns} numbers do not have {options.num_norm_groups} equal parts")
    parameters = {
        "conv_weight": (options.conv_weight, (channels, max(1, options.conv_weight.shape[1]))),
        "conv_bias": (options.conv_bias, (channels,)),
        "log_decay": (options.log_decay, (heads,)),
        "skip": (options.skip, (heads,)),
        "dt_bias": (options.dt_bias, (heads,)),
    }
    if options.norm_weight is not None:
        parameters["norm_weight"] = (options.norm_weight, (columns,))
    check_parameters(parameters)
