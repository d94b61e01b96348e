"""Speculation without a device: proposers that look tokens up, and the switch that decides whether drafts pay."""
