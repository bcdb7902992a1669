"""Operations on parallel residual streams by the native library."""

from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import DTYPES, Operation, address, as_rows, empty, is_plain
from pagewick.kernels.cpu.structs import MAX_STREAMS, MagnitudeArgs, StreamsArgs

_MIX = Operation("mix_streams", StreamsArgs)
_CORRECT = Operation("correct_streams", StreamsArgs)
_MATCH = Operation("match_magnitude", MagnitudeArgs)


def mix_streams(active: Tensor, others: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """reference.mix_streams. Raises ValueError for tensors that do not fit together."""
    if not _are_served(active, others, coefficients):
        return reference.mix_streams(active, others, coefficients)
    return _run(_MIX, active, others, None, coefficients, (1 + others.shape[1]) ** 2)


def correct_streams(active: Tensor, others: Tensor, computed: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """reference.correct_streams. Raises ValueError for tensors that do not fit together."""
    if not _are_served(active, others, computed, coefficients):
        return reference.correct_streams(active, others, computed, coefficients)
    if computed.shape != active.shape:
        raise ValueError(f"computed {list(computed.shape)} and active {list(active.shape)} differ in shape")
    return _run(_CORRECT, active, others, computed, coefficients, 1 + others.shape[1])


def match_magnitude(x: Tensor, target: Tensor, least: float) -> Tensor:
    """reference.match_magnitude. Raises ValueError for tensors that do not fit together."""
    if not (x.numel() and x.dtype == target.dtype and is_plain(x) and is_plain(target)):
        return reference.match_magnitude(x, target, least)
    if x.dtype not in DTYPES or target.dim() != 2 or x.shape[:1] != target.shape[:1] or x.shape[-1] != target.shape[1]:
        raise ValueError(f"x {x.dtype} {list(x.shape)} and target {list(target.shape)} do not fit together")
    out = empty(x.shape, x.dtype)
    rows, stride = as_rows(x)
    targets, target_stride = as_rows(target)
    args = MagnitudeArgs(
        x=rows.data_ptr(), target=targets.data_ptr(), out=out.data_ptr(), num_rows=len(rows), size=x.shape[-1],
        repeat=len(rows) // len(targets), x_stride=stride, target_stride=target_stride, least=least,
        dtype=DTYPES[x.dtype],
    )  # fmt: skip
    _MATCH.run(args)
    return out


OPERATIONS = dict.fromkeys((mix_streams, correct_streams, match_magnitude), DTYPES)


def _are_served(active: Tensor, others: Tensor, *more: Tensor) -> bool:
    is_small = active.numel() > 0 and others.dim() == 3 and 1 <= others.shape[1] < MAX_STREAMS
    return is_small and all(one.dtype == active.dtype and is_plain(one) for one in (active, others, *more))


def _run(
    operation: Operation[StreamsArgs],
    active: Tensor,
    others: Tensor,
    computed: Tensor | None,
    coefficients: Tensor,
    num_coefficients: int,
) -> tuple[Tensor, Tensor]:
    if active.dtype not in DTYPES:
        raise ValueError(f"no native streams of {active.dtype}")
    num_tokens, size = active.shape
    if (others.shape[0], others.shape[2]) != (num_tokens, size) or coefficients.shape != (num_tokens, num_coefficients):
        raise ValueError(
            f"active {list(active.shape)}, others {list(others.shape)} and coefficients {list(coefficients.shape)} "
            "do not fit together"
        )
    out_active, out_others = empty(active.shape, active.dtype), empty(others.shape, active.dtype)
    rows, stride = as_rows(active)
    computed_rows, computed_stride = (None, 0) if computed is None else as_rows(computed)
    others, coefficients = others.contiguous(), coefficients.contiguous()
    args = StreamsArgs(
        active=rows.data_ptr(), others=others.data_ptr(), computed=address(computed_rows),
        coefficients=coefficients.data_ptr(), out_active=out_active.data_ptr(), out_others=out_others.data_ptr(),
        num_tokens=num_tokens, num_others=others.shape[1], size=size, active_stride=stride,
        computed_stride=computed_stride, dtype=DTYPES[active.dtype],
    )  # fmt: skip
    operation.run(args)
    return out_active, out_others
