"""Paged attention: the seam between a model's layers and the KV cache."""
