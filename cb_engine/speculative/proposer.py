"""Who guesses the next tokens of a request, and what a guess is.

Owns the nouns `DraftAsk` and `Draft` and the protocol `Proposer`. Knows no scheduler and no device: proposers that
look tokens up live beside this file, those that run a model in `cb_engine/runner/drafters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cb_engine.request import Request


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """One request that may be given drafts: the tokens that follow its last one, at most `max_tokens` (>= 1)."""

    request: Request
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Draft:
    """What a proposer expects to follow, none if it has no idea.

    Attributes:
        token_ids: the guesses, in order.
        kind: how sure the proposer is, in a measure of its own (the length of a match, for example): how often drafts
            of a kind are right is learned for each kind apart.
    """

    token_ids: tuple[int, ...] = ()
    kind: int = 0


NO_DRAFT = Draft()


class Proposer(Protocol):
    """Guesses tokens. What it guesses may be wrong at will: no output depends on it, only the speed does.

    Attributes:
        catch_up_seconds: what of the latest `propose` went to texts rather than to drafts: whoever drafts with a model
            reads a prompt once, however many tokens it drafts afterwards.
    """

    catch_up_seconds: float

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """Returns a draft for each ask, in order, of at most `max_tokens` tokens.

        The request's `token_ids` are read, never changed; they have grown since the last call, or are another
        request's altogether.
        """

    def forget(self, request: Request) -> None:
        """The request has ended; it will not be asked for again."""
