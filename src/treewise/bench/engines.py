"""Other engines, as whole: many prompts in, tokens out."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from treewise.bench.subject import Subject


@dataclass(frozen=True)
class Room:
    """What another engine is set up for.

    Attributes
    ----------
    sequences : int
        That run at a time, at most.
    length : int
        Tokens of the longest, prompt included.
    kv_tokens : int or None
        Tokens whose keys and values there is room for; None for what memory allows.
    """

    sequences: int
    length: int
    kv_tokens: int | None = None


class OtherEngine(Protocol):
    """Something that completes prompts."""

    def generate(self, prompts: Sequence[Sequence[int]], n: int, new_tokens: int, seed: int) -> int:
        """Complete each prompt `n` times by so many sampled tokens; return how many tokens were decoded."""


class Transformers:
    """`generate` of Transformers: one batch, whose prompts are equally long."""

    def __init__(self, subject: Subject, dtype: torch.dtype, room: Room) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self.device = subject.place
        with subject.folder() as folder:
            if subject.shape is None:
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(self.device)
            else:
                with self.device:
                    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
        self.model = model.eval()

    def generate(self, prompts: Sequence[Sequence[int]], n: int, new_tokens: int, seed: int) -> int:
        """See `OtherEngine.generate`."""
        torch.manual_seed(seed)
        ids = torch.tensor(prompts, device=self.device)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=n,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return int(output[:, ids.shape[1] :].numel())


VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that it ends with it
    "VLLM_LOGGING_LEVEL": "ERROR",  # nothing but results on standard output
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # which wants a compiler, and top-k or top-p
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""What is set where nothing else is."""


class VLLM:
    """`LLM.generate` of vLLM, with its prefix cache, which is emptied before each call."""

    def __init__(self, subject: Subject, dtype: torch.dtype, room: Room) -> None:
        for name, value in VLLM_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.package: Any = importlib.import_module("vllm")
        options: dict[str, Any] = {}
        if subject.place.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            options["gpu_memory_utilization"] = 0.85 * free / total
        if room.kv_tokens is not None:
            options["num_gpu_blocks_override"] = room.kv_tokens // 16
        with ExitStack() as stack:
            self.llm = self.package.LLM(
                model=str(stack.enter_context(subject.folder())),
                load_format="dummy" if subject.shape else "auto",
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=room.length,
                max_num_seqs=room.sequences,
                enable_prefix_caching=True,
                disable_log_stats=True,
                **options,
            )

    def generate(self, prompts: Sequence[Sequence[int]], n: int, new_tokens: int, seed: int) -> int:
        """See `OtherEngine.generate`."""
        self.llm.reset_prefix_cache()
        # No seed: a seed a request would make it draw for each request by itself.
        params = self.package.SamplingParams(
            n=n, temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)


OTHERS: dict[str, type[Transformers] | type[VLLM]] = {"transformers": Transformers, "vllm": VLLM}
INSTALL = {"transformers": "pip install 'treewise[transformers]'", "vllm": "pip install vllm"}


def check_installed(name: str) -> None:
    """Raise ValueError if the other engine of that name is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"against: {name} is not installed; {INSTALL[name]}")
