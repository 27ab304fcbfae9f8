"""The offline facade: `generate`, `chat`, `beam_search`, `run(program)`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from dataclasses import replace
from numbers import Integral
from types import UnionType
from typing import Any, Literal, NamedTuple, cast

import torch

from treewise.awaitables import Observe, generate
from treewise.branch import Branch, BranchTree
from treewise.budgets import Budget
from treewise.codec import Message, checked_tokens
from treewise.config import BeamSearchParams, SamplingParams, Speculation, check_integer
from treewise.constraint import Lexicon
from treewise.engine import Engine, Request
from treewise.kv import CacheStatistics, KVManager, KVUsage, make_pool
from treewise.live import LiveTree
from treewise.models import CausalLM, Tokenizer, load_tokenizer
from treewise.operations import Limits
from treewise.outputs import completions, draw, logprobs
from treewise.parallel import everywhere, load, make_runner
from treewise.results import ProgramOutput, RequestOutput, Tree, TreeNode
from treewise.sampler import Candidates, row_key
from treewise.search.beams import beams
from treewise.sizing import default_slots
from treewise.sparsity.policy import KVSparsity
from treewise.speculate.drafters import prepare
from treewise.speculate.speculator import Speculator
from treewise.tree import Forest
from treewise.turns import Conversation, opens_reply
from treewise.warmup import PROMPT, warm_up

Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation, which the model's chat template writes."""

Sparsity = str | KVSparsity | None
"""A policy of KV sparsity by name, or with settings; None is the engine's own."""

KV_CACHE_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn}
"""Element types of keys and values by name; ``None`` is the type of the weights."""


logger = logging.getLogger("treewise")


class RequestsFailed(ValueError):
    """Some of several requests failed; the others have completed.

    Attributes
    ----------
    errors : dict of int to BaseException
        By place among the prompts.
    outputs : list
        One output a prompt, None where it failed.
    """

    def __init__(self, errors: dict[int, BaseException], outputs: list[Any]) -> None:
        super().__init__("; ".join(f"prompts[{i}]: {_with_notes(error)}" for i, error in errors.items()))
        self.errors = errors
        self.outputs = outputs


class _Terms(NamedTuple):
    """What prompts are run with, one for all or one each; see `LLM.generate`."""

    priority: int | Sequence[int]
    namespace: str | Sequence[str]
    kv_sparsity: Sparsity | Sequence[Sparsity]


