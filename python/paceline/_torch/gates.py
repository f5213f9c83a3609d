"""Fused optimizers need no wait of the host: they read on the device whether their gradients have arrived.

torch's fused SGD, Adam and AdamW take `found_inf`, a number on the device at which their kernels change nothing: it is
meant for GradScaler. Here it is the path's gate (paceline_cuda_gate), which becomes 1 before a fault lets the stream
go on.
"""

import ctypes

import torch

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def fits(optimizer, kind=None):
    """Whether this optimizer's kernels look at found_inf, and nobody else has set it. kind: its class, if derived."""
    return (
        (kind or type(optimizer)) in _KINDS
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and not hasattr(optimizer, "found_inf")
        and not hasattr(optimizer, "grad_scale")
        and all(group.get("fused") and _on_device(group["params"]) for group in optimizer.param_groups)
    )


def _on_device(parameters):
    return all(p.device.type == "cuda" or _CPU_STANDS_IN for p in parameters)


#: For tests without a GPU: torch's fused kernels for CPUs read found_inf too.
_CPU_STANDS_IN = False


class _Word:
    """A float32 at an address, as CUDA tensors are described to each other."""

    def __init__(self, address):
        self.__cuda_array_interface__ = {"shape": (), "typestr": "<f4", "data": (address, False), "version": 2}


def tensor_at(address, device):
    """The float32 at a device address (pinned memory of the host is one) as a tensor that shares it."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_float * 1).from_address(address), dtype=torch.float32)[0]
    return torch.as_tensor(_Word(address), device=device)
