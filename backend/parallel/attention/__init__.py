"""Attention under the parallel methods: the hook, USP, its kernels and K/V buffers."""
