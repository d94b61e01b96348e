"""What the target answers: generations of the engine, kept in a file as they come.

Owns the file: a line for what the answers were made with, then one for each. A run that was cut off continues behind
the last whole line. Does not know heads.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

import cb_engine
from eagle3.settings import check_same


@dataclass(frozen=True)
class Generation:
    """One prompt and the target's answer, EOS included. `question` is its index in the dataset."""

    question: int
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt_ids + self.answer_ids


def generate_missing(
    model: Any, prompts: Mapping[int, list[int]], settings: Mapping[str, Any], path: Path
) -> list[Generation]:
    """The generations of all prompts in their order: those in the file, and new ones, which are appended to it.

    Args:
        model: with an engine attached.
        prompts: token ids by the index of the question.
        settings: `max_new`, the most tokens of an answer, and whatever else the answers depend on.

    Raises:
        ValueError: the file holds answers to other prompts, or made with other settings.
    """
    known = _open(path, settings)
    for question, ids in prompts.items():
        if question in known and known[question].prompt_ids != ids:
            raise ValueError(
                f"{path} answers another question {question} than the dataset has; delete it, or give another --output"
            )
    missing = {question: ids for question, ids in prompts.items() if question not in known}
    with (
        tqdm(total=len(prompts), initial=len(prompts) - len(missing), desc="generate", unit="prompt") as bar,
        path.open("a", encoding="utf-8") as file,
    ):
        for generation in _generate(model, missing, settings["max_new"]):
            file.write(json.dumps(asdict(generation)) + "\n")
            file.flush()
            known[generation.question] = generation
            bar.update()
    return [known[question] for question in prompts]


def _open(path: Path, settings: Mapping[str, Any]) -> dict[int, Generation]:
    """What the file holds, by question. A last line that was cut off is taken away; a new file gets its first line."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    if not whole:
        path.write_text(json.dumps(dict(settings)) + "\n", encoding="utf-8")
        return {}
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    first, *lines = whole.splitlines()
    check_same(json.loads(first), settings, path)
    generations = (Generation(**json.loads(line)) for line in lines)
    return {generation.question: generation for generation in generations}


def _generate(model: Any, prompts: Mapping[int, list[int]], max_new: int) -> Iterator[Generation]:
    """Greedy answers, in the order in which they end."""
    if not prompts:
        return
    params = cb_engine.SamplingParams(temperature=0.0, max_tokens=max_new)
    hints = {
        "num_requests": len(prompts),
        "max_prompt_length": max(map(len, prompts.values())),
        "max_generated_length": max_new,
    }
    with model.continuous_batching_context_manager(workload_hints=hints) as manager:
        request_ids = manager.add_requests(list(prompts.values()), sampling_params=params)
        questions = dict(zip(request_ids, prompts, strict=True))
        for _ in prompts:
            output = manager.get_result()
            question = questions[output.request_id]
            if output.finish_reason == "error":
                raise RuntimeError(f"question {question} could not be answered: {output.error}")
            yield Generation(question, prompts[question], list(output.generated_tokens))


def fingerprint(generations: Sequence[Generation]) -> int:
    """A number that other generations hardly ever have."""
    return zlib.crc32(repr([(g.prompt_ids, g.answer_ids) for g in generations]).encode())
