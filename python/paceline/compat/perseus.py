"""What `import perseus` does: DistributedDataParallel through Paceline with Perseus's settings and defaults."""

from paceline import __version__
from paceline._activate import activate
from paceline._launch import supply_at_import

activate("perseus")
supply_at_import()

__all__ = ["__version__"]
