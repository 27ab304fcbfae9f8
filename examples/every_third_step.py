"""Every third step each leaf branches in two: once as a controller, once as a program.

Both make the same tree: after three branchings 2 x 2 x 2 leaves, whose common beginnings are stored and read once.
"""

from treewise import LLM, Branch, Rows, SamplingParams, TreeView, decode, generate


class EveryThirdStep:
    stopping = SamplingParams(max_tokens=12, ignore_eos=True)

    def step(self, tree: TreeView, logprobs) -> Rows:
        width = 2 if tree.depth % 3 == 0 and tree.depth > 0 else 1
        tokens = tree.logits.topk(width).indices  # [leaves, width]
        leaves = [leaf for leaf in range(len(tree.leaves)) for _ in range(width)]
        return Rows(leaves, tokens.flatten())


async def every_third_step(root: Branch) -> list[Branch]:
    params = SamplingParams(temperature=0.8, max_tokens=3, ignore_eos=True)
    leaves = await generate(root.fork(1), params)
    for _ in range(3):
        leaves = await generate([twin for leaf in leaves for twin in leaf.fork(2)], params)
    return leaves


async def controlled(root: Branch) -> list[Branch]:
    return await decode(root.fork(1), EveryThirdStep())


if __name__ == "__main__":
    llm = LLM("smollm2-135m")
    for program in (controlled, every_third_step):
        [result] = llm.run(program, ["Once upon a time"])
        result.tree.print()
