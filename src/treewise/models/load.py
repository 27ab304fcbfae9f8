"""From the name of a model to the model and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from treewise.config import ModelConfig
from treewise.models.builtin import BUILTIN_MODELS, fetch_builtin
from treewise.models.cache import remembered_sha256
from treewise.models.convert import convert_once, read_gguf_config
from treewise.models.decoder import CausalLM
from treewise.models.registry import read_config
from treewise.models.shapes import SHAPES, find_shape, random_model
from treewise.models.tokenizer import Tokenizer, read_json
from treewise.models.weights import load_weights

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name_or_path: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> tuple[CausalLM, Tokenizer]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name_or_path : str or Path
        A Transformers folder, a GGUF file, a built-in name (``"smollm2-135m"``) or a hub id (``"owner/name"``).
    dtype : str or torch.dtype
        Type of the weights: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"``: float32 on a CPU, else
        the type of 16 bits that they are stored in, else bfloat16.
    device : str or torch.device
        Where the weights go.

    Returns
    -------
    model : CausalLM
        In evaluation mode, without gradients.
    tokenizer : Tokenizer

    Raises
    ------
    FileNotFoundError
        Nothing goes by that name, or a folder lacks a file.
    ValueError
        A file is damaged or truncated, or the model is of a kind that is not supported; the message says which.
    ConnectionError
        A built-in or hub model could not be fetched.

    Examples
    --------
    >>> model, tokenizer = load_model("smollm2-135m")  # doctest: +SKIP
    >>> model.config.num_heads, model.config.num_kv_heads  # doctest: +SKIP
    (9, 3)
    """
    return load_decoder(name_or_path, dtype=dtype, device=device), load_tokenizer(name_or_path)


def load_decoder(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    build: Callable[[ModelConfig], CausalLM] = CausalLM,
) -> CausalLM:
    """Load a model without its tokenizer, as `build` makes it; names and errors as in :func:`load_model`.

    ``"shape:NAME"`` is a model of a shape of `treewise.models.shapes.SHAPES` with random weights, made on the device.
    """
    device, weight_type = torch.device(device), _resolve_dtype(dtype)
    config = load_config(name_or_path)
    if shape_of(name_or_path) is not None:
        weight_type = weight_type or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        return random_model(config, weight_type, device, build)
    return load_weights(config, locate(name_or_path), weight_type, device, build)


def load_config(name_or_path: str | Path) -> ModelConfig:
    """Read the configuration of a model alone; names and errors as in :func:`load_decoder`."""
    shape = shape_of(name_or_path)
    return read_config(_read_config_json(locate(name_or_path)) if shape is None else find_shape(shape))


def peek_config(name_or_path: str | Path) -> ModelConfig:
    """Read a configuration of which no model is to be loaded: no weights are fetched, and nothing is converted.

    Parameters
    ----------
    name_or_path : str or Path
        The name of a shape, or what :func:`load_config` takes, or a ``config.json``.

    Raises
    ------
    FileNotFoundError
        Nothing goes by that name.
    ValueError
        The file is damaged, or the model is of a kind that is not supported.
    ConnectionError
        The configuration could not be fetched from the hub.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name in SHAPES and not path.exists():
        return read_config(find_shape(name))
    if path.is_file():
        return read_config(read_json(path) if path.suffix == ".json" else read_gguf_config(path))
    if not path.is_dir() and HUB_ID.fullmatch(name) and path.suffix not in {".gguf", ".safetensors"}:
        return read_config(_read_config_json(_fetch_from_hub(name, ["config.json"])))
    if not path.is_dir() and shape_of(name) is None:
        raise FileNotFoundError(
            f"model {name!r} is no file or folder here, no hub id (owner/name), and no shape ({', '.join(SHAPES)})"
        )
    return load_config(name_or_path)


def shape_of(name_or_path: str | Path) -> str | None:
    """Return the name of a shape that ``shape:NAME`` says, None for a model that has weights of its own."""
    scheme, _, name = str(name_or_path).partition(":")
    return name if scheme == "shape" else None


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model alone; names and errors as in :func:`load_model`."""
    return Tokenizer.from_folder(locate(name_or_path))


def locate(name_or_path: str | Path) -> Path:
    """Give the Transformers folder of a model, fetched or converted the first time; see :func:`load_model`."""
    name = str(name_or_path)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return convert_once(remembered_sha256(path), lambda: path)
    if name in BUILTIN_MODELS:
        return convert_once(BUILTIN_MODELS[name].sha256, lambda: fetch_builtin(name))
    if HUB_ID.fullmatch(name) and path.suffix not in {".gguf", ".safetensors"} and not name.startswith("."):
        return _fetch_from_hub(name, HUB_FILES)
    raise FileNotFoundError(
        f"model {name!r} is no file or folder here, no built-in model ({', '.join(BUILTIN_MODELS)}) "
        f"and no hub id (owner/name)"
    )


def _read_config_json(folder: Path) -> dict[str, object]:
    config = read_json(folder / "config.json")
    if not config:
        raise FileNotFoundError(f"{folder} has no config.json: it is not a Transformers model folder")
    return config


def _resolve_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Give the type, None for ``"auto"``."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; choose from auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _fetch_from_hub(name: str, files: Sequence[str]) -> Path:
    import huggingface_hub  # only needed here
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files)))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConnectionError(
            f"model {name!r} is no file or folder here and no built-in model ({', '.join(BUILTIN_MODELS)}); "
            f"as a hub id it could not be fetched: {error}"
        ) from None
