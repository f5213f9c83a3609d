"""Communicators end with the process group that they were made for."""

import functools

import torch.distributed as dist

from paceline.torch import _endpoints


def patch():
    """Wraps destroy_process_group(), under both of its names."""
    original = dist.distributed_c10d.destroy_process_group
    if getattr(original, "_paceline_patched", False):
        return

    @functools.wraps(original)
    def destroy_process_group(group=None):
        whole = group is None or group is dist.group.WORLD
        _endpoints.close(None if whole else group)
        original(group)

    destroy_process_group._paceline_patched = True
    dist.distributed_c10d.destroy_process_group = destroy_process_group
    dist.destroy_process_group = destroy_process_group
