"""Pallas kernels for NVIDIA GPUs, one file each, importable without a GPU."""
