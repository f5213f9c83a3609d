"""The process group backend "paceline" by name: torch finds register() through its entry points, without an import.

Kept apart from paceline.torch, whose import accelerates DistributedDataParallel; this only makes
torch.distributed.init_process_group("paceline") known.
"""


def register():
    """Registers the backend once; does nothing where torch has no distributed package."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, "PACELINE"):
        return
    try:
        dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu"])
    except TypeError:  # torch before 2.0 knows no devices
        dist.Backend.register_backend("paceline", _create, extended_api=True)


def _create(options, _backend_options):
    from paceline.torch._process_group import create

    return create(options)