class LLM:
    """A language model that decodes trees.

    One thread at a time may use it; several of them may live in one process.

    Parameters
    ----------
    model : str or CausalLM
        A built-in name (``"smollm2-135m"``), a Transformers folder, a GGUF file or a hub id; or a model in memory.
    tokenizer : Tokenizer, optional
        Of a model in memory; files bring their own.
    attention : str
        ``"auto"`` or a method of `treewise.attention.METHODS`, such as ``"deft:flatten"``.
    dtype : str
        ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``; of the weights and all that is computed with them.
        ``"auto"`` is float32 on a CPU; on a GPU the type of 16 bits that the model comes in, else bfloat16.
    kv_cache_dtype : str
        Type of keys and values in the pool: ``"auto"``, that of the weights, or ``"fp8_e4m3"``, which takes 8 bits and
        keeps 3 of the mantissa.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"``.
    pool : {"paged", "contiguous"}
        How the slots of keys and values are managed.
    page_size : int
        Tokens a page of the paged pool: 1, 16, 32 or 64.
    max_model_len : int, optional
        The most tokens of a path, prompt included; the model's own limit by default.
    max_num_rows : int
        The most rows of one step; longer prompts are taken in chunks.
    num_kv_slots : int, optional
        Tokens that the pool can hold; by default what fits in 2 GiB, on a GPU what
        `gpu_memory_utilization` leaves.
    gpu_memory_utilization : float
        Share of a GPU's memory that weights, the largest step and the pool may take together.
    enable_prefix_caching : bool
        Keep the keys of ended requests and share them by prefix.
    cuda_graphs : bool, optional
        Replay steps of decoding as CUDA graphs, whose trees may fork, grow and be pruned in between; by default where
        there is a GPU.
    capture_rows : int
        Where steps are captured, common ones of up to so many rows are before the first request, which takes a few
        seconds; others are when they come the second time. 0: nothing is done beforehand.
    seed : int
        Of all requests that have no seed of their own.
    speculate : str or Speculation, optional
        Who guesses what follows, so that a step may verify several tokens: the name of a drafter, or more settings.
        What is decoded does not depend on it.
    kv_sparsity : str or KVSparsity, optional
        Which keys and values of a prompt each layer keeps once it is computed, see `treewise.sparsity.policy`; by name
        one of `treewise.sparsity.presets.PRESETS`. All by default. Requests may ask for another policy; `"full"` keeps
        everything.
    kv_budget : int or float, optional
        Tokens a layer keeps under policies that are given by name, or the share of the prompt's tokens.
    tensor_parallel_size : int
        Devices, with a process each, that share the model out; see `treewise.parallel.load`. A model in memory is
        shared out already, or on one device.

    Examples
    --------
    >>> llm = LLM("smollm2-135m")
    >>> [answer] = llm.chat([{"role": "user", "content": "Name a colour."}])
    >>> text = answer.outputs[0].text
    """

    def __init__(
        self,
        model: str | CausalLM = "smollm2-135m",
        *,
        tokenizer: Tokenizer | None = None,
        attention: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        device: str = "auto",
        pool: str = "paged",
        page_size: int = 16,
        max_model_len: int | None = None,
        max_num_rows: int = 1024,
        num_kv_slots: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        cuda_graphs: bool | None = None,
        capture_rows: int = 256,
        seed: int = 0,
        speculate: str | Speculation | None = None,
        kv_sparsity: str | KVSparsity | None = None,
        kv_budget: float | None = None,
        tensor_parallel_size: int = 1,
    ) -> None:
        device = _resolve_device(device)
        if max_num_rows < 1:
            raise ValueError(f"max_num_rows: {max_num_rows} rows a step are too few; at least 1")
        check_integer("capture_rows", capture_rows, 0)
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}; choose one of {', '.join(KV_CACHE_DTYPES)}")
        if isinstance(model, CausalLM):
            if tokenizer is None:
                raise ValueError("tokenizer: a model in memory needs the tokenizer that belongs to it")
            causal_lm, self.tokenizer, self.model_name = model, tokenizer, model.config.architecture
        else:
            causal_lm = load(model, tensor_parallel_size, dtype=dtype, device=device)
            self.tokenizer, self.model_name = load_tokenizer(model), model
        if tensor_parallel_size not in (1, causal_lm.num_ranks):
            raise ValueError(
                f"tensor_parallel_size is {tensor_parallel_size}; the model in memory has {causal_lm.num_ranks} ranks"
            )
        config = causal_lm.config
        if max_model_len is not None and not 0 < max_model_len <= config.max_positions:
            raise ValueError(f"max_model_len: {max_model_len} is not within 1 to the model's {config.max_positions}")
        self.max_model_len = config.max_positions if max_model_len is None else max_model_len
        kv_dtype = KV_CACHE_DTYPES[kv_cache_dtype] or causal_lm.dtype
        settings = _speculation(speculate, pool, causal_lm.num_ranks)
        drafter = None if settings is None else prepare(settings.drafter, causal_lm, self.tokenizer)
        if num_kv_slots is None:
            beside = 0 if drafter is None else drafter.bytes_per_token
            num_kv_slots = everywhere(
                causal_lm, default_slots, kv_dtype, page_size, max_num_rows, gpu_memory_utilization, beside
            )
        slots = make_pool(pool, num_kv_slots, page_size)
        runner = make_runner(causal_lm, attention, slots.num_slots, slots.page_size, kv_dtype, cuda_graphs)
        eos_token_ids = self.tokenizer.eos_token_ids
        lexicon = Lexicon(self.tokenizer, config.vocab_size, eos_token_ids)
        kv = KVManager(Forest(), slots, enable_prefix_caching, config.num_kv_heads)
        speculator = None
        if settings is not None and drafter is not None:
            speculator = Speculator(drafter.make(runner, max_num_rows), kv, settings.tree_size, settings.adaptive)
        self.engine = Engine(
            runner,
            kv,
            self.tokenizer,
            Limits(eos_token_ids, self.max_model_len, config.vocab_size, lexicon),
            max_num_rows,
            seed,
            speculator,
        )
        self.kv_budget = kv_budget
        self.kv_sparsity = sparsity_policy(kv_sparsity, kv_budget)
        if self.kv_sparsity is not None:
            self.engine.thinner.check(self.kv_sparsity)
            self.engine.thinner.prepare(self.kv_sparsity)
        kept = None if self.kv_sparsity is None else self.engine.thinner.kept_of(self.kv_sparsity, PROMPT)
        everywhere(runner, warm_up, max_num_rows, capture_rows, kept)
        self._streams: dict[BranchTree, deque[tuple[Branch, str]]] = {}
        self._started: dict[Request, tuple[Future[ProgramOutput], str]] = {}  # by `start`, with the program's name
        logger.info("%s", ", ".join(f"{name} {value}" for name, value in self.describe().items()))

    # ------------------------------------------------------------------ what a user calls

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        namespace: str | Sequence[str] = "",
        kv_sparsity: Sparsity | Sequence[Sparsity] = None,
    ) -> list[RequestOutput]:
        """Complete each prompt ``params.n`` times; all of it is one batch.

        Parameters
        ----------
        prompts : str, list of int, list of messages, or list of these
            Text, token ids, or a conversation, whose turns `Branch.message` goes on from.
        params : SamplingParams or list of them, optional
            One for all prompts, or one each.
        priority : int or list of int
            One for all prompts, or one each. The higher goes first, the earlier of equal ones.
        namespace : str or list of str
            One for all prompts, or one each. Only requests of one namespace share cached prefixes.
        kv_sparsity : str, KVSparsity or list of them, optional
            One for all prompts, or one each: which keys of the prompt stay; by default as the engine was told.

        Raises
        ------
        ValueError
            If a single prompt is bad.
        RequestsFailed
            If some of several requests failed; it carries the outputs of the others.
        """
        prompts = _listed(prompts)
        each = _one_each("params", SamplingParams() if params is None else params, SamplingParams, len(prompts))
        programs = [lambda root, own=own: sample(root, own) for own in each]
        requests = self._complete(
            prompts, programs, [own.seed for own in each], _Terms(priority, namespace, kv_sparsity)
        )
        return self._collect(requests, lambda i, request: self._request_output(prompts[i], request))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        namespace: str | Sequence[str] = "",
        kv_sparsity: Sparsity | Sequence[Sparsity] = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, formatted by the model's chat template; see `generate`.

        Raises
        ------
        ValueError
            If the model has no chat template or the template refuses the messages.
        """
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if single else messages)
        prompts = [self.tokenizer.apply_chat_template(turns) for turns in conversations]
        return self.generate(prompts, params, priority=priority, namespace=namespace, kv_sparsity=kv_sparsity)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        namespace: str = "",
        kv_sparsity: Sparsity = None,
    ) -> Iterator[str]:
        """Yield the text of one completion as it grows; the pieces join to what `generate` returns.

        Raises
        ------
        ValueError
            If the prompt is bad, or ``params.n`` is not 1.
        """
        params = SamplingParams() if params is None else params
        if params.n != 1:
            raise ValueError(f"n: a stream is one completion, not {params.n}")
        terms = _Terms(priority, namespace, kv_sparsity)
        [request] = self._submit([prompt], [lambda root: sample(root, params)], [params.seed], terms)
        with closing(self._follow(request)) as pieces:
            yield from (piece for _, piece in pieces)

    def stream_program(
        self,
        program: Callable[..., Coroutine[Any, Any, Any]],
        prompt: Prompt,
        *,
        seed: int | None = None,
        priority: int = 0,
        namespace: str = "",
        kv_sparsity: Sparsity = None,
        **kwargs: Any,
    ) -> Generator[tuple[Branch, str], None, ProgramOutput]:
        """Run ``program(root, **kwargs)`` over a tree, and yield what its branches decode, as they grow.

        Returns
        -------
        generator of (Branch, str)
            A branch, and a piece of text that it has gained. The pieces of a branch come in order and join to what it
            has decoded; those of several branches come as they are decoded. Nothing of a stop string is among them.
            A branch that a controller, such as beam search, forked goes on behind the pieces of its parent. The
            generator's own value, ``yield from``'s result, is what `run` returns for the prompt.

        Raises
        ------
        ValueError
            If the prompt is bad.
        Exception
            What the program raised.
        """
        seeds = [None if seed is None else row_key(seed, (0,))]
        terms = _Terms(priority, namespace, kv_sparsity)
        [request] = self._submit([prompt], [lambda root: program(root, **kwargs)], seeds, terms)
        return self.program_output((yield from self._follow(request)), program.__name__)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        priority: int | Sequence[int] = 0,
        namespace: str | Sequence[str] = "",
        kv_sparsity: Sparsity | Sequence[Sparsity] = None,
    ) -> list[RequestOutput]:
        """Search the likeliest completions with ``params.beam_width`` beams, as Transformers does; see `generate`.

        The outputs are the best hypotheses, best first; their branches' scores are length-penalised.
        """
        prompts = _listed(prompts)
        programs = [lambda root: search_beams(root, params)] * len(prompts)
        requests = self._complete(prompts, programs, [None] * len(prompts), _Terms(priority, namespace, kv_sparsity))
        return self._collect(requests, lambda i, request: self._request_output(prompts[i], request))

    def run(
        self,
        program: Callable[..., Coroutine[Any, Any, Any]],
        prompts: Prompt | Sequence[Prompt],
        *,
        seed: int | None = None,
        priority: int | Sequence[int] = 0,
        namespace: str | Sequence[str] = "",
        kv_sparsity: Sparsity | Sequence[Sparsity] = None,
        token_budget: int | None = None,
        time_budget: float | None = None,
        on_error: Literal["raise", "return"] = "raise",
        live: LiveTree | None = None,
        **kwargs: Any,
    ) -> list[ProgramOutput]:
        """Run ``program(root, **kwargs)`` over a tree for each prompt, all trees in one batch.

        Parameters
        ----------
        program : async function
            Takes the root `Branch`; see `treewise.awaitables` for what it can await.
        prompts : str, list of int, list of messages, or list of these
            See `generate`.
        seed : int, optional
            The same seed gives the same trees.
        priority, namespace
            See `generate`.
        token_budget : int, optional
            Tokens that the program may decode for each prompt; see `treewise.limit` for what happens then.
        time_budget : float, optional
            Seconds that the program may take for each prompt, waiting for its turn included.
        on_error : {"raise", "return"}
            What becomes of a prompt that was started and whose program failed: raise its error, or return an output
            that has it as `error`, with the tree as far as it had come.
        live : LiveTree, optional
            Draws the trees in the terminal while they grow.

        Raises
        ------
        ValueError
            If an option is wrong, or a single prompt is bad.
        RequestsFailed
            If some of several requests failed; it carries the outputs of the others.
        Exception
            What the program of a single prompt raised, `BudgetExceeded` for example.
        """
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error: {on_error!r} is not one of raise, return")
        prompts = _listed(prompts)
        seeds = [None if seed is None else row_key(seed, (i,)) for i in range(len(prompts))]
        programs = [lambda root: program(root, **kwargs)] * len(prompts)
        budgets = [Budget(token_budget, time_budget) for _ in prompts]
        with live or nullcontext():
            terms = _Terms(priority, namespace, kv_sparsity)
            requests = self._complete(prompts, programs, seeds, terms, budgets, live=live)
        tolerant = on_error == "return"
        return self._collect(requests, lambda i, request: self.program_output(request, program.__name__), tolerant)

    def start(
        self,
        program: Callable[..., Coroutine[Any, Any, Any]],
        prompt: Prompt,
        *,
        seed: int | None = None,
        priority: int = 0,
        namespace: str = "",
        kv_sparsity: Sparsity = None,
        **kwargs: Any,
    ) -> Future[ProgramOutput]:
        """Start ``program(root, **kwargs)`` over a tree, and come back at once; `wait` takes it on.

        Parameters
        ----------
        program, prompt, seed, priority, namespace, kv_sparsity
            See `run`, which brings the same with this prompt alone.

        Returns
        -------
        Future of ProgramOutput
            It ends in a call that steps, such as `wait`, with what the program raised if it did. To cancel it ends the
            program.

        Raises
        ------
        ValueError
            If the prompt is bad.
        """
        terms = _Terms(priority, namespace, kv_sparsity)
        seeds = [None if seed is None else row_key(seed, (0,))]
        [request] = self._submit([prompt], [lambda root: program(root, **kwargs)], seeds, terms)
        if isinstance(request, BaseException):
            raise request
        future: Future[ProgramOutput] = Future()
        self._started[request] = future, getattr(program, "__name__", type(program).__name__)

        def ended(_: Future[ProgramOutput]) -> None:
            self._started.pop(request, None)
            self.engine.abort(request)

        future.add_done_callback(ended)
        return future

    def wait(self, futures: Collection[Future[ProgramOutput]]) -> None:
        """Step until at least one of some futures of `start` has ended.

        Raises
        ------
        ValueError
            If none of them will, as they are of another engine.
        """
        while not any(future.done() for future in futures):
            if not any(future in futures for future, _ in self._started.values()):
                raise ValueError("futures: nothing of what this engine has started is among them")
            self._step()

    @property
    def cache_statistics(self) -> CacheStatistics:
        """What the prefix cache was asked for, and what it had, so far."""
        return replace(self.engine.kv.statistics)

    @property
    def kv_usage(self) -> KVUsage:
        """What keys and values take now, and what they would take if no layer had given up any."""
        engine = self.engine
        return engine.kv.usage(engine.runner.kv_bytes_per_token, engine.thinner.num_bytes)

    def describe(self) -> dict[str, str | int]:
        """Tell what was loaded and what it can hold; logged at start under the name ``treewise``.

        Returns
        -------
        dict
            Model, types, device, attention method; ranks, and bytes of the weights on all of them; tokens of the KV
            pool and bytes of each, on all ranks together; the longest context and the most rows of a step.
        """
        runner = self.engine.runner
        return {
            "model": self.model_name,
            "dtype": str(runner.dtype).removeprefix("torch."),
            "kv_dtype": str(runner.kv_dtype).removeprefix("torch."),
            "device": str(runner.device),
            "attention": runner.attention,
            "tensor_parallel_size": runner.num_ranks,
            "weight_bytes": runner.weight_bytes,
            "kv_tokens": self.engine.kv.num_slots,
            "kv_bytes_per_token": runner.kv_bytes_per_token,
            "max_model_len": self.max_model_len,
            "max_num_rows": self.engine.scheduler.max_num_rows,
        }

    # ------------------------------------------------------------------ requests

    def _submit(
        self,
        prompts: Sequence[Prompt],
        programs: Sequence[Any],
        seeds: Sequence[int | None],
        terms: _Terms,
        budgets: Sequence[Budget | None] | None = None,
    ) -> list[Request | BaseException]:
        """Start what can be started; the error of each prompt that cannot."""
        priorities = _one_each("priority", terms.priority, int, len(prompts))
        namespaces = _one_each("namespace", terms.namespace, str, len(prompts))
        sparsities = _one_each("kv_sparsity", terms.kv_sparsity, str | KVSparsity | None, len(prompts))
        names = ("priority", "namespace", "budget")
        each = zip(priorities, namespaces, budgets or [None] * len(prompts), strict=True)
        started: list[Request | BaseException] = []
        try:
            for prompt, program, seed, kept, own in zip(prompts, programs, seeds, sparsities, each, strict=True):
                try:
                    tokens, turns = self.encode(prompt)
                    policy = self.kv_sparsity if kept is None else sparsity_policy(kept, self.kv_budget)
                    named = dict(zip(names, own, strict=True))
                    request = self.engine.add(program, tokens, seed, **named, sparsity=policy)
                    request.tree.root.conversations += turns
                    started.append(request)
                except ValueError as error:
                    started.append(error)
        except BaseException:
            self._abort(started)
            raise
        return started

    def _complete(
        self, prompts: Sequence[Prompt], *arguments: Any, live: LiveTree | None = None
    ) -> list[Request | BaseException]:
        """Start what can be started, see `_submit`, and step until all of it has ended; on an interrupt, end it."""
        requests = self._submit(prompts, *arguments)
        started = [request for request in requests if isinstance(request, Request)]
        try:
            while not all(request.done for request in started):
                self._step()
                if live is not None:
                    live.update([request.tree for request in started])
        except BaseException:
            self._abort(requests)
            raise
        return requests

    def _abort(self, requests: Sequence[Request | BaseException]) -> None:
        for request in requests:
            if isinstance(request, Request):
                self.engine.abort(request)

    def _follow(self, request: Request | BaseException) -> Generator[tuple[Branch, str], None, Request]:
        """Step until `request` has ended, and yield what its branches gain; raise its error."""
        if isinstance(request, BaseException):
            raise request
        pieces = self._streams[request.tree] = deque()
        try:
            while pieces or not request.done:
                if not pieces:
                    self._step()
                while pieces:
                    yield pieces.popleft()
        finally:
            del self._streams[request.tree]
            self.engine.abort(request)
        if request.error is not None:
            raise request.error
        return request

    def _step(self) -> None:
        """Step for whoever asks; what streams gain by it is kept for them."""
        for gain in self.engine.step():
            if gain.tree in self._streams:
                self._streams[gain.tree].extend((event.branch, event.text) for event in gain.events() if event.text)
        for request in [request for request in self._started if request.done]:
            future, name = self._started.pop(request)
            if request.error is None:
                future.set_result(self.program_output(request, name))
            else:
                future.set_exception(request.error)

    def _collect(
        self,
        requests: Sequence[Request | BaseException],
        output: Callable[[int, Request], Any],
        tolerant: bool = False,
    ) -> list[Any]:
        """Return an output for each request; raise errors, those of requests that were started unless `tolerant`."""
        errors: dict[int, BaseException] = {}
        outputs: list[Any] = []
        for i, request in enumerate(requests):
            error = request if isinstance(request, BaseException) else None if tolerant else request.error
            if error is not None:
                errors[i] = error
            outputs.append(None if isinstance(request, BaseException) or error else output(i, request))
        if len(requests) == 1 and errors:
            raise errors[0]
        if errors:
            raise RequestsFailed(errors, outputs)
        return outputs

    def encode(self, prompt: Prompt) -> tuple[list[int], list[Conversation]]:
        """Return a prompt's tokens, and the turns that it is known to have.

        Raises
        ------
        ValueError
            If it is no prompt, or has what the vocabulary or the chat template does not know.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt), []
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
            turns = cast(Sequence[Message], prompt)
            if not all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in turns):
                raise ValueError(f"prompt: {prompt!r} is a list of mappings, but not of messages with role and content")
            reply = opens_reply(turns[-1]["role"])
            tokens = self.tokenizer.apply_chat_template(turns, add_generation_prompt=reply)
            return tokens, [Conversation(tuple(turns), reply, len(tokens))]
        return checked_tokens("prompt", prompt, self.tokenizer.vocab_size), []

    # ------------------------------------------------------------------ results

    def _request_output(self, prompt: Prompt, request: Request) -> RequestOutput:
        prompt_candidates, branches = request.result
        prompt_logprobs = None
        if prompt_candidates is not None:
            prompt_logprobs = [None, *(logprobs(candidates, self.tokenizer) for candidates in prompt_candidates)]
        return RequestOutput(
            request_id=request.id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=request.tree.prompt_tokens,
            prompt_logprobs=prompt_logprobs,
            outputs=completions(branches),
            tree=self.tree(request, branches[0] if branches else None, "generate"),
        )

    def program_output(self, request: Request, name: str) -> ProgramOutput:
        """Return what came of a program that has ended; `name` is what drawings of its tree call it."""
        value = request.result
        best = value
        while isinstance(best, list | tuple) and best:
            best = best[0]
        best = best if isinstance(best, Branch) else None
        leaves = [b for b in request.tree.known_branches() if not b.pruned and not b.children and b.parent is not None]
        return ProgramOutput(
            value=value,
            best=None if best is None else completions([best])[0],
            outputs=completions(leaves),
            tree=self.tree(request, best, name),
            error=request.error,
        )

    def tree(self, request: Request, best: Branch | None, strategy: str) -> Tree:
        """Return the tree of a request that has ended, drawn when it is looked at."""

        def drawn() -> tuple[list[TreeNode], int | None]:
            nodes, ends = draw(request.tree)
            return nodes, None if best is None else ends.get(best)

        return Tree.drawn_by(drawn, usage=request.usage(), strategy=strategy, model=self.model_name)


