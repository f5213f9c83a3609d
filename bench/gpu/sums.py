"""Whether ranks hold the same numbers."""

from __future__ import annotations

import torch


def checksum(tensors) -> tuple[int, int]:
    """Two numbers of all bits: their sum, and their sum by place. On the device, for models have gigabytes."""
    plain = placed = 0
    stretch = 1 << 24
    for tensor in tensors:
        words = tensor.detach().contiguous().view(-1).view(torch.int32)
        for first in range(0, words.numel(), stretch):
            part = words[first : first + stretch].to(torch.int64)
            place = torch.arange(first + 1, first + 1 + part.numel(), device=part.device)
            plain += int(part.sum())
            placed = 31 * placed + int((part * place).sum())
    return plain, placed % (1 << 64)
