"""What a head learns from: the target's states and predictions along its own generations.

Owns the choice of the draft vocabulary, the target's forward and the file that keeps what it has shown. Does not know
the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle3.generations import Generation
from eagle3.settings import check_same, save_whole

_TEACHER_TOKENS = 32  # of the target's distribution; the tail beyond them is negligible
_TOKENS_PER_FORWARD = 2048


@dataclass(frozen=True)
class Example:
    """One prompt and answer, L tokens, and at each of them what the target computed and predicted there.

    Attributes:
        aux: [L, states * width] what the head fuses.
        teacher_ids: [L, K] the likeliest next tokens, as indices into the draft vocabulary, best first.
        teacher_probs: [L, K] their probabilities, which add up to 1.
        is_taught: [L] whether a head should predict what follows: a token of the answer, and what the target expects
            there is one that it can draft.
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
    model: Any, generations: Sequence[Generation], vocabulary: torch.Tensor, aux_layer_ids: Sequence[int]
) -> list[Example]:
    """Runs the target over every prompt and answer. Returns them in order, on the CPU."""
    examples: dict[int, Example] = {}
    total = sum(len(generation.token_ids) for generation in generations)
    with tqdm(total=total, desc="collect", unit="tok", unit_scale=True) as bar, torch.no_grad():
        for part in _parts([len(generation.token_ids) for generation in generations]):
            made = _run(model, [generations[i] for i in part], vocabulary, aux_layer_ids)
            for place, example in zip(part, made, strict=True):
                examples[place] = example
                bar.update(len(example.token_ids))
    return [examples[i] for i in range(len(generations))]


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
    states = [output.hidden_states[i] for i in aux_layer_ids]
    for row, generation in enumerate(generations):
        aux = torch.cat([state[row, : len(generation.token_ids)].cpu() for state in states], -1)
        yield _example(generation, aux, output.logits[row], vocabulary)


def _example(generation: Generation, aux: torch.Tensor, logits: torch.Tensor, vocabulary: torch.Tensor) -> Example:
    """`logits`: of the padded sequence. Nothing is taught before the answer, nor at its end, which nothing follows."""
    first, last = len(generation.prompt_ids) - 1, len(generation.token_ids) - 1
    answer, vocabulary = logits[first:last], vocabulary.to(logits.device)
    scores, ids = answer[:, vocabulary].float().topk(min(_TEACHER_TOKENS, len(vocabulary)))
    around = (first, 1)
    return Example(
        token_ids=torch.tensor(generation.token_ids),
        prompt_length=len(generation.prompt_ids),
        aux=aux,
        teacher_ids=_with_rows(ids.to("cpu", torch.int32), *around),
        teacher_probs=_with_rows(scores.softmax(-1).cpu(), *around),
        is_taught=_with_rows(torch.isin(answer.argmax(-1), vocabulary).cpu(), *around),
    )


def _with_rows(rows: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """The same with rows of zeros around."""
    out = rows.new_zeros(before + len(rows) + after, *rows.shape[1:])
    out[before : before + len(rows)] = rows
    return out


def save_examples(examples: Sequence[Example], settings: Mapping[str, Any], path: Path) -> None:
    """Keeps examples, and what they were made with, for `load_examples`."""
    save_whole({"settings": dict(settings), "examples": [vars(example) for example in examples]}, path)


def load_examples(settings: Mapping[str, Any], path: Path) -> list[Example]:
    """What `save_examples` has kept; it is read from the disk when it is used.

    Raises:
        ValueError: it was made with other settings.
    """
    kept: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    check_same(kept["settings"], settings, path)
    return [Example(**fields) for fields in kept["examples"]]
