"""Proposers that run a model on the device: a draft model, the target's own first layers, an EAGLE-3 head."""
