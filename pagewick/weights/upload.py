"""Upload: weights from mapped files to a GPU, through two pinned buffers of a fixed size.

While the GPU fetches the rows in one buffer, the host copies the next rows from the page cache to the other. No tensor
is ever in host memory as a whole, apart from the file's pages, and a rank uploads only its own rows.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from pagewick.kernels.copies import CopyStream, CudaCopyStream, Mark
from pagewick.quantization.at_load_memory import PIECE_BYTES


class Upload:
    """Brings rows to a device. stream: does the copies. num_bytes: of each of the two buffers."""

    def __init__(
        self, device: torch.device, stream: CopyStream, num_bytes: int = PIECE_BYTES, *, is_pinned: bool = True
    ) -> None:
        self._device, self._stream = device, stream
        self.num_bytes = num_bytes
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]
        self._marks: list[Mark | None] = [None, None]
        self._turn = 0

    @classmethod
    def to_gpu(cls, device: torch.device) -> Upload | None:
        """Return an upload to a CUDA device; None for other devices, whose memory is the host's."""
        return cls(device, CudaCopyStream(device)) if device.type == "cuda" else None

    def take(self, rows: Tensor) -> Tensor:
        """Return rows [n, ...] in memory of the device, for operations that are called after this."""
        row_bytes = prod(rows.shape[1:]) * rows.element_size()
        if rows.device == self._device or not rows.numel() or row_bytes > self.num_bytes:
            return rows.to(self._device)
        uploaded = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)
        # The memory may have belonged to a tensor that operations still read.
        self._stream.wait_for_current()
        step = self.num_bytes // row_bytes
        for first in range(0, len(rows), step):
            self._copy(uploaded[first : first + step], rows[first : first + step])
        self._stream.mark().wait_on_device()
        return uploaded

    def _copy(self, target: Tensor, rows: Tensor) -> None:
        buffer = self._buffers[self._turn][: target.nbytes].view(rows.dtype).view(rows.shape)
        if (mark := self._marks[self._turn]) is not None:
            mark.wait_on_host()
        buffer.copy_(rows)
        self._stream.copy(target, buffer)
        self._marks[self._turn] = self._stream.mark()
        self._turn = 1 - self._turn
