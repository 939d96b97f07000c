"""Engines on a CPU, each in a process of its own.

A spawned process finds them here: what `__main__.py` of a package has cannot be sent to it.
"""

from __future__ import annotations

import multiprocessing
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import transformers

from pagedray import LLM, SamplingParams

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

__all__ = ["Engine", "EngineProcess", "PagedRay", "Transformers"]

_MAX_MODEL_LEN = 2048
"""The context of some shapes would not fit the memory of small machines."""


class Engine(ABC):
    """One of the two engines, in a process of its own."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        """Generate greedily from prompts of equal length."""

    @abstractmethod
    def mixed(self, prompts: list[list[int]], lengths: list[int]) -> None:
        """Generate `lengths` tokens from prompts of mixed lengths, submitted at once."""


class PagedRay(Engine):
    """This project, with a rank in the process."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        self._llm = LLM(
            folder,
            executor="local",
            device="cpu",
            dtype=dtype,  # type: ignore[arg-type]  # one of its values
            num_threads=threads,
            enable_prefix_cache=False,
            max_model_len=_MAX_MODEL_LEN,
            show_progress=False,
        )

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        self.mixed(prompts, [num_tokens] * len(prompts))

    def mixed(self, prompts: list[list[int]], lengths: list[int]) -> None:
        params = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            for length in lengths
        ]
        generations = self._llm.generate(prompts, params, use_tqdm=False)
        for generation, length in zip(generations, lengths, strict=True):
            assert len(generation.outputs[0].token_ids) == length


class Transformers(Engine):
    """Hugging Face transformers, with its defaults."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        # Any: transformers' own models do not match the protocol that `generate` declares.
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()

    def generate(self, prompts: list[list[int]], num_tokens: int) -> None:
        input_ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert output.shape[1] == input_ids.shape[1] + num_tokens

    def mixed(self, prompts: list[list[int]], lengths: list[int]) -> None:
        # `generate_batch` takes one length for all, so each request is added to the manager.
        batching = transformers.generation.configuration_utils.ContinuousBatchingConfig(
            # The default cache takes half of the memory and seconds to clear.
            num_blocks=128,
            max_batch_tokens=2048,
        )
        generation = transformers.GenerationConfig(
            max_new_tokens=max(lengths), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        manager.start()
        try:
            for prompt, length in zip(prompts, lengths, strict=True):
                manager.add_request(prompt, max_new_tokens=length)
            num_tokens = 0
            num_finished = 0
            while num_finished < len(prompts):
                result = manager.get_result(timeout=60.0)
                if result is not None and result.is_finished():
                    num_tokens += len(result.generated_tokens)
                    num_finished += 1
        finally:
            manager.stop(block=True)
        assert num_tokens == sum(lengths)


class EngineProcess:
    """An engine in a process of its own, which sleeps between calls."""

    def __init__(self, kind: type[Engine], folder: Path, dtype: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, folder, dtype, threads))
        self._process.start()

    def seconds(self, method: str, *arguments: object) -> float:
        """Return how long a call takes."""
        self._connection.send((method, arguments))
        return float(self._connection.recv())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _serve(
    connection: Connection, kind: Any, folder: Path, dtype: str, threads: int
) -> None:  # Any: a class whose constructor takes these
    engine = kind(folder, dtype, threads)
    while True:
        method, arguments = connection.recv()
        started_s = time.perf_counter()
        getattr(engine, method)(*arguments)
        connection.send(time.perf_counter() - started_s)
