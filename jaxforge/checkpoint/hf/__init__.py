"""Hugging Face folders: one weight map per family, read and written tensor by tensor."""

from jaxforge.checkpoint.hf.model import HFArrays, copy_companions, export, exported_config, load_parameters
from jaxforge.config.hf_config import Architecture, read_architecture

__all__ = [
    "Architecture",
    "HFArrays",
    "copy_companions",
    "export",
    "exported_config",
    "load_parameters",
    "read_architecture",
]
