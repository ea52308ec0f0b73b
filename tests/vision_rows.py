"""Rows with images for tiny models that see, and what plain `transformers` makes of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from vision_models import picture, write_seeing

from aligner.data.vision import ImageStore, Vision
from aligner.types import Images, LabeledBatch, Prompt

PICTURES = {"a": (20, 12), "b": (40, 32), "c": (16, 16)}
ROWS = ("see a here", "none at all", "ab two b and a then", "c")  # a word of one letter in `PICTURES` is a picture


def encoded(word: str, seed: int = 0) -> bytes:
    """The file of one of `PICTURES`, or with a seed of another one of its size."""
    file = io.BytesIO()
    picture(*PICTURES[word], seed=seed or ord(word)).save(file, "PNG")
    return file.getvalue()


class PixtralsTokens:
    """What `PixtralProcessor` makes of an image of 16 x 16 pixels; it cannot be imported without torchvision."""

    image_token, slot_ids = "[IMG]", (3,)

    def __init__(self, store: ImageStore) -> None:
        self.store = store

    def expansion(self, digest: str) -> str:
        return "[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]"

    def num_slots(self, digest: str) -> int:
        return self.expansion(digest).count(self.image_token)

    def inputs(self, digests: list[str]) -> dict[str, Tensor]:
        if not digests:
            return {}
        pixels = [torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(int(digest[:8], 16))) for digest in digests]
        return {"pixel_values": torch.cat(pixels), "image_sizes": torch.tensor([[16, 16]] * len(digests))}

    def types(self, tokens: Tensor) -> Tensor:
        return (tokens == 3).long()


def seeing_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`directory(name)`: a model of `own_models.VISION` that sees, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write_seeing(name, made[name])
        return made[name]

    return make


class Rows:
    """`ROWS` as a model's tokens, with their images."""

    def __init__(self, name: str, directory: Path) -> None:
        store = ImageStore(directory / "images")
        self.vision: Any = PixtralsTokens(store) if name == "mistral3" else Vision.of([directory], store.directory)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.end = tokenizer.eos_token_id
        self.digests = digests = {word: store.put(encoded(word)) for word in PICTURES}
        self.images = [[digests[word] for word in row.split() if word in PICTURES] for row in ROWS]
        texts = [" ".join(self.vision.expansion(digests[word]) if word in PICTURES else word for word in row.split()) for row in ROWS]
        self.tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    def prompts(self) -> list[Prompt]:
        extras = [{Images.name: Images.of(images)} if images else {} for images in self.images]
        return [Prompt(tokens=tuple(row), id=number, source="test", extras=extras[number]) for number, row in enumerate(self.tokens)]

    def batch(self) -> LabeledBatch:
        lengths = torch.tensor([len(row) for row in self.tokens])
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in self.tokens], batch_first=True)
        inside = torch.arange(tokens.shape[1]) < lengths[:, None]
        mask = inside & (torch.arange(tokens.shape[1]) > 0) & ~self.vision.types(tokens).bool()
        images = Images.padded([Images.of(row) if row else None for row in self.images], tokens.shape[1])
        return LabeledBatch(tokens=tokens, lengths=lengths, loss_mask=mask, extras={"images": images})

    def given(self, row: int, model: Any) -> dict[str, Tensor]:
        """A row as its processor gives it to `transformers`."""
        ids = torch.tensor([self.tokens[row]])
        types = self.vision.types(ids)
        named = {"gemma3": {"token_type_ids": types}, "qwen": {"mm_token_type_ids": types}}
        more = next((one for kind, one in named.items() if model.config.model_type.startswith(kind)), {})
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more, **self.vision.inputs(self.images[row])}


def plain(model: Any, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of `transformers`, one row at a time, and the gradients of their mean."""
    batch = rows.batch()
    found, total = torch.zeros(batch.tokens.shape), 0.0
    for row, length in enumerate(batch.lengths.tolist()):
        logits = model(**rows.given(row, model), use_cache=False).logits[0].float()
        logprobs = logits.log_softmax(-1)[:-1].gather(1, batch.tokens[row, 1:length, None])[:, 0] * batch.loss_mask[row, 1:length]
        found[row, 1:length] = logprobs.detach()
        total = total - logprobs.sum()
    if total.requires_grad:
        (total / batch.loss_mask.sum()).backward()
    return found, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def reference(directory: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def greedy_tokens(rows: Rows, row: int, model: Any, number: int) -> list[int]:
    """By a whole pass for each. With its cache and a row of slots alone, `generate` of Qwen's models leaves the greedy path."""
    before, found = rows.tokens[row], []
    while len(found) < number and found[-1:] != [rows.end]:
        rows.tokens[row] = before + found
        with torch.no_grad():
            found.append(int(model(**rows.given(row, model), use_cache=False).logits[0, -1].argmax()))
    rows.tokens[row] = before
    return found
