"""`treewise reproduce sparsity`: the account of KV sparsity in vLLM and its follow-up, measured again."""
