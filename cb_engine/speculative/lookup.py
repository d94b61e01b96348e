"""Which lookup serves a method. The only place where they are named."""

from __future__ import annotations

from cb_engine.speculative.ngram import NgramProposer
from cb_engine.speculative.proposer import Proposer
from cb_engine.speculative.suffix import SuffixProposer
from cb_engine.speculative_config import SpeculativeConfig


def make_lookup(settings: SpeculativeConfig) -> Proposer:
    """The proposer of a method that needs no model."""
    return NgramProposer(*settings.lookup_range) if settings.method == "ngram" else SuffixProposer()
