"""transformers' `ContinuousBatchingManager` interface over an engine thread.

Owns the mailbox and the names of this interface. Every request that was accepted gets exactly one terminal output,
whatever happens to the engine; ids, argument names and defaults are transformers' own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from tqdm.auto import tqdm

from cb_engine.api.engine_thread import EngineThread
from cb_engine.api.generation_config import GenerationSettings
from cb_engine.api.mailbox import Mailbox, Sink
from cb_engine.config import Translated
from cb_engine.engine import Abort, Add, Engine
from cb_engine.errors import EngineError, EngineStoppedError, ModelChangedError, QueueFullError
from cb_engine.intake import RequestOptions, naming_input
from cb_engine.metrics import EngineStats
from cb_engine.outputs import GenerationOutput, RequestStatus
from cb_engine.request import Request
from cb_engine.runner.forward import Coverage
from cb_engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_QUEUE_FULL_WAIT = 10.0  # seconds that a request waits for room in a full queue, as in transformers
_QUEUE_POLL = 0.01


class ContinuousBatchingManager:
    """See the module docstring. Made by `init_continuous_batching`.

    Args:
        engine: the engine to run.
        settings: the generation config followed by requests that bring no SamplingParams.
        config: what the engine was made with, to tell whether it suits another call.
    """

    def __init__(self, engine: Engine, settings: GenerationSettings, config: Translated) -> None:
        self.engine = engine
        self._settings = settings
        self._made_for = config
        self._mailbox = Mailbox()
        self._thread = EngineThread(engine, self._mailbox.deliver, self._on_thread_end)
        self._sessions_lock = threading.RLock()  # guards the three below
        self._sessions = 0
        self._sessions_with_settings = 0
        self._started_by_hand = False

    # ---- life ------------------------------------------------------------------------------------------------

    @property
    def warmed_up(self) -> bool:
        """Whether warm-up has run."""
        return self.engine.is_warm

    def warmup(self, progress_bar: bool = False) -> None:
        """Runs every padded shape once, so that no request pays for compilation later."""
        if self.warmed_up:
            return
        nothing_to_do = not self.engine.num_shapes
        with tqdm(disable=not progress_bar or nothing_to_do, desc="Warming up", unit="shape") as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            self._thread.call(lambda: self.engine.warmup(progress))

    def start(self) -> None:
        """Starts the engine thread; does nothing if it runs.

        Raises:
            EngineError: the engine failed before. EngineStoppedError: `destroy` was called.
        """
        with self._sessions_lock:
            self._start()
            self._started_by_hand = True

    def _start(self) -> None:
        self._thread.start()
        self._mailbox.reopen()

    def is_running(self) -> bool:
        """Whether the engine thread lives."""
        return self._thread.is_running

    @property
    def step_seconds(self) -> float:
        """How long the step under way has taken so far, in seconds; 0 between steps."""
        return self._thread.step_seconds

    @property
    def failure(self) -> EngineError | None:
        """What ended the engine, if it failed."""
        failure = self._thread.failure
        return failure if isinstance(failure, EngineError) else None

    def suits(self, config: Translated | None) -> bool:
        """Whether a call with this config (None: no wish) can use this manager as it is."""
        return self._thread.failure is None and (config is None or config == self._made_for)

    def follows_model(self) -> bool:
        """Takes over what has changed in the model; False if it has become another one."""
        try:
            self.sync_weights()
        except ModelChangedError:
            return False
        return True

    def follow(self, settings: GenerationSettings) -> None:
        """From now on requests without SamplingParams follow these settings.

        Raises:
            RuntimeError: another user's requests follow other settings right now.
        """
        with self._sessions_lock:
            if settings != self._settings and (self._sessions_with_settings or self._started_by_hand):
                raise RuntimeError(
                    "the persistent manager is in use with another generation_config; give sampling_params instead"
                )
            self._settings = settings

    @property
    def in_use(self) -> bool:
        """Whether a call, a `with` block or a `start()` holds the manager."""
        return self._sessions > 0 or self._started_by_hand

    def begin_session(self, settings: GenerationSettings | None = None) -> None:
        """Starts the manager for one of its users; each calls `end_session` in the end.

        Args:
            settings: what this user's requests without SamplingParams follow; None if it has no such requests.

        Raises:
            RuntimeError: another user's requests follow other settings right now.
        """
        with self._sessions_lock:
            if not self.in_use:
                self._mailbox.clear()  # what the last user has left lying
            if settings is not None:
                self.follow(settings)
            self._start()
            self._sessions += 1
            self._sessions_with_settings += settings is not None

    def end_session(
        self, *, with_settings: bool, block: bool, timeout: float | None, keep: bool, hard_stop: bool = False
    ) -> None:
        """Stops the manager if this was its last user; without `keep` it is given up."""
        with self._sessions_lock:
            self._sessions -= 1
            self._sessions_with_settings -= with_settings
            if self.in_use:
                return
            self._stop(block=block, timeout=timeout, keep=keep, hard_stop=hard_stop)
            if not keep and not self.is_running():
                self.destroy()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Ends the engine thread once all accepted work is done; with `hard_stop` that work is aborted instead.

        Args:
            block: wait for the thread, `timeout` seconds at most.
            keep_for_next_session: keep cached prefixes for another `start()`.

        Raises:
            RuntimeError: the calling thread holds a pause.
        """
        with self._sessions_lock:
            self._started_by_hand = False
            self._stop(block=block, timeout=timeout, keep=keep_for_next_session, hard_stop=hard_stop)

    def _stop(self, *, block: bool, timeout: float | None, keep: bool, hard_stop: bool) -> None:
        triggered = time.perf_counter()
        self._thread.stop(abort=hard_stop)
        if block:
            self.join(triggered, timeout)
        if not keep and not self.is_running():
            self.engine.reset_prefix_cache()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Waits for the engine thread to end."""
        if not self._thread.join(timeout):
            waited = time.perf_counter() - stop_trigger_time
            logger.warning("the engine thread is still at work %.1f s after it was asked to stop", waited)

    def destroy(self) -> None:
        """Stops at once, aborts what is unfinished and frees the cache. The manager is of no use afterwards."""
        self._thread.stop(abort=True)
        self._thread.join()
        if self._thread.failure is None:
            self._mailbox.deliver(self.engine.step())  # what was submitted and never ran ends as aborted
        self._thread.give_up(EngineStoppedError("the manager was destroyed; make a new one"))
        self._mailbox.close()
        self.engine.close()

    def pause(self) -> AbstractContextManager[None]:
        """A context manager that holds the engine at a step's edge; cache and requests stay.

        Raises:
            RuntimeError: no engine thread runs. EngineError: the engine has failed.
        """
        return self._thread.pause()

    # ---- requests --------------------------------------------------------------------------------------------

    def add_request(
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        **logit_processor_kwargs: Any,
    ) -> str:
        """Submits one prompt.

        Args:
            input_ids: token ids, or a string if a tokenizer is attached.
            request_id: the id; made up if None. Samples 0 .. n-2 of n get `ID__child#i`, the last is `ID`.
            max_new_tokens: overrides the generation config.
            streaming: deliver a snapshot after every token.
            record_timestamps: record the time of every token.
            eos_token_id: overrides the model's; -1 for none.
            sampling_params: everything about sampling; the generation config then counts for EOS only.
            **logit_processor_kwargs: SamplingParams fields for this request (temperature, top_k, top_p, ...).

        Returns:
            the request's id.

        Raises:
            ValueError, TypeError: the request is not valid; nothing was submitted.
            QueueFullError: no room came up in the queue.
            EngineStoppedError, EngineError: the manager takes no requests any more.
        """
        options = RequestOptions(
            request_id=request_id,
            eos_token_id=eos_token_id,
            streaming=streaming,
            record_timestamps=record_timestamps,
        )
        token_ids = self.engine.intake.token_ids_of(input_ids)
        params = self._params_for(token_ids, sampling_params, max_new_tokens, logit_processor_kwargs)
        requests = self.engine.intake.make(token_ids, params, options)
        self.submit_requests(requests)
        return requests[-1].request_id

    def add_requests(
        self,
        inputs: Sequence[Any],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        """Submits several prompts at once, all or, if one is not valid, none; equal prompts are computed once.

        Args:
            sampling_params: one for all, or one per prompt. For the rest see `add_request`.

        Returns:
            the ids, in the order of the inputs.

        Raises:
            ValueError, TypeError: naming the index of the input that is not valid.
        """
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        for index, given in enumerate(spread_params(sampling_params, len(inputs))):
            with naming_input(index):
                prompts.append(self.engine.intake.token_ids_of(inputs[index]))
                params.append(self._params_for(prompts[-1], given, max_new_tokens, logit_processor_kwargs))
        options = RequestOptions(streaming=streaming, record_timestamps=record_timestamps)
        requests = self.make_all(prompts, params, options)
        self.submit_requests(requests)
        return list(dict.fromkeys(request.family for request in requests))

    def make_all(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], options: RequestOptions
    ) -> list[Request]:
        """Checks all prompts and makes their requests; nothing is submitted yet.

        Raises:
            ValueError, TypeError: naming the index of the prompt that is not valid.
        """
        requests: list[Request] = []
        for index, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
            with naming_input(index):
                requests += self.engine.intake.make(prompt, given, options)
        return requests

    def _params_for(
        self,
        token_ids: Sequence[int],
        given: SamplingParams | None,
        max_new_tokens: int | None,
        overrides: Mapping[str, Any],
    ) -> SamplingParams:
        unknown = overrides.keys() - SamplingParams.__dataclass_fields__.keys()
        if unknown:
            raise TypeError(f"unexpected argument {sorted(unknown)[0]!r}: SamplingParams has no such field")
        changes = dict(overrides) if max_new_tokens is None else {**overrides, "max_tokens": max_new_tokens}
        params = given or self._settings.sampling_params(len(token_ids))
        return params.clone(**changes) if changes else params

    def submit_requests(self, requests: Sequence[Request], sink: Sink | None = None, *, wait: bool = True) -> None:
        """Hands requests over, to be delivered to `sink` or to the mailbox.

        Args:
            wait: wait a while for room if the queue is full. Without it this returns at once.

        Raises:
            QueueFullError: no room came up. EngineStoppedError, EngineError: nothing is taken any more.
        """
        ids = [request.request_id for request in requests]
        self._mailbox.open(ids, sink)
        deadline = time.monotonic() + _QUEUE_FULL_WAIT
        try:
            while True:
                try:
                    return self._thread.submit(Add(requests))
                except QueueFullError:
                    if not wait or time.monotonic() > deadline or not self.is_running():
                        raise
                    time.sleep(_QUEUE_POLL)
        except BaseException:
            self._mailbox.withdraw(ids)
            raise

    def cancel_request(self, request_id: str) -> None:
        """Ends a request and all its samples; each gets a terminal output with what it has.

        An id that is unknown or has ended is passed over: it may have ended a moment ago.
        """
        self.cancel_requests(
            i for i in self._mailbox.open_ids() if i == request_id or i.startswith(f"{request_id}__child#")
        )

    def cancel_requests(self, request_ids: Iterable[str]) -> None:
        """Ends these very samples, as `cancel_request` does for all of a request."""
        ids = list(request_ids)
        if ids and self._thread.failure is None:
            self._thread.submit_now(Abort(ids))

    # ---- outputs ---------------------------------------------------------------------------------------------

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next output of one request, or of any.

        Returns:
            None after `timeout` seconds, or when nothing can come any more.

        Raises:
            ValueError: `request_id` is unknown or its last output was taken.
            EngineError: the engine has failed and everything it left has been taken.
        """
        if request_id is not None and not self._mailbox.is_open(request_id):
            raise ValueError(f"request_id {request_id!r} is unknown, or its last output has been taken")
        output = self._mailbox.take(request_id, timeout)
        if output is None and self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure
        return output

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Every output, until the manager has stopped and all are taken."""
        while (output := self._mailbox.take()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Generator[GenerationOutput, None, None]:
        """The outputs of one request up to its terminal one; nobody else receives them from now on.

        Raises:
            ValueError: the id is unknown or its last output was taken.
        """
        self._mailbox.claim(request_id)

        def outputs() -> Generator[GenerationOutput, None, None]:
            while (output := self._mailbox.take(request_id)) is not None:
                yield output
                if output.is_finished():
                    return

        return outputs()

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Calls `callback` in the running asyncio loop with every output of a request, those waiting first.

        Raises:
            RuntimeError: no asyncio loop runs in this thread. ValueError: the id is unknown.
        """
        loop = asyncio.get_running_loop()
        self._mailbox.register(request_id, lambda output: post(loop, callback, output))

    # ---- weights and figures ---------------------------------------------------------------------------------

    def weights_changed(self) -> None:
        """Tells that weights of the model or its drafter were written in a way torch does not count (by `.data`)."""
        self._thread.call(self.engine.weights_changed)

    def update_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes new values into the model, in place, at a step's edge; see `Engine.update_weights`."""
        self._thread.call(lambda: self.engine.update_weights(tensors))

    def sync_weights(self) -> None:
        """Looks whether the model's weights, or its drafter's, have changed and takes the change over; `generate_batch`
        does this."""
        self._thread.call(self.engine.sync_weights)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        self._thread.call(self.engine.reset_prefix_cache)

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self.engine.stats()

    def coverage(self) -> Coverage:
        """Which padded shapes were warmed, used, never used and missed."""
        return self.engine.coverage

    def _on_thread_end(self, failure: BaseException | None) -> None:
        if failure is not None:
            left = [_failed_output(request_id, str(failure)) for request_id in self._mailbox.undelivered_ids()]
            self._mailbox.deliver(left)
        self._mailbox.close()


def spread_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    """One entry per input.

    Raises:
        ValueError: a list of another length.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise TypeError(f"sampling_params must be a SamplingParams or a list of them, not {params!r}")
    if len(params) != count:
        raise ValueError(f"sampling_params has {len(params)} entries for {count} inputs; give one for all or one each")
    return list(params)


def _failed_output(request_id: str, error: str) -> GenerationOutput:
    return GenerationOutput(request_id, error=error, status=RequestStatus.FAILED, finish_reason="error")


def post(
    loop: asyncio.AbstractEventLoop, callback: Callable[[GenerationOutput], None], output: GenerationOutput
) -> None:
    """Calls `callback(output)` in a loop of another thread."""
    try:
        loop.call_soon_threadsafe(callback, output)
    except RuntimeError:  # the loop is closed: nobody waits any more
        logger.debug("the event loop of request %s is closed", output.request_id)
