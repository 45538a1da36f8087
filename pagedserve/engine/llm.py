"""LLM: the engine for scripts and notebooks, in one process and one thread."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

from tqdm import tqdm

from pagedserve.config import (
    CacheConfig,
    EngineConfig,
    FrontConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    StructuredOutputConfig,
)
from pagedserve.engine.chat_template import ChatTemplate
from pagedserve.engine.input_processor import ProcessedInput
from pagedserve.engine.llm_engine import LLMEngine
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import ConfigError, EngineStepError, RequestError
from pagedserve.outputs import RequestOutput
from pagedserve.pooling_params import PoolingParams, floats
from pagedserve.sampling_params import BeamParams, SamplingParams

_SLICES: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "front": FrontConfig,
    "structured_output": StructuredOutputConfig,
}
# Shorter work shows no bar where nobody watches a terminal.
BAR_DELAY_SECONDS = 2.0

Prompt = str | list[int]
Message = dict[str, Any]


def make_config(**settings: Any) -> EngineConfig:
    """An EngineConfig from field names of its slices; for an unknown name ConfigError tells the nearest ones."""
    names = {field.name: part for part, kind in _SLICES.items() for field in dataclasses.fields(kind)}
    values: dict[str, dict[str, Any]] = {part: {} for part in _SLICES}
    for name, value in settings.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(names)}"
            raise ConfigError(f"unknown setting {name!r}{hint}")
        values[names[name]][name] = value
    return EngineConfig(**{part: kind(**values[part]) for part, kind in _SLICES.items()})


class LLM:
    """Text from prompts, offline.

        with LLM(model="smollm2-135m-instruct") as llm:
            for output in llm.generate(["The sky is"], SamplingParams(max_tokens=16)):
                print(output.outputs[0].text)

    Every field of the config slices is a keyword (`max_model_len`, `num_device_blocks`, `enable_prefix_caching`, …).
    Raises ConfigError, ModelNotFoundError or ModelLoadError.
    """

    def __init__(
        self,
        model: str = ModelConfig().model,
        *,
        block_size: int = 16,
        gpu_memory_utilization: float = 0.9,
        **settings: Any,
    ):
        config = make_config(
            model=model, block_size=block_size, gpu_memory_utilization=gpu_memory_utilization, **settings
        )
        self._front = config.front
        self.engine = LLMEngine(config)
        self._chat_template: ChatTemplate | None = None

    # -- generation ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continue one or many prompts (text, or lists of token ids); results come in the order of the prompts.

        `sampling_params` is one for all or one each; None takes the model's own defaults. Any mistake in any of them is
        raised before the first one runs. A request that fails later has `error` set and finish_reason "error".
        """
        items = _as_prompts(prompts)
        params = _one_each(sampling_params or self.get_default_sampling_params(), len(items), "sampling_params")
        priorities = _one_each(priority, len(items), "priority")
        prepared = []
        for index, (prompt, wanted, level) in enumerate(zip(items, params, priorities, strict=True)):
            prepared.append(self._prepare(index, prompt, wanted, level))
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists), through the chat template."""
        if not messages:
            raise RequestError("there are no messages", param="messages")
        conversations: Sequence[Any] = [messages] if isinstance(messages[0], dict) else messages
        template = self._template()
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = template.render(
                list(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            # The template writes BOS itself.
            prompts.append(self.engine.tokenizer.encode(text, add_special_tokens=False))
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamParams,
        *,
        max_tokens: int = 16,
        n: int | None = None,
        ignore_eos: bool = False,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The `n` (default: all `params.width`) best continuations of each prompt, best first."""
        sampling = SamplingParams(
            n=n or params.width, beam=params, max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos
        )
        return self.generate(prompts, sampling, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[list[float]]:
        """A vector for each prompt, in fp32; `pooling_params` are by default what the model's files ask for.

        Raises RequestError for a wrong prompt before any is computed, EngineStepError for one that could not be.
        """
        params = SamplingParams(max_tokens=0, pooling=pooling_params or self.engine.default_pooling)
        vectors = []
        for output in self.generate(prompts, params, use_tqdm=use_tqdm):
            if output.pooled is None:
                raise EngineStepError(output.error or "no vector was computed")
            vectors.append(floats(output.pooled))
        return vectors

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the defaults that the model's generation_config.json asks for."""
        return SamplingParams(**self.engine.default_sampling_params)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes."""
        return self.engine.reset_prefix_cache()

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model and the KV pools."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _prepare(self, index: int, prompt: Prompt, params: SamplingParams, priority: int) -> ProcessedInput:
        try:
            return self.engine.prepare(prompt, params, priority=priority)
        except RequestError as error:
            error.add_note(f"in prompt {index}")
            raise

    def _run(self, prepared: list[ProcessedInput], use_tqdm: bool) -> list[RequestOutput]:
        engine = self.engine
        waiting = iter(prepared)
        order = {item.request.request_id: index for index, item in enumerate(prepared)}
        results: list[RequestOutput | None] = [None] * len(prepared)
        progress = _Progress(len(prepared), enabled=use_tqdm)
        room = engine.queue_room
        try:
            pending = len(prepared)
            while pending:
                # The queue is bounded for servers; here the caller's list is the queue.
                for item in waiting:
                    engine.submit(item)
                    if engine.num_unfinished_requests >= room:
                        break
                for output in engine.step(only_finished=True):
                    results[order[output.request_id]] = output
                    pending -= 1
                    progress.finished(output)
        except BaseException:
            for request_id, index in order.items():
                if results[index] is None:
                    engine.abort(request_id)
            raise
        finally:
            progress.close()
        return [output for output in results if output is not None]

    def _template(self) -> ChatTemplate:
        if self._chat_template is None:
            self._chat_template = ChatTemplate.load(self.engine.tokenizer, self._front.chat_template)
        return self._chat_template


class _Progress:
    """A bar on stderr: at once in a terminal, elsewhere only for work that takes a while."""

    def __init__(self, total: int, *, enabled: bool):
        self._started = time.monotonic()
        self._num_tokens = 0
        delay = 0.0 if sys.stderr.isatty() else BAR_DELAY_SECONDS
        self._bar = tqdm(total=total, desc="generate", unit="req", file=sys.stderr, delay=delay, disable=not enabled)

    def finished(self, output: RequestOutput) -> None:
        """One more request is done."""
        self._num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(time.monotonic() - self._started, 1e-6)
        self._bar.set_postfix_str(f"{self._num_tokens / seconds:.1f} tokens/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise RequestError(f"{count} prompts, but {len(value)} {name}", param=name)
        return list(value)
    return [value] * count
