"""What a rank may take of memory, and what it has taken."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_MIB = 2**20
_SHARE = 0.95  # of a device: the allocator cannot use every gap, and NCCL wants something, too
_RESET = Path("/proc/self/clear_refs")  # a 5 resets the peak
_STATUS = Path("/proc/self/status")
# How libraries say that they found no memory, where torch does not say it for them.
_SIGNS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "can't allocate memory")


class Memory:
    """The memory of one rank.

    On CUDA it is what torch's allocator has taken of the device, and the allocator keeps to the
    limit. On the CPU it is the resident memory of the process, as Linux counts it (``VmHWM``):
    nothing keeps a trial from going beyond the limit, which then is noticed.
    """

    def __init__(self, device: torch.device, limit_mb: float | None) -> None:
        """Note the limit.

        Args:
            device: Of this rank.
            limit_mb: In MiB; None for nearly all of a CUDA device.

        Raises:
            ValueError: If there is no limit on the CPU, or memory cannot be measured here.
        """
        self._device = device
        self.limit_mb = limit_mb or 0.0
        if device.type == "cuda":
            total_mb = torch.cuda.get_device_properties(device).total_memory / _MIB
            self.limit_mb = limit_mb or _SHARE * total_mb
            self._fraction = min(1.0, self.limit_mb / total_mb)
            return
        if limit_mb is None:
            raise ValueError(
                "find_micro_batch_size on the CPU without memory_limit_mb: a process that takes "
                "more memory than there is gets no error that one could catch, the kernel ends it; "
                "give the MiB that a rank may take (of resident memory, the whole process)"
            )
        if sys.platform != "linux" or not _RESET.exists():
            raise ValueError(
                "find_micro_batch_size on the CPU measures memory by /proc/self/clear_refs, and "
                "this system has none; use Linux, or CUDA"
            )

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Have the allocator of a device keep to the limit meanwhile."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_per_process_memory_fraction(self._fraction, self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)

    def begin(self) -> None:
        """Give back what nobody uses, and look for a new peak from now on."""
        gc.collect(1)  # what a trial has left is young
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # it is glibc's
            trim(0)
        _RESET.write_text("5")

    def peak_mb(self) -> float:
        """Return the most that was taken since `begin`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device) / _MIB
        [line] = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there was no memory left."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(s in str(error) for s in _SIGNS)
