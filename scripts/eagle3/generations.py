"""What the target answers: greedy generations of the engine, kept in a file as they come.

Owns the file. A run that was cut off continues behind the last part it has written. Does not know heads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

import cb_engine

_PROMPTS_PER_CALL = 64  # what a cut-off run loses at most


@dataclass(frozen=True)
class Generation:
    """One prompt and the target's greedy answer, EOS included. `question` is its index in the dataset."""

    question: int
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_ids + self.answer_ids


def generate_missing(
    model: Any, prompts: Sequence[tuple[int, list[int]]], max_new: int, path: Path
) -> dict[int, Generation]:
    """The generations of all prompts by question: those in the file, and new ones, which are appended to it.

    Args:
        model: with an engine attached.
        prompts: (index of the question, token ids).
        max_new: new tokens at most.
    """
    known = read_generations(path)
    missing = [(question, ids) for question, ids in prompts if question not in known]
    params = cb_engine.SamplingParams(temperature=0.0, max_tokens=max_new)
    with tqdm(total=len(prompts), initial=len(prompts) - len(missing), desc="generate", unit="prompt") as bar:
        for start in range(0, len(missing), _PROMPTS_PER_CALL):
            part = missing[start : start + _PROMPTS_PER_CALL]
            outputs = model.generate_batch([ids for _, ids in part], sampling_params=params)
            new = [
                Generation(question, ids, _answer(question, output))
                for (question, ids), output in zip(part, outputs.values(), strict=True)
            ]
            _append(path, new)
            known |= {generation.question: generation for generation in new}
            bar.update(len(part))
    return {question: known[question] for question, _ in prompts}


def _answer(question: int, output: Any) -> list[int]:
    if output.finish_reason == "error":
        raise RuntimeError(f"question {question} could not be answered: {output.error}")
    return list(output.generated_tokens)


def read_generations(path: Path) -> dict[int, Generation]:
    """What the file holds, by question; a last line that was cut off does not count."""
    if not path.is_file():
        return {}
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    records = (Generation(**json.loads(line)) for line in whole)
    return {generation.question: generation for generation in records}


def _append(path: Path, generations: Sequence[Generation]) -> None:
    """Adds lines behind the last whole one."""
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    whole = before[: before.rfind("\n") + 1]
    lines = "".join(json.dumps(asdict(generation)) + "\n" for generation in generations)
    if whole == before:
        with path.open("a", encoding="utf-8") as file:
            file.write(lines)
    else:
        path.write_text(whole + lines, encoding="utf-8")
