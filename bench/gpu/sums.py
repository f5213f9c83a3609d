"""Whether an all-reduce has added up what it was given, as closely as its codec lets it."""

from __future__ import annotations

import torch

#: Two roundings of a value, on its way to the other nodes and of the sum on its way back, beside float32's own.
_ROUNDED = {"exact": 1e-6, "fp16": 2 / 1024, "bf16": 2 / 128}


def wrong_elements(codec: str, result, expected, magnitudes, size: int, peak: float) -> int:
    """How many elements of a sum over `size` ranks are further from `expected` than the codec lets them be.

    magnitudes: the sum of the ranks' absolute values; peak: the largest of these values. An int8 element is off by
    half a step of its block's scale, as is the residual that it carries along, in each of two encodings. Top-k sends
    few elements and the others later: no finite element by itself is wrong.
    """
    if codec == "topk":
        return int((~torch.isfinite(result)).sum())
    if codec == "int8":
        allowed = 2 * size * peak / 120
    else:
        allowed = magnitudes * _ROUNDED[codec] + 1e-6
    # Written so that NaN is wrong.
    return int((~((result - expected).abs() <= allowed)).sum())


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
