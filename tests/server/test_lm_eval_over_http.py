"""lm-eval's API models: their numbers are those of a direct forward."""

import asyncio

import pytest
import torch
from serving import listening

from treewise.llm import LLM

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'treewise[eval]'")
pytestmark = pytest.mark.anyio

PAIRS = [
    (context, choice) for context in ("Q: 1 + 1 =", "Hello wor", "") for choice in (" 2", "ld", " four words more")
]


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def api(server, name="local-completions", **options):
    from lm_eval.api.registry import get_model

    path = "/v1/chat/completions" if "chat" in name else "/v1/completions"
    url = f"{server.client.base_url}{path}"
    return get_model(name)(base_url=url, max_retries=1, max_length=500, **options)


async def test_loglikelihoods_are_those_of_a_direct_forward(tiny_folder):
    llm = LLM(str(tiny_folder), device="cpu", num_kv_slots=4096)
    model, tokenizer = llm.engine.runner.model, llm.tokenizer
    from model_files import run_dense

    async with listening(llm) as server:

        def scores(batch_size):
            lm = api(server, model=tiny_folder.name, tokenizer_backend="auto", batch_size=batch_size)
            assert lm.tokenizer_backend == "remote" and lm.eot_token_id == 256
            return lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)

        for batch_size in (1, 4):
            found = await asyncio.to_thread(scores, batch_size)
            for (context, choice), (logprob, is_greedy) in zip(PAIRS, found, strict=True):
                given = tokenizer.encode(context) or [256]
                wanted = tokenizer.encode(choice)
                table = run_dense(model, [*given, *wanted])[len(given) - 1 : -1].log_softmax(-1)
                own = table.gather(1, torch.tensor(wanted)[:, None])
                assert logprob == pytest.approx(float(own.sum()), abs=1e-3)
                assert is_greedy == (table.argmax(-1).tolist() == wanted)
        assert len({logprob for logprob, _ in found}) == len(PAIRS)
        await server.idle()


@pytest.mark.parametrize("name", ["local-completions", "local-chat-completions"])
async def test_generations(tiny_folder, name):
    llm = LLM(str(tiny_folder), device="cpu", num_kv_slots=4096)
    async with listening(llm) as server:
        asked = [(text, {"until": ["\n\n"], "max_gen_toks": 9, "do_sample": False}) for text in ("ab", "xyz")]

        def generate():
            if "chat" in name:
                from lm_eval.models.api_models import JsonChatStr

                asked_of = [
                    (JsonChatStr(f'[{{"role": "user", "content": "{text}"}}]'), options) for text, options in asked
                ]
            else:
                asked_of = asked
            lm = api(server, name, model=tiny_folder.name)
            return lm.generate_until(instances("generate_until", asked_of), disable_tqdm=True)

        found = await asyncio.to_thread(generate)
        for (text, _), answer in zip(asked, found, strict=True):
            body = {"max_tokens": 9, "temperature": 0, "stop": ["\n\n"]}
            if "chat" in name:
                expected = (await server.chat(text, **body))["choices"][0]["message"]["content"]
            else:
                expected = (await server.complete(text, **body))["choices"][0]["text"]
            assert answer == expected
