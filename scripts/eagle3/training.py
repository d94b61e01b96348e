"""The training loop: AdamW over the head's passes, interruptible at any time.

Owns the optimizer, the order of the examples and the state file. The order is a function of the seed and the epoch, so
a run that was cut off continues exactly where its last state left it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from eagle3.examples import Example
from eagle3.settings import check_same, save_whole
from eagle3.unrolling import PaddedBatch, arithmetic, shifted, unroll

_WARM_UP = 0.05  # share of the steps
_FINAL_RATE = 0.02  # share of the highest learning rate
_POOL = 8  # batches among which sequences are sorted by length
_STEPS_PER_STATE = 50
_MAX_NORM = 1.0
_LATER_WEIGHT = 0.8  # of each pass's loss, relative to that of the pass before
_WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Recipe:
    """How a head is trained.

    Attributes:
        num_passes: passes that are unrolled; as many as tokens will be drafted.
        batch_size: sequences per step.
    """

    epochs: int = 3
    batch_size: int = 4
    learning_rate: float = 1e-3
    num_passes: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Report:
    """Of one step: the loss, and for each pass the share of rows whose best token is the target's."""

    loss: float
    accuracies: tuple[float, ...]


def pass_losses(head: Eagle3Head, batch: PaddedBatch, num_passes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each pass its cross entropy with the target's distribution, and the share of rows with the target's best."""
    results = []
    for number, hidden in enumerate(unroll(head, batch, num_passes), start=1):
        rows = shifted(batch.is_taught, number)
        teacher_ids = shifted(batch.teacher_ids, number)[rows].long().to(hidden.device)
        probs = shifted(batch.teacher_probs, number)[rows].to(hidden.device)
        logits = head.logits(hidden[rows.to(hidden.device)])
        count = max(1, len(logits))  # a batch of short answers may have no row for a late pass
        loss = -(logits.float().log_softmax(-1).gather(-1, teacher_ids) * probs).sum() / count
        results.append((loss, (logits.argmax(-1) == teacher_ids[:, 0]).sum() / count))
    return results


class Trainer:
    """See the module docstring.

    Args:
        examples: without those held out.
        made_with: what the examples were made with.
        state_path: where the state is kept; one that is there is taken up.

    Raises:
        ValueError: the state that is there is that of another recipe or of other examples.
    """

    def __init__(
        self,
        head: Eagle3Head,
        examples: Sequence[Example],
        recipe: Recipe,
        made_with: Mapping[str, Any],
        state_path: Path,
    ) -> None:
        self._head, self._examples, self._recipe, self._state_path = head, examples, recipe, state_path
        self._settings = {**made_with, **asdict(recipe)}
        self._parameters = list(head.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters, recipe.learning_rate, betas=(0.9, 0.95), weight_decay=_WEIGHT_DECAY, fused=True
        )
        self._steps_per_epoch = math.ceil(len(examples) / recipe.batch_size)
        self.num_steps = recipe.epochs * self._steps_per_epoch
        self.step = 0
        if state_path.is_file():
            self._load()

    def run(self, max_steps: int | None = None) -> Report | None:
        """Trains to the end, or `max_steps` further; returns the mean of the last steps, None if there were none."""
        last = self.num_steps if max_steps is None else min(self.num_steps, self.step + max_steps)
        recent: list[Report] = []
        with tqdm(total=self.num_steps, initial=self.step, desc="train", unit="step") as bar:
            while self.step < last:
                recent = [*recent[1 - _STEPS_PER_STATE :], self._one_step()]
                bar.set_postfix_str(_describe(_mean(recent)), refresh=False)
                bar.update()
                if self.step % _STEPS_PER_STATE == 0 or self.step == last:
                    self._save()
        return _mean(recent) if recent else None

    def _one_step(self) -> Report:
        epoch, number = divmod(self.step, self._steps_per_epoch)
        batch = PaddedBatch.of([self._examples[i] for i in self._epoch(epoch)[number]])
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * _schedule(self.step, self.num_steps)
        with arithmetic(self._head, batch):
            results = pass_losses(self._head, batch, self._recipe.num_passes)
        weights = [_LATER_WEIGHT**i for i in range(len(results))]
        losses = torch.stack([weight * loss for weight, (loss, _) in zip(weights, results, strict=True)])
        loss = losses.sum() / sum(weights)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, _MAX_NORM)
        self._optimizer.step()
        self.step += 1
        return Report(loss.item(), tuple(hits.item() for _, hits in results))

    def _epoch(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch: sequences of a batch are about as long."""
        size, generator = self._recipe.batch_size, torch.Generator().manual_seed(self._recipe.seed * 100_003 + epoch)
        order = torch.randperm(len(self._examples), generator=generator).tolist()
        batches: list[list[int]] = []
        for start in range(0, len(order), _POOL * size):
            pool = sorted(order[start : start + _POOL * size], key=lambda i: len(self._examples[i].token_ids))
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def _save(self) -> None:
        state = {"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict()}
        save_whole({"settings": self._settings, "step": self.step, **state}, self._state_path)

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self._state_path, map_location="cpu", weights_only=True)
        check_same(state["settings"], self._settings, self._state_path)
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def _schedule(step: int, num_steps: int) -> float:
    """The share of the highest learning rate: a short rise, then half a cosine."""
    warm_up = max(1, round(_WARM_UP * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, num_steps - warm_up)
    return _FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def _mean(reports: Sequence[Report]) -> Report:
    passes = zip(*(report.accuracies for report in reports), strict=True)
    return Report(sum(r.loss for r in reports) / len(reports), tuple(sum(p) / len(reports) for p in passes))


def _describe(report: Report) -> str:
    accuracies = " ".join(f"{share:.3f}" for share in report.accuracies)
    return f"loss {report.loss:.3f}, acc {accuracies}"
