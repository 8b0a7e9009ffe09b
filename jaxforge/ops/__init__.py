"""Fused operations: one function each, with a reference in jax.numpy and the choice of kernel.

Shape suffixes, here and in `jaxforge.models`: B rows, S sequence, D model width, H query heads, G key/value heads, K
head width, R rotary frequencies (K / 2; in attention: queries per key head), F feed-forward width, E output width, V
vocabulary, L layers, P image patches, N visual tokens, C values of a patch, J DeepStack features or table rows, T
tokens flattened (in attention: keys), M microbatches.  A small letter is one device's part of a dimension.
"""
