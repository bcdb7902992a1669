"""The gated delta rule by the native library."""

from torch import Tensor

from pagewick.kernels import reference_delta
from pagewick.kernels.cpu.binding import DTYPES, Operation, empty, is_plain
from pagewick.kernels.cpu.states import check_parameters, check_rows, check_states, check_status
from pagewick.kernels.cpu.structs import DeltaArgs
from pagewick.kernels.options import AttentionMetadata, DeltaOptions

_GATED_DELTA_NET = Operation("gated_delta_net", DeltaArgs)


def gated_delta_net(
    qkv: Tensor,
    gate: Tensor,
    beta: Tensor,
    decay: Tensor,
    states: Tensor,
    batch: AttentionMetadata,
    options: DeltaOptions,
) -> Tensor:
    """reference_delta.gated_delta_net.

    S is read once for each token: from the state before it, and the change, follows what its query reads. The bits of a
    token's output depend on its own sequence and on the instruction set alone. Raises ValueError for tensors that do
    not fit together, lengths that contradict each other and block ids outside `states`.
    """
    if not all(is_plain(x) for x in (qkv, gate, beta, decay)):
        return reference_delta.gated_delta_net(qkv, gate, beta, decay, states, batch, options)
    num_tokens, columns = len(qkv), options.num_value_heads * options.value_dim
    check_rows(qkv, (num_tokens, options.num_channels), qkv.dtype, "qkv")
    check_rows(gate, (num_tokens, columns), qkv.dtype, "gate")
    check_rows(beta, (num_tokens, options.num_value_heads), qkv.dtype, "beta")
    check_rows(decay, (num_tokens, options.num_decays), qkv.dtype, "decay")
    _check_options(options)
    reference_delta.split_states(states, options)
    check_states(states, batch)
    block_tables, context_lens, cu_seqlens_q, *_ = batch
    out = empty((num_tokens, columns), qkv.dtype)
    args = DeltaArgs(
        qkv=qkv.data_ptr(), gate=gate.data_ptr(), beta=beta.data_ptr(), decay=decay.data_ptr(),
        conv_weight=options.conv_weight.data_ptr(), log_decay=options.log_decay.data_ptr(),
        dt_bias=options.dt_bias.data_ptr(), norm_weight=options.norm_weight.data_ptr(), states=states.data_ptr(),
        block_tables=block_tables.data_ptr(), context_lens=context_lens.data_ptr(),
        cu_seqlens_q=cu_seqlens_q.data_ptr(), out=out.data_ptr(), num_tokens=num_tokens, num_seqs=len(context_lens),
        num_blocks=len(states), block_floats=states.shape[1] // 4, block_table_stride=block_tables.stride(0),
        num_key_heads=options.num_key_heads, num_value_heads=options.num_value_heads, key_dim=options.key_dim,
        value_dim=options.value_dim, conv_width=options.conv_weight.shape[1], qkv_stride=qkv.stride(0),
        gate_stride=gate.stride(0), beta_stride=beta.stride(0), decay_stride=decay.stride(0),
        norm_eps=options.norm_eps, strength=options.strength, decay_bound=options.decay_bound or 0.0,
        has_channel_decay=options.has_channel_decay, has_sigmoid_gate=options.has_sigmoid_gate, dtype=DTYPES[qkv.dtype],
    )  # fmt: skip
    check_status(_GATED_DELTA_NET.run(args), states, "qkv")
    return out


OPERATIONS = {gated_delta_net: DTYPES}


def _check_options(options: DeltaOptions) -> None:
    heads, channels = options.num_value_heads, options.num_channels
    if not 0 < options.num_key_heads <= heads or heads % options.num_key_heads:
        raise ValueError(f"{heads} value heads are no multiple of {options.num_key_heads} key heads")
    if options.has_channel_decay and options.num_key_heads != heads:
        raise ValueError(f"{heads} value heads decay by channel, and there are {options.num_key_heads} key heads")
    if options.decay_bound is not None and not (options.has_channel_decay and options.decay_bound < 0):
        raise ValueError(f"decay_bound must be below 0, not {options.decay_bound}, and decays be by channel")
    if min(options.key_dim, options.value_dim) < 1 or options.conv_weight.dim() != 2:
        raise ValueError(f"heads of {options.key_dim} and {options.value_dim} numbers, or conv_weight is not [C, K]")
    parameters = {
        "conv_weight": (options.conv_weight, (channels, max(1, options.conv_weight.shape[1]))),
        "log_decay": (options.log_decay, (heads,)),
        "dt_bias": (options.dt_bias, (options.num_decays,)),
        "norm_weight": (options.norm_weight, (options.value_dim,)),
    }
    check_parameters(parameters)
