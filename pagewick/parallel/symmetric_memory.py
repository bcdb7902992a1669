"""SmallSums: sums of small tensors between the GPUs of a machine, through PyTorch's symmetric memory over NVLink.

In a step of few tokens, a sum moves some kilobytes, and NCCL's handshakes take longer than the bytes. With symmetric
memory every GPU writes its part into a buffer that the others map, and a kernel on each reads all parts and adds them
in the order of the ranks. So all GPUs get the same bits, wherever a token is in its batch; each addition is rounded to
the tensor's dtype. The kernel can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pagewick.log import get_logger

logger = get_logger(__name__)

# Above this size, every GPU would read too much: NCCL moves each byte fewer times.
SMALL_BYTES: Final = 512 * 2**10
MAX_RANKS: Final = 8
# Kernels read and add 16 bytes at a time.
_ALIGNMENT: Final = 16
_DTYPES: Final = (torch.bfloat16, torch.float32)


class SharedMemory(Protocol):
    """torch.distributed._symmetric_memory, and its operation."""

    def buffer(self, num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
        """Allocate bytes that all ranks of the group map. All must call this. Raises RuntimeError."""
        ...

    def add_parts(self, part: Tensor, group: dist.ProcessGroup, out: Tensor) -> None:
        """Write to `out` the sum of all ranks' parts, each of which lies in the rank's buffer."""
        ...


class TorchSharedMemory:
    """The SharedMemory of an installed PyTorch, whose functions are not yet stable. Raises ImportError without them."""

    def __init__(self) -> None:
        import torch.distributed._symmetric_memory as memory

        if not hasattr(torch.ops.symm_mem, "one_shot_all_reduce_out"):
            raise ImportError("this PyTorch has no sums over symmetric memory")
        self._memory: Any = memory

    def buffer(self, num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> Tensor:
        made: Tensor = self._memory.empty(num_bytes, dtype=torch.uint8, device=device)
        self._memory.rendezvous(made, group)
        return made

    def add_parts(self, part: Tensor, group: dist.ProcessGroup, out: Tensor) -> None:
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", group.group_name, out)


class SmallSums:
    """The sums of one tensor group."""

    def __init__(self, memory: SharedMemory, buffer: Tensor, group: dist.ProcessGroup) -> None:
        self._memory, self._buffer, self._group = memory, buffer, group

    def serves(self, tensor: Tensor) -> bool:
        """Whether all_reduce takes the tensor. All ranks give the same answer, as they have the same shapes."""
        return (
            tensor.dtype in _DTYPES
            and tensor.is_contiguous()
            and tensor.nbytes % _ALIGNMENT == 0
            and tensor.nbytes <= self._buffer.nbytes
        )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with the sum over the group; return it."""
        part = self._buffer[: tensor.nbytes].view(tensor.dtype)
        part.copy_(tensor.view(-1))
        self._memory.add_parts(part, self._group, tensor.view(-1))
        return tensor


def open_small_sums(
    device: torch.device, group: dist.ProcessGroup, control_group: dist.ProcessGroup, *, is_single_host: bool
) -> SmallSums | None:
    """Return the sums of a tensor group of GPUs, or None if some of its ranks cannot have them; log which it is.

    control_group: all ranks, every one of which must call this.
    """
    memory: SharedMemory | None = None
    reason = _why_not(device, dist.get_world_size(group), is_single_host=is_single_host)
    if not reason:
        try:
            memory = TorchSharedMemory()
        except ImportError as error:
            reason = str(error)
    sums = None
    if _all_agree(memory is not None, control_group) and memory is not None:
        try:
            sums = SmallSums(memory, memory.buffer(SMALL_BYTES, device, group), group)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:100]
    if not _all_agree(sums is not None, control_group):
        sums = None
    if dist.get_rank(control_group) == 0:
        used = f"NCCL ({reason or 'another rank cannot share memory'})" if sums is None else "symmetric memory"
        logger.info("small sums between ranks: %s", used)
    return sums


def _why_not(device: torch.device, num_ranks: int, *, is_single_host: bool) -> str:
    """Return why this rank's GPU cannot have small sums; empty if it can."""
    if not is_single_host:
        return "the ranks are on several machines"
    if num_ranks > MAX_RANKS:
        return f"there are more than {MAX_RANKS} ranks"
    if torch.version.hip is not None:
        return "the GPUs are AMD's"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if (num_visible := torch.cuda.device_count()) < num_ranks:
        # A launcher shows each rank its own GPU only. Which links that has to the others cannot be asked then.
        return f"a rank sees {num_visible} of {num_ranks} GPUs"
    return "" if _has_nvlink(device.index or 0, num_ranks) else "there is no NVLink between all GPUs"


def _has_nvlink(own: int, num_ranks: int) -> bool:
    """Whether this GPU is connected with those of the other ranks. PyTorch's function for this is not public."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        links = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[own]
    except (ImportError, RuntimeError, IndexError):
        return False
    return all(links[other] > 0 for other in range(num_ranks) if other != own)


def _all_agree(answer: bool, control_group: dist.ProcessGroup) -> bool:
    """Whether all ranks answer yes; every rank must call this."""
    answers = torch.tensor([int(answer)])
    dist.all_reduce(answers, op=dist.ReduceOp.MIN, group=control_group)
    return bool(answers.item())
