"""Makes torch's Gloo unavailable, before anything could use it: control and data must go through Paceline alone."""

import torch._C._distributed_c10d as compiled
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
del compiled.ProcessGroupGloo  # what torch's Python wraps: no import of it finds it any more
