"""Checkpoints: training state in files that are complete or absent."""

from strategies.checkpoint.boxes import Box, Slice
from strategies.checkpoint.checkpoint import Checkpoint
from strategies.checkpoint.per_rank import PerRank
from strategies.checkpoint.saver import Saver

__all__ = ["Box", "Checkpoint", "PerRank", "Saver", "Slice"]
