"""A model that says a given text: after the prompt, output token i is `script[i]`, whatever was said before."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import byte_tokenizer
import torch
from fake_model import FakeModel


class ScriptedModel(FakeModel):
    """Greedy output is the script, for prompts of `prompt_length` tokens; after it EOS for ever."""

    def __init__(self, script: Sequence[int], prompt_length: int = 1) -> None:
        super().__init__()
        self.config.eos_token_id = byte_tokenizer.EOS
        self.script = list(script)
        self.prompt_length = prompt_length

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool = False,
        logits_to_keep: torch.Tensor | int = 0,
    ) -> SimpleNamespace:
        """Logits [1, R, VOCAB] with a lead of 10 for the scripted token."""
        self.layers[0]((input_ids * 0).float())  # the engine expects every layer to attend
        rows = logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else torch.arange(input_ids.shape[1])
        following = [self._token_after(int(p)) for p in position_ids[0, rows]]
        logits = 10.0 * torch.nn.functional.one_hot(torch.tensor(following, dtype=torch.int64), byte_tokenizer.VOCAB)
        logits = logits.float()
        for hook in self.hook:
            logits = hook(position_ids[0, rows], logits)
        return SimpleNamespace(logits=logits.unsqueeze(0))

    def _token_after(self, position: int) -> int:
        index = position + 1 - self.prompt_length
        return self.script[index] if 0 <= index < len(self.script) else byte_tokenizer.EOS
