"""Gradients as matrices, and the bases of what PowerSGD sends of them."""

from __future__ import annotations

from zlib import crc32

import torch

MIN_COMPRESSION = 2  # a matrix is sent whole where two thin ones have more than 1/2 of its size


def is_compressed(parameter: torch.Tensor, rank: int) -> bool:
    """Whether gradients of a parameter should travel as two thin matrices with ``rank`` columns."""
    if parameter.dim() < 2:
        return False
    rows, columns = as_matrix(like_gradient(parameter, "meta")).shape
    return (rows + columns) * rank * MIN_COMPRESSION < rows * columns


def like_gradient(parameter: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return zeros in the shape of ``parameter``, and in the layout that DDP's buckets have.

    It is that of the parameter; but where that has gaps in memory, the usual one.
    """
    zeros = torch.zeros_like(parameter, device=device, requires_grad=False)
    return zeros if zeros.stride() == parameter.stride() else zeros.contiguous()


def as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view (rows, columns) in the order of memory, the outermost dimension as rows.

    Another memory format (channels_last) permutes columns, which changes no low-rank approximation.

    Args:
        tensor: Of two dimensions at least, without gaps in memory.
    """
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).flatten(1)


def orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """Return orthonormal rows that span what ``rows`` (few, long) span, and more if that is less.

    By Householder reflections, which make sense of zeros too; NaN for NaN.
    """
    # LAPACK keeps columns together, so this transposes nothing in memory. It knows no halves.
    precise = rows.to(torch.promote_types(rows.dtype, torch.float32))
    spanned: torch.Tensor = torch.linalg.qr(precise.t()).Q.t()
    return spanned.to(rows.dtype)


def first_basis(name: str, rank: int, columns: int) -> torch.Tensor:
    """Return orthonormal rows (rank, columns) to begin with, the same for a name on every rank."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return orthonormal(torch.randn(rank, columns, generator=generator))
