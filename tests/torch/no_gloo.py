"""Makes torch's Gloo unavailable, before anything could use it: control and data must go through Paceline alone."""

import torch.distributed.distributed_c10d as c10d


class _Gone:
    def __init__(self, *_arguments, **_options):
        raise AssertionError("something used torch's Gloo")

    def __getattr__(self, name):
        raise AssertionError("something used torch's Gloo")


c10d._GLOO_AVAILABLE = False
c10d.ProcessGroupGloo = _Gone
if hasattr(c10d, "Backend") and hasattr(c10d.Backend, "_plugins"):
    c10d.Backend._plugins.pop("GLOO", None)
