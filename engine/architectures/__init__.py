"""Which checkpoints the engine can run, and how a folder of one becomes a Runner."""

from engine.architectures.architecture import Architecture
from engine.architectures.runner import Runner, load_checkpoint
from engine.architectures.table import ARCHITECTURES

__all__ = ["ARCHITECTURES", "Architecture", "Runner", "load_checkpoint"]