async def search_beams(root: Branch, params: BeamSearchParams) -> tuple[None, list[Branch]]:
    """Search the likeliest completions; what `LLM.beam_search` runs."""
    return None, await beams(root, params)


async def sample(
    root: Branch, params: SamplingParams, *, in_step: bool = False
) -> tuple[list[Candidates] | None, list[Branch]]:
    """Score the prompt if asked, then complete it ``params.n`` times; what `LLM.generate` runs.

    Parameters
    ----------
    root : Branch
        Its `note` is the prompt's scores, once they are there.
    params : SamplingParams
    in_step : bool
        See `treewise.generate`.

    Returns
    -------
    (list of Candidates or None, list of Branch)
        What was likely in the place of each token of the prompt but the first, and the completions.
    """
    if params.prompt_logprobs is not None:
        [root.note] = await Observe([root], [1], params.prompt_logprobs)
    return root.note, await generate(root.fork(params.n), replace(params, n=1), in_step=in_step)


def _speculation(speculate: str | Speculation | None, pool: str, num_ranks: int) -> Speculation | None:
    """Return how to guess, checked."""
    settings = Speculation(speculate) if isinstance(speculate, str) else speculate
    if not isinstance(settings, Speculation | None):
        raise ValueError(f"speculate: {speculate!r} is neither the name of a drafter nor a Speculation")
    if settings is not None and pool == "contiguous":
        raise ValueError("speculate: guesses borrow slots, which the pool 'contiguous' does not lend; choose 'paged'")
    if settings is not None and num_ranks > 1 and not settings.drafter.startswith("ngram"):
        raise ValueError(
            f"speculate: {settings.drafter!r} computes its guesses, which ranks do not do together; "
            "choose 'ngram' or 'ngram:shared', or tensor_parallel_size=1"
        )
    return settings


