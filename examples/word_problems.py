"""Arithmetic word problems by self-consistency: many worked solutions, and the answer that most of them come to.

A model of 135 million parameters gets the easy ones right and is often wrong where two steps are needed. The votes say
how sure to be: an answer with few of them is a guess.
"""

from treewise import LLM
from treewise.search import same_answer, self_consistency

SHOTS = """\
Q: Ann has 3 apples and buys 4 more. How many apples does she have?
A: Ann has 3 apples. She buys 4 more. 3 + 4 = 7. The answer is 7.

Q: A box holds 5 pens. How many pens are in 6 boxes?
A: Each box holds 5 pens. There are 6 boxes. 5 * 6 = 30. The answer is 30.

Q: Tom had 12 sweets and ate 5 of them. How many sweets are left?
A: Tom had 12 sweets. He ate 5. 12 - 5 = 7. The answer is 7.

"""
PROBLEMS = {
    "A pizza costs 9 dollars and a drink costs 3 dollars. What do they cost together?": "12",
    "Mia reads 4 pages a day. How many pages does she read in 5 days?": "20",
    "There were 15 birds in a tree and 6 flew away. How many birds are left?": "9",
    "Sam buys 3 bags of 4 oranges and eats 2 oranges. How many oranges are left?": "10",
}
SETTINGS = {"n": 8, "temperature": 0.7, "max_tokens": 48, "stop": "\n"}


def main() -> None:
    """Solve all problems in one batch; the worked examples at the top are computed once."""
    llm = LLM("smollm2-135m", device="cpu")
    prompts = [f"{SHOTS}Q: {question}\nA:" for question in PROBLEMS]
    right = 0
    results = llm.run(self_consistency, prompts, seed=0, **SETTINGS)
    for (question, answer), result in zip(PROBLEMS.items(), results, strict=True):
        winner = result.value[0]
        verdict = "right" if winner.note is not None and same_answer(winner.note) == answer else "wrong"
        right += verdict == "right"
        print(f"\n{question}\n{winner.note} with {winner.score:.0%} of the votes: {verdict}")
        result.tree.print()
    print(f"\n{right} of {len(PROBLEMS)} are right")


if __name__ == "__main__":
    main()
