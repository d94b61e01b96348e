"""A prompt's outputs as one JSON object. Owns its fields; see `Reporter`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cb_engine.cli.answers import Answer
from cb_engine.cli.prompts import PromptLine
from cb_engine.outputs import GenerationOutput, TokenLogprob


def refusal(line: PromptLine, reason: str) -> Answer:
    """The answer to a line that could not be run."""
    return {"id": line.id, "index": line.index, "error": reason}


@dataclass(frozen=True)
class Reporter:
    """Makes answers.

    An answer has `id, index, text, finish_reason, stop_reason, usage`, and where asked for or needed `token_ids,
    logprobs, prompt_logprobs, error`. With more than one sample, what belongs to a sample is in a list `choices`.

    Attributes:
        tokenizer: names the tokens of log-probabilities.
        return_token_ids: whether answers hold token ids too.
    """

    tokenizer: Any
    return_token_ids: bool

    def answer(self, line: PromptLine, outputs: Sequence[GenerationOutput]) -> Answer:
        """The answer to a line from the outputs of all its samples."""
        choices = [self._choice(output) for output in outputs]
        answer: Answer = {"id": line.id, "index": line.index}
        answer |= choices[0] if len(choices) == 1 else {"choices": choices}
        first = outputs[0]
        answer["usage"] = {
            "prompt_tokens": len(first.prompt_ids),
            "completion_tokens": sum(len(output.generated_tokens) for output in outputs),
            "cached_tokens": first.num_cached_tokens,
        }
        if first.prompt_logprobs is not None:
            answer["prompt_logprobs"] = [
                None if entry is None else self._token(token_id, _logprob_of(token_id, entry), entry)
                for token_id, entry in zip(first.prompt_ids, first.prompt_logprobs, strict=True)
            ]
        errors = [output.error or "the request failed" for output in outputs if output.finish_reason == "error"]
        if errors:
            answer["error"] = errors[0]
        return answer

    def _choice(self, output: GenerationOutput) -> Answer:
        choice: Answer = {"text": output.text}
        if self.return_token_ids:
            choice["token_ids"] = output.generated_tokens
        choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if output.logprobs:
            best = output.top_logprobs or [[]] * len(output.logprobs)
            choice["logprobs"] = [
                self._token(token_id, logprob, entry)
                for token_id, logprob, entry in zip(output.generated_tokens, output.logprobs, best, strict=True)
            ]
        return choice

    def _token(self, token_id: int, logprob: float, best: Sequence[TokenLogprob]) -> dict[str, Any]:
        """One token, and the likeliest ones in its place where they were asked for."""
        ranked = [entry for entry in best if entry.rank is not None]
        told = self._named(token_id, logprob)
        if ranked:
            told["top_logprobs"] = [self._named(entry.token_id, entry.logprob) for entry in ranked]
        return told

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        # JSON has no infinity: a token that cannot come has no log-probability.
        text = self.tokenizer.decode([token_id])
        return {"token": text, "token_id": token_id, "logprob": logprob if math.isfinite(logprob) else None}


def _logprob_of(token_id: int, entry: Sequence[TokenLogprob]) -> float:
    return next(candidate.logprob for candidate in entry if candidate.token_id == token_id)
