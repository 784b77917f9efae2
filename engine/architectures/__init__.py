"""Which checkpoints the engine can run, and how a folder of one becomes a Runner."""

from engine.architectures.adapters import Adapter, adapted
from engine.architectures.architecture import Architecture
from engine.architectures.decoders import Decoders
from engine.architectures.runner import Runner, load_checkpoint
from engine.architectures.table import ARCHITECTURES

__all__ = ["ARCHITECTURES", "Adapter", "Architecture", "Decoders", "Runner", "adapted", "load_checkpoint"]
