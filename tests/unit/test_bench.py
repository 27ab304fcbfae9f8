"""Benchmarks: trees of the right shape, times in seconds, a last line of JSON."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from treewise.bench.measure import check_device, copy_bandwidth, describe_machine, time_calls
from treewise.bench.trees import TREES, drafted_tree, find_tree, level_tree
from treewise.cli import main


def test_level_tree():
    tree = level_tree([1, 2, 4], [10, 5, 1])
    assert tree.parent.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert tree.length.tolist() == [10, 5, 5, 1, 1, 1, 1]
    assert tree.query_node.tolist() == [3, 4, 5, 6]
    assert find_tree("1/2/4:10/5/1").parent.tolist() == tree.parent.tolist()


def test_drafted_tree():
    tree = drafted_tree(100, 64)
    assert tree.num_tokens == 164 and tree.num_queries == 64
    assert all(tree.parent[node] < node for node in range(tree.num_nodes))


def test_named_trees_exist():
    assert all(find_tree(name).num_queries for name in TREES)
    for wrong in ("few", "1/2:3", "2/1:1/1", "0:1"):
        with pytest.raises(ValueError, match="few-shot"):
            find_tree(wrong)


def test_timing():
    calls = []
    seconds = time_calls(lambda: calls.append(1), torch.device("cpu"), 3)
    assert len(seconds) == 3 and len(calls) == 5
    assert all(0 <= value < 1 for value in seconds)


def test_machine():
    assert describe_machine(torch.device("cpu"))["versions"]["torch"] == torch.__version__
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cpu"):
            check_device("cuda")


def test_attention_bench_ends_in_json(capsys):
    trees, shape = ["--trees", "1/3:40/2,1/2/4:8/3/1"], ["--heads", "4,2", "--head-dim", "16"]
    main(["bench", "attention", *trees, *shape, "--methods", "all", "--repeats", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["results"]) == 16
    assert all(row["error"] < 1e-5 for row in result["results"])
    assert result["copy_gb_per_s"] > 0 and result["machine"]["versions"]["treewise"]


@pytest.mark.gpu
def test_copy_bandwidth():
    assert copy_bandwidth(torch.device("cuda")) > 1e11


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A folder with a random model of two layers and a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    bytes_as_characters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: token for token, character in enumerate(bytes_as_characters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    shape = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=256, eos_token_id=0, bos_token_id=None, **shape, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("against", ["transformers", "radix", "nothing"])
def test_tree_bench_ends_in_json(capsys, tiny_model, against):
    size = ["--prompt-tokens", "40", "--branches", "3", "--new-tokens", "4", "--repeats", "2"]
    main(["bench", "tree", "--model", tiny_model, "--against", against, *size])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["seconds"]) == ["treewise"] + [against] * (against != "nothing")
    assert all(len(seconds) == 2 for seconds in result["seconds"].values())
    assert result["ratio"] > 0 and result["peak_memory_gb"] > 0


def test_tree_bench_refuses_no_work(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "tree", "--branches", "0"])
    assert "branches: must be at least 1" in capsys.readouterr().err