def sparsity_policy(sparsity: Sparsity, budget: float | None) -> KVSparsity | None:
    """Return which keys stay, checked; a policy by name has `budget`, if there is one.

    Raises
    ------
    ValueError
        If there is no such policy, or the budget is out of range.
    """
    if isinstance(sparsity, str):
        return KVSparsity.named(sparsity, **({} if budget is None else {"budget": budget}))
    if not isinstance(sparsity, KVSparsity | None):
        raise ValueError(f"kv_sparsity: {sparsity!r} is neither the name of a policy nor a KVSparsity")
    return sparsity


def _with_notes(error: BaseException) -> str:
    """Return what `error` says, and where it has been."""
    notes = getattr(error, "__notes__", ())
    return f"{error} ({'; '.join(notes)})" if notes else str(error)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several, from a list, an array or whatever can be iterated over, as a list."""
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: {prompts!r} is neither text, nor token ids, nor a list of these")
    several: list[Any] = [prompts] if isinstance(prompts, str) else list(getattr(prompts, "tolist", prompts.__iter__)())
    return [several] if several and isinstance(several[0], Integral | Mapping) else several


def _one_each(name: str, values: Any, kind: type[Any] | UnionType, count: int) -> list[Any]:
    """Return `values`, one of `kind` or a list of them, as one for each of `count` prompts."""
    single = isinstance(values, kind) or not isinstance(values, Iterable)
    each = [values] * count if single else list(values)
    for value in each:
        if not isinstance(value, kind):
            raise ValueError(f"{name}: {value!r} is not of type {getattr(kind, '__name__', kind)}")
    if len(each) != count:
        raise ValueError(f"{name}: {len(each)} for {count} prompts; give one, or one each")
    return each


def _resolve_device(name: str) -> str:
    """Return a device that is there, the GPU for ``"auto"`` where there is one."""
    there = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if there else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"device: {name!r} is not one of auto, cpu, cuda")
    if name.startswith("cuda") and not there:
        raise ValueError(f"device: {name!r} was asked for, but PyTorch sees no GPU here")
    return name
