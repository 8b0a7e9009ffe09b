"""Fused operations: one function each, with a reference in jax.numpy and the choice of kernel.

Shape suffixes, here and in `jaxforge.models`: B rows, S sequence, D model width, H query heads, G key/value heads, K
head width, F feed-forward width, V vocabulary, L layers, P image patches, N visual tokens, C values of a patch.
"""
