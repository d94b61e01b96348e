"""A model whose answer can be worked out by hand, and that knows its tokens through the KV cache alone.

Its one layer stores `token * (position + 1)` as the value of every token and attends to all of them alike, so the
cache gives the mean, hence the sum, of what was stored:

    next(t_0 .. t_p) = (t_0 * 1 + t_1 * 2 + ... + t_p * (p + 1)) mod VOCAB

A token read from a wrong slot, at a wrong position or of another request changes the sum. With a window of W the sum
runs over the last W tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

VOCAB = 97
Hook = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Hooks(list[Hook]):
    """Shared with the engine's copy of the model, so that a test can change it while an engine lives."""

    def __deepcopy__(self, memo: dict[int, object]) -> Hooks:
        return self


class _Attention(nn.Module):
    def __init__(self, config: SimpleNamespace, layer_idx: int, window: int | None) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.window = window

    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        """Mean of what the visible tokens stored; [1, T] in, [1, T] out."""
        value = stored[:, None, :, None].expand(1, 1, -1, 4).contiguous()
        silent = torch.zeros_like(value)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, silent, silent, value, None, scaling=1.0, sliding_window=self.window)
        return out[0, :, 0, 0].unsqueeze(0)


class FakeModel(nn.Module):
    """See the module docstring. `window` None is full attention."""

    def __init__(self, window: int | None = None, max_position_embeddings: int = 512) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="fake",
            num_hidden_layers=1,
            max_position_embeddings=max_position_embeddings,
            eos_token_id=None,
            _attn_implementation="eager",
        )
        self.layers = nn.ModuleList([_Attention(self.config, 0, window)])
        self.bonus = nn.Parameter(torch.zeros(VOCAB), requires_grad=False)  # added to every row of logits
        self.hook = Hooks()  # may change the logits of a step: (position_ids of the rows, logits) -> logits

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool = False,
        logits_to_keep: torch.Tensor | int = 0,
    ) -> SimpleNamespace:
        """Logits [1, R, VOCAB] with a lead of 10 for the next token."""
        window = self.layers[0].window
        mean = self.layers[0]((input_ids * (position_ids + 1)).float())
        seen = position_ids + 1 if window is None else (position_ids + 1).clamp(max=window)
        following = (mean * seen).round().to(torch.int64) % VOCAB
        rows = logits_to_keep if isinstance(logits_to_keep, torch.Tensor) else torch.arange(input_ids.shape[1])
        logits = 10.0 * nn.functional.one_hot(following[0, rows], VOCAB).float() + self.bonus
        for hook in self.hook:
            logits = hook(position_ids[0, rows], logits)
        return SimpleNamespace(logits=logits.unsqueeze(0))


def expected(prompt: Sequence[int], count: int, window: int | None = None) -> list[int]:
    """The next `count` tokens, worked out without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        first = 0 if window is None else max(0, len(tokens) - window)
        tokens.append(sum(t * (i + 1) for i, t in enumerate(tokens) if i >= first) % VOCAB)
    return tokens[len(prompt) :]
