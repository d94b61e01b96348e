"""Faster modules for the shadow tree: the same results from fewer and larger operations."""

from cb_engine.runner.fusion.fuse import Fusion, fused_shadow, packed_shadow

__all__ = ["Fusion", "fused_shadow", "packed_shadow"]
