"""Checkpoints of a run: saved while it trains, checked before they are read, at any layout."""

from jaxforge.checkpoint.manager import CheckpointManager

__all__ = ["CheckpointManager"]
