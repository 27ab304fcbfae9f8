"""A Transformers model with a head of labels, run over token ids in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treewise.config import check_integer

Message = Mapping[str, str]
"""One turn of a conversation: ``{"role": ..., "content": ...}``."""


class Classifier:
    """A model of Transformers with a head of labels, and how to run it over token ids in batches.

    Any thread may use it; one does at a time.

    Parameters
    ----------
    kind : str
        Transformers' class for loading by name, such as ``"AutoModelForTokenClassification"``.
    model : str or PreTrainedModel
        A folder, a hub id, or a model in memory, which stays where it is.
    tokenizer : PreTrainedTokenizer, optional
        Of a model in memory; a name brings its own.
    label : int or str, optional
        Whose probability is the value; needed where the head has several, its value as it is where it has one.
    batch_size : int
        The most texts of a forward.
    device : str
        Where to load: ``"auto"``, ``"cpu"``, ``"cuda"``.

    Raises
    ------
    ValueError
        If there is no tokenizer or no such label.
    """

    def __init__(self, kind: str, model: Any, tokenizer: Any, label: int | str | None, batch_size: int, device: str):
        check_integer("batch_size", batch_size, 1)
        if isinstance(model, str):
            import transformers

            device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
            tokenizer = transformers.AutoTokenizer.from_pretrained(model) if tokenizer is None else tokenizer
            model = getattr(transformers, kind).from_pretrained(model).to(device)
        if tokenizer is None:
            raise ValueError("tokenizer: a model in memory needs the tokenizer that belongs to it")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_length = getattr(model.config, "max_position_embeddings", None)
        names = [model.config.id2label[i] for i in range(model.config.num_labels)]
        label = names.index(label) if label in names else label
        if label is None and len(names) == 1:
            label = 0
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(names):
            raise ValueError(f"label is {label!r}; choose one of {', '.join(names)}, or 0 to {len(names) - 1}")
        self.label = label
        self._lock = Lock()

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Return the token ids of a text; with the tokens that the model wants around it, if it `begins` an input."""
        with self._lock:
            ids: list[int] = self.tokenizer(text, add_special_tokens=begins)["input_ids"]
        return ids

    def converse(self, messages: Sequence[Message], *, begun: bool) -> list[int]:
        """Return the token ids of a conversation in the chat template; `begun`, with the beginning of a reply.

        Raises
        ------
        ValueError
            If the tokenizer has no chat template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("question: the reward model has no chat template; give it as text, not as messages")
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=begun)
        return self.encode(text, begins=False)

    def values(self, inputs: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run the model over token ids, long ones together.

        Returns
        -------
        list of Tensor, float32
            Values of the label, one an input, or [tokens] of each where the head sits on tokens.

        Raises
        ------
        ValueError
            If an input is empty or longer than the model's context.
        """
        for ids in inputs:
            if not ids:
                raise ValueError("texts: one has no tokens, so there is nothing to rate")
            if self.max_length is not None and len(ids) > self.max_length:
                raise ValueError(f"texts: one has {len(ids)} tokens, more than the reward model's {self.max_length}")
        pad = self.model.config.pad_token_id
        # NOTE: the head of a sequence looks for the last token that is no padding, whose id it must know.
        size = self.batch_size if pad is not None else 1
        order = sorted(range(len(inputs)), key=lambda i: -len(inputs[i]))
        results: list[Tensor] = [torch.empty(0)] * len(inputs)
        with self._lock, torch.inference_mode():
            for start in range(0, len(order), size):
                places = order[start : start + size]
                rows = [torch.tensor(inputs[i]) for i in places]
                tokens = pad_sequence(rows, batch_first=True, padding_value=pad or 0)
                mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                device = self.model.device
                logits = self.model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits.float()
                chosen = logits if logits.shape[-1] == 1 else logits.softmax(-1)
                for place, row, value in zip(places, rows, chosen[..., self.label].cpu(), strict=True):
                    results[place] = value[: len(row)] if value.ndim else value
        return results
