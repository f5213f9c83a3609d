"""What `import perseus` does: DistributedDataParallel through Paceline with Perseus's settings and defaults."""

from paceline import __version__
from paceline._activate import activate
from paceline.compat._mpi_environment import supply

activate("perseus")
supply()

__all__ = ["__version__"]
