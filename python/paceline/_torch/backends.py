"""What of torch's carries the tensors of a type of device within a process group."""

import torch


def of(process_group, device):
    """The backend for "cpu" or "cuda"; None where there is none, and before torch 2, whose process groups are one."""
    try:
        return process_group._get_backend(torch.device(device))
    except (AttributeError, RuntimeError):
        return None
