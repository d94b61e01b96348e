"""/v1/completions: a prompt goes on."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag, model_validator

from cb_engine.serve.protocol.base import Entries, SamplingFields, TokenIds


def _kind_of_prompt(prompt: Any) -> str:
    """By its first entry, so that what is wrong with another one is said of that one. No field has such a name."""
    if not isinstance(prompt, list):
        return "<text>"
    first = prompt[0] if prompt else ""
    return "<texts>" if isinstance(first, str) else "<lists of ids>" if isinstance(first, list) else "<ids>"


class CompletionRequest(SamplingFields):
    """The body. A prompt is text or token ids; a list of either is several."""

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "suffix": (("",), "this model continues a text and does not fill gaps; leave it out"),
    }

    prompt: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[Entries[str], Tag("<texts>")]
        | Annotated[TokenIds, Tag("<ids>")]
        | Annotated[Entries[TokenIds], Tag("<lists of ids>")],
        Discriminator(_kind_of_prompt),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None  # to a prompt in text; the default is true

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.num_samples:
            raise ValueError("best_of must be n: samples are not ranked here; leave it out")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # pydantic has seen to it that all are
        return self.prompt  # type: ignore[return-value]
