"""Each method that needs no model gets the proposer it names, with the caller's settings."""

from __future__ import annotations

from cb_engine.request import Request
from cb_engine.sampling_params import SamplingParams
from cb_engine.speculative.lookup import make_lookup
from cb_engine.speculative.ngram import NgramProposer
from cb_engine.speculative.proposer import NO_DRAFT, Draft, DraftAsk
from cb_engine.speculative.suffix import SuffixProposer
from cb_engine.speculative_config import SpeculativeConfig

TEXT = [1, 2, 3, 4, 9, 2, 3, 4]


def first_draft(settings: SpeculativeConfig) -> Draft:
    request = Request("r", TEXT, SamplingParams(), max_tokens=9)
    (draft,) = make_lookup(settings).propose([DraftAsk(request, 2)])
    return draft


def test_ngram_looks_for_the_sizes_that_were_asked_for() -> None:
    assert isinstance(make_lookup(SpeculativeConfig(method="ngram")), NgramProposer)
    assert first_draft(SpeculativeConfig(method="ngram")) == Draft((9, 2), 3)
    assert first_draft(SpeculativeConfig(method="ngram", prompt_lookup_max=1)) == Draft((9, 2), 1)
    assert first_draft(SpeculativeConfig(method="ngram", prompt_lookup_max=2)) == Draft((9, 2), 2)
    assert first_draft(SpeculativeConfig(method="ngram", prompt_lookup_min=4)) is NO_DRAFT


def test_suffix() -> None:
    assert isinstance(make_lookup(SpeculativeConfig(method="suffix")), SuffixProposer)
    assert first_draft(SpeculativeConfig(method="suffix")).token_ids == (9, 2)
