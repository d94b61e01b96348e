"""What a head learns from: the target's states and predictions along its own generations.

Owns the choice of the draft vocabulary and the target's forward. Does not know the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from eagle3.generations import Generation

_TEACHER_TOKENS = 32  # of the target's distribution; the tail beyond them is negligible
_TOKENS_PER_FORWARD = 2048


@dataclass(frozen=True)
class Example:
    """One prompt and answer, L tokens, and at each of them what the target computed and predicted there.

    Attributes:
        aux: [L, states * width] what the head fuses.
        teacher_ids: [L, K] the likeliest next tokens, as indices into the draft vocabulary, best first.
        teacher_probs: [L, K] their probabilities, which add up to 1.
        is_taught: [L] whether a head should predict what follows: a token of the answer, and one it can draft.
    """

    token_ids: torch.Tensor
    prompt_length: int
    aux: torch.Tensor
    teacher_ids: torch.Tensor
    teacher_probs: torch.Tensor
    is_taught: torch.Tensor


def choose_vocabulary(generations: Sequence[Generation], size: int, vocab_size: int) -> torch.Tensor:
    """The most frequent tokens of the answers, then of the prompts, then the lowest ids; in ascending order."""
    chosen: dict[int, None] = {}
    for part in ("answer_ids", "prompt_ids"):
        counts = Counter(token for generation in generations for token in getattr(generation, part))
        chosen |= dict.fromkeys(token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    chosen |= dict.fromkeys(range(vocab_size))
    return torch.tensor(sorted(list(chosen)[:size]))


def coverage(generations: Sequence[Generation], vocabulary: torch.Tensor) -> float:
    """The share of the answers' tokens that the draft vocabulary has."""
    known = set(vocabulary.tolist())
    tokens = [token for generation in generations for token in generation.answer_ids]
    return sum(token in known for token in tokens) / max(1, len(tokens))


def collect_examples(
    model: Any, generations: Sequence[Generation], vocabulary: torch.Tensor, aux_layer_ids: Sequence[int], label: str
) -> list[Example]:
    """Runs the target over every prompt and answer. Returns them in order, on the CPU."""
    examples: list[Example | None] = [None] * len(generations)
    total = sum(len(generation.token_ids) for generation in generations)
    with tqdm(total=total, desc=label, unit="tok", unit_scale=True) as bar, torch.inference_mode():
        for part in _parts([len(generation.token_ids) for generation in generations]):
            for place, example in zip(
                part, _run(model, [generations[i] for i in part], vocabulary, aux_layer_ids), strict=True
            ):
                examples[place] = example
                bar.update(len(example.token_ids))
    return [example for example in examples if example is not None]


def _parts(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of sequences that are about as long and together not longer than a forward may be."""
    part: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if part and lengths[i] * (len(part) + 1) > _TOKENS_PER_FORWARD:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


def _run(
    model: Any, generations: Sequence[Generation], vocabulary: torch.Tensor, aux_layer_ids: Sequence[int]
) -> Iterator[Example]:
    """One forward. Sequences are padded on the right: causal attention does not see that from the left."""
    longest = max(len(generation.token_ids) for generation in generations)
    ids = torch.tensor([g.token_ids + [0] * (longest - len(g.token_ids)) for g in generations], device=model.device)
    output = model(ids, use_cache=False, output_hidden_states=True)
    aux = torch.cat([output.hidden_states[i].to(ids.device, torch.bfloat16) for i in aux_layer_ids], -1).cpu()
    logits, vocabulary = output.logits, vocabulary.to(output.logits.device)
    is_known = torch.isin(logits.argmax(-1), vocabulary).cpu()
    scores, teacher_ids = logits[..., vocabulary].float().topk(min(_TEACHER_TOKENS, len(vocabulary)))
    teacher_ids, probs = teacher_ids.to("cpu", torch.int32), scores.softmax(-1).cpu()
    for i, generation in enumerate(generations):
        end = len(generation.token_ids)
        is_taught = is_known[i, :end] & (torch.arange(end) >= len(generation.prompt_ids) - 1)
        rows = (t[i, :end].clone() for t in (aux, teacher_ids, probs))
        yield Example(torch.tensor(generation.token_ids), len(generation.prompt_ids), *rows, is_taught)
