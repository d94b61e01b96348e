"""What a line of input becomes for one model: token ids and SamplingParams.

Owns how options, the model's own generation config and a line's own fields are laid over each other, and the way
through the chat template. Does not know files or engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cb_engine.cli.options import overlay
from cb_engine.cli.prompts import PromptLine
from cb_engine.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 1024  # where neither options nor the model say; as in transformers' server


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns lines into requests' contents.

    Attributes:
        tokenizer: the model's.
        own_sampling: the model's `GenerationSettings`, to start from; None starts from SamplingParams' defaults.
        changes: fields of SamplingParams that hold for all lines.
        seed: of the run; each line draws with a seed made of it and its index, whatever is in the batch.
        chat: send text through the chat template, as a user's message.
        system: put before chats that have no system message.
    """

    tokenizer: Any
    own_sampling: Any | None
    changes: Mapping[str, Any]
    seed: int | None = None
    chat: bool = False
    system: str | None = None

    def encode(self, line: PromptLine) -> tuple[list[int], SamplingParams]:
        """Token ids and SamplingParams of a line.

        Raises:
            ValueError, TypeError: what is wrong with it.
        """
        if line.error is not None:
            raise ValueError(line.error)
        token_ids = self._token_ids(line)
        return token_ids, self.params(len(token_ids), line.changes, line.index)

    def params(self, prompt_length: int, changes: Mapping[str, Any], index: int = 0) -> SamplingParams:
        """The SamplingParams of a prompt, with changes of its own."""
        base = SamplingParams() if self.own_sampling is None else self.own_sampling.sampling_params(prompt_length)
        params = overlay(base, {**self.changes, **changes})
        if params.max_tokens is None:
            params = params.clone(max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens))
        if params.seed is None and self.seed is not None:
            from cb_engine.sampling import derive_seed

            params = params.clone(seed=derive_seed(self.seed, index))
        return params

    def chat_token_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A chat through the template, ready for the assistant's turn.

        Raises:
            ValueError: the tokenizer has no template, or the template refuses the messages.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError("the model's tokenizer has no chat template; give `prompt` in place of `messages`")
        messages = list(messages)
        if self.system is not None and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # templates are programs: what they raise is theirs
            raise ValueError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error
        return [int(token) for token in ids]

    def _token_ids(self, line: PromptLine) -> list[int]:
        if line.messages is not None:
            return self.chat_token_ids(line.messages)
        if isinstance(line.prompt, str) and self.chat:
            return self.chat_token_ids([{"role": "user", "content": line.prompt}])
        if isinstance(line.prompt, str):
            return [int(token) for token in self.tokenizer(line.prompt)["input_ids"]]
        return line.prompt or []
