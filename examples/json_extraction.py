"""Facts out of sentences as JSON of a schema: sampled, voted on field by field, and searched with beams.

The grammar sees to the form: every text is JSON of the schema. It cannot see to the truth. A model of 135 million
parameters copies what stands in the sentence and gets wrong what it would have to infer; the votes show where.
"""

import json
from collections import Counter

from treewise import LLM, BeamSearchParams, Branch, Grammar, SamplingParams, generate

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
FACTS = {
    "Maria Lopez is a 34 year old nurse who lives in Toledo.": {"name": "Maria Lopez", "age": 34, "city": "Toledo"},
    "In Oslo I met Erik, a teacher of 51.": {"name": "Erik", "age": 51, "city": "Oslo"},
    "Ken moved from Kyoto to Osaka when he turned 20, three years ago.": {"name": "Ken", "age": 23, "city": "Osaka"},
}
QUESTION = "Who is it, how old is the person now, and in which city is the home? Answer with JSON: name, age, city."


async def extract(root: Branch, n: int) -> list[Branch]:
    params = SamplingParams(temperature=0.8, max_tokens=64, grammar=Grammar.json_schema(SCHEMA))
    return await generate(root.fork(n), params)


def main(n: int = 5, beam_width: int = 3) -> None:
    """Take all sentences in one batch, and the beams of all in another."""
    llm = LLM("smollm2-135m", device="cpu")
    turns = [[{"role": "user", "content": f"{sentence} {QUESTION}"}] for sentence in FACTS]
    prompts = [llm.tokenizer.apply_chat_template(turn) for turn in turns]
    beams = BeamSearchParams(beam_width, max_tokens=64, grammar=Grammar.json_schema(SCHEMA))
    searches = llm.beam_search(prompts, beams)
    right = 0
    for (sentence, facts), drawn, searched in zip(
        FACTS.items(), llm.run(extract, prompts, n=n, seed=0), searches, strict=True
    ):
        print(f"\n{sentence}")
        drawn.tree.print()
        answers = [json.loads(output.text) for output in drawn.outputs if output.finish_reason == "stop"]
        for field, truth in facts.items():
            votes = Counter(answer[field] for answer in answers).most_common(1)
            value, count = votes[0] if votes else (None, 0)
            right += value == truth
            print(f"{field}: {value!r} by {count} of {n}, {'right' if value == truth else f'wrong, it is {truth!r}'}")
        print(f"likeliest: {searched.outputs[0].text}")
    print(f"\n{right} of {sum(map(len, FACTS.values()))} fields are right")


if __name__ == "__main__":
    main()
