"""From requests to what callers receive: text, stop strings, snapshots.

Owns the text state of running requests. Changes no request: a stop string found in the text is reported to the
Scheduler, which ends the request. Runs on the engine thread, after the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cb_engine.detokenizer import IncrementalDetokenizer, StopChecker
from cb_engine.outputs import GenerationOutput, RequestStatus
from cb_engine.request import Request, Status
from cb_engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """What has gone out of a request that wants deltas."""

    num_tokens: int = 0
    num_chars: int = 0
    is_first: bool = True


@dataclass(slots=True)
class _Text:
    """A request's text so far. `num_seen` tokens of its output are in it."""

    detokenizer: IncrementalDetokenizer
    stops: StopChecker
    text: str = ""
    num_seen: int = 0


class OutputProcessor:
    """See the module docstring. Without a tokenizer there is no text, and nothing is kept."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any | None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._texts: dict[str, _Text] = {}
        self._sent: dict[str, _Sent] = {}  # of those that want deltas

    def process(self, changed: Iterable[Request]) -> list[GenerationOutput]:
        """Returns a snapshot of every changed request that streams, and the terminal output of every ended one.

        Text is only worked out where somebody needs it before the end: for stop strings and for streams.
        """
        outputs: list[GenerationOutput] = []
        for request in changed:
            needs_text = request.streaming or bool(request.sampling_params.stop) or request.is_finished
            text = self._text_of(request) if needs_text and self._tokenizer is not None else None
            if request.is_finished:
                self._texts.pop(request.request_id, None)
            if request.is_finished or request.streaming:
                outputs.append(self._delta(request, text) if request.deltas else snapshot(request, text))
        return outputs

    def _delta(self, request: Request, text: str | None) -> GenerationOutput:
        """A snapshot of what is new since the last one."""
        sent = self._sent.setdefault(request.request_id, _Sent())
        output = snapshot(request, None if text is None else text[sent.num_chars :], sent.num_tokens, sent.is_first)
        sent.num_tokens, sent.is_first = len(request.output_token_ids), False
        sent.num_chars = max(sent.num_chars, len(text or ""))
        if request.is_finished:
            del self._sent[request.request_id]
        return output

    def _text_of(self, request: Request) -> str | None:
        """The text so far; a request that the tokenizer cannot decode ends, alone, with an error."""
        try:
            return self._advance(request)
        except Exception as error:
            logger.exception("the text of request %s could not be decoded", request.request_id)
            self._scheduler.fail_on_text(request, f"{type(error).__name__}: {error}")
            return None

    def _advance(self, request: Request) -> str:
        """Decodes the new tokens and looks for stop strings; returns the text that may be shown."""
        state = self._texts.get(request.request_id)
        if state is None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer, request.prompt_token_ids, request.sampling_params.skip_special_tokens
            )
            state = self._texts[request.request_id] = _Text(
                detokenizer, StopChecker(request.sampling_params.stop or ())
            )
        matched: str | None = None
        tokens = request.output_token_ids
        hidden = request.stop_reason if request.finish_reason == "stop" else None
        while state.num_seen < len(tokens) and matched is None:
            token = tokens[state.num_seen]
            state.num_seen += 1
            if state.num_seen == len(tokens) and token == hidden and self._is_hidden(request, token):
                break
            delta = state.detokenizer.add(token)
            if state.num_seen <= request.sampling_params.min_tokens:
                state.text += delta  # stop strings count only once the minimum is out
                continue
            shown, matched = state.stops.feed(delta)
            state.text += shown
        if matched is not None:
            self._scheduler.stop_on_text(request, matched, state.num_seen)
        elif request.is_finished:
            state.text += state.stops.flush()  # a beginning of a stop string that will not be completed
        return state.text

    @staticmethod
    def _is_hidden(request: Request, token: int) -> bool:
        """Whether the token that ended a request leaves no text: a stop token, and an EOS unless `decode` shows it."""
        return token not in request.eos_token_ids or not request.sampling_params.skip_special_tokens


def snapshot(request: Request, text: str | None, start: int = 0, with_prompt: bool = True) -> GenerationOutput:
    """A copy of what a request is now.

    Args:
        start: of what is kept per generated token, leave out the first so many.
        with_prompt: False leaves out the prompt and its log-probabilities.
    """
    params = request.sampling_params
    wants_prompt_logprobs = params.prompt_logprobs is not None and with_prompt
    return GenerationOutput(
        request_id=request.request_id,
        prompt_ids=list(request.prompt_token_ids) if with_prompt else [],
        generated_tokens=request.output_token_ids[start:],
        logprobs=request.logprobs[start:],
        error=request.error,
        status=_public_status(request),
        created_time=request.created_time,
        lifespan=(request.first_scheduled_time, request.finished_time),
        timestamps=request.timestamps[start:] if request.record_timestamps else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        text=text,
        top_logprobs=request.top_logprobs[start:] if params.logprobs else None,
        prompt_logprobs=list(request.prompt_logprobs) if wants_prompt_logprobs else None,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        weight_version=request.weight_versions[start:],
        num_draft_tokens=request.num_draft_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
    )


def _public_status(request: Request) -> RequestStatus:
    if request.status is Status.FINISHED:
        ends = {"error": RequestStatus.FAILED, "abort": RequestStatus.ABORTED}
        return ends.get(request.finish_reason or "", RequestStatus.FINISHED)
    if request.output_token_ids:
        return RequestStatus.DECODING
    return RequestStatus.PREFILLING if request.status is Status.RUNNING else RequestStatus.PENDING
