"""What all routes of one server share. Owns nothing that changes but what is there only once the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cb_engine.api.async_engine import AsyncEngine
from cb_engine.intake import RequestOptions
from cb_engine.request import Request
from cb_engine.sampling_params import SamplingParams
from cb_engine.serve.chat_template import ChatTemplate
from cb_engine.serve.errors import APIError, bad_request
from cb_engine.serve.generation import Generation
from cb_engine.serve.host import EngineHost
from cb_engine.serve.metrics import ServerMetrics
from cb_engine.serve.parsers import ReasoningFormat, ToolFormat, detect_reasoning_format, detect_tool_format
from cb_engine.serve.sampling import model_defaults
from cb_engine.serve.settings import ServeSettings
from cb_engine.serve.text_workers import TextWorkers
from cb_engine.serve.token_texts import TokenTexts


@dataclass(frozen=True)
class LoadedModel:
    """What hangs on the tokenizer and the model's config."""

    tokenizer: Any
    template: ChatTemplate
    texts: TokenTexts
    defaults: Mapping[str, Any]  # of sampling
    max_model_len: int
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    special_tokens: Mapping[str, int]
    longest_token: int  # characters


class ServerContext:
    """See the module docstring."""

    def __init__(self, host: EngineHost, settings: ServeSettings) -> None:
        self.host = host
        self.settings = settings
        self.metrics = ServerMetrics(host, settings.model_name)
        self.workers = TextWorkers(settings.text_timeout)
        self.under_way: set[Generation] = set()
        self._loaded: LoadedModel | None = None

    def model_is_there(self, model: Any, tokenizer: Any) -> None:
        """Called once, before the first request is taken."""
        self._loaded = _describe(model, tokenizer, self.host, self.settings)

    @property
    def loaded(self) -> LoadedModel:
        """What is known of the model.

        Raises:
            APIError: it is not there yet.
        """
        if self._loaded is None:
            self.host.engine()  # says why
            raise APIError(503, "the model is being loaded", code="loading", retry_after=self.settings.retry_after)
        return self._loaded

    def engine(self) -> AsyncEngine:
        """The engine, for a request.

        Raises:
            APIError: it takes none now.
        """
        try:
            return self.host.engine()
        except APIError as error:
            self.metrics.rejected(error.code or "unavailable")
            raise

    def check_model(self, name: str | None) -> None:
        """Raises if a client means another model.

        Raises:
            APIError: it does; only the model that the operator chose is served.
        """
        if name is not None and not self.settings.is_own_name(name):
            raise APIError(
                404,
                f"the model {name!r:.100} is not served here; this server has {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def prepare(
        self,
        engine: AsyncEngine,
        prompts: Sequence[str | list[int]],
        params: SamplingParams,
        request_id: str,
        *,
        streaming: bool,
        add_special_tokens: bool = True,
    ) -> list[list[Request]]:
        """The engine's requests for prompts, checked, off the event loop.

        Raises:
            ValueError, TypeError: one of them is not valid.
        """

        def make() -> list[list[Request]]:
            groups = []
            for index, prompt in enumerate(prompts):
                ids = self.token_ids(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
                options = RequestOptions(
                    request_id=f"{request_id}-{index}", streaming=streaming, deltas=streaming, record_timestamps=True
                )
                # transformers' order has the plain id last; choices count from the first sample on.
                groups.append(engine.make_requests(ids, params, options))
            return groups

        return await self.workers.run(make)

    def token_ids(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text as token ids. Takes time: for the workers.

        Raises:
            APIError: it cannot but be too long.
        """
        self.check_length(len(text))
        ids = self.loaded.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return [int(token_id) for token_id in ids]

    def check_length(self, num_chars: int) -> None:
        """Refuses a text before any work is done on it, if even tokens of the longest kind would be too many.

        Raises:
            APIError: they would.
        """
        longest = self.loaded.max_model_len * self.loaded.longest_token
        if num_chars > longest:
            raise bad_request(
                f"the prompt has {num_chars} characters, which is more than {self.loaded.max_model_len} tokens can hold"
            )

    def close(self) -> None:
        """The server has ended."""
        self.workers.close()


def _describe(model: Any, tokenizer: Any, host: EngineHost, settings: ServeSettings) -> LoadedModel:
    template = ChatTemplate(tokenizer, settings.chat_template, settings.chat_template_kwargs)
    defaults = model_defaults(getattr(model, "generation_config", None)) if settings.use_generation_config else {}
    if settings.default_seed is not None:
        defaults["seed"] = settings.default_seed
    manager = host.manager
    auto_tools = detect_tool_format(template.text)
    found = detect_reasoning_format(template.text)
    switched_on = found or ReasoningFormat.THINK
    return LoadedModel(
        tokenizer=tokenizer,
        template=template,
        texts=TokenTexts(tokenizer),
        defaults=defaults,
        max_model_len=manager.engine.intake.longest if manager is not None else 0,
        tool_format=auto_tools if settings.tool_format == "auto" else ToolFormat(settings.tool_format),
        reasoning={"auto": found, "on": switched_on, "off": None}[settings.reasoning],
        special_tokens=_special_tokens(tokenizer),
        longest_token=max((len(token) for token in tokenizer.get_vocab()), default=1),
    )


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: token_id for token_id, token in added.items() if token.special}
