"""What exported models say of given text, with transformers: losses, scores and divergences of every example, by no code that trained them.

Tokens and masks are those of the recipes' own data readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.utils import logging

from aligner.data.collate import SupervisedExample

ROWS = 32  # at a time


@torch.inference_mode()
def losses(model: Path, rows: Sequence[SupervisedExample]) -> Tensor:
    """Float64 [N, 2]: the cross-entropy summed over what is learnt of each row, in nats, and how many tokens that is."""
    network = _load(AutoModelForCausalLM, model)
    found = []
    for tokens, shown, learnt in _batches(rows):
        logprobs = _logprobs(network, tokens, shown).gather(-1, tokens[:, 1:, None]).squeeze(-1).double()
        found.append(torch.stack([-(logprobs * learnt[:, 1:]).sum(1), learnt[:, 1:].sum(1).double()], dim=1))
    return torch.cat(found)


@torch.inference_mode()
def divergences(student: Path, teacher: Path, rows: Sequence[SupervisedExample]) -> Tensor:
    """Float64 [N, 2]: KL(teacher || student) over the whole vocabulary, summed over what is learnt of a row, and its number of tokens."""
    networks = [_load(AutoModelForCausalLM, model) for model in (student, teacher)]
    found = []
    for tokens, shown, learnt in _batches(rows):
        own, given = (_logprobs(network, tokens, shown) for network in networks)
        kl = (given.exp() * (given - own[..., : given.shape[-1]])).sum(-1).double()
        found.append(torch.stack([(kl * learnt[:, 1:]).sum(1), learnt[:, 1:].sum(1).double()], dim=1))
    return torch.cat(found)


@torch.inference_mode()
def mean_scores(model: Path, rows: Sequence[SupervisedExample]) -> Tensor:
    """Float64 [N, K] of a model that scores the mean over all tokens."""
    network = _load(AutoModelForTokenClassification, model)
    found = []
    for tokens, shown, _ in _batches(rows):
        logits = network(input_ids=tokens, attention_mask=shown).logits.double()
        found.append((logits * shown[..., None]).sum(1) / shown.sum(1, keepdim=True))
    return torch.cat(found)


@torch.inference_mode()
def step_scores(model: Path, rows: Sequence[SupervisedExample]) -> list[Tensor]:
    """Of each row float64 [S]: the scores at the tokens in its mask, in their order."""
    network = _load(AutoModelForTokenClassification, model)
    found: list[Tensor] = []
    for tokens, shown, judged in _batches(rows):
        logits = network(input_ids=tokens, attention_mask=shown).logits[..., 0].double()
        found += [row[mask] for row, mask in zip(logits, judged, strict=True)]
    return found


def _load(kind: Any, path: Path) -> torch.nn.Module:
    logging.disable_progress_bar()
    return kind.from_pretrained(path, dtype=torch.float32).eval()


def _batches(rows: Sequence[SupervisedExample]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, which of them are no padding, and which are learnt: each [B, S], padded at the end."""
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        tokens = pad_sequence([torch.tensor(row.tokens) for row in part], batch_first=True)
        learnt = pad_sequence([torch.tensor(row.loss_mask) for row in part], batch_first=True)
        lengths = torch.tensor([len(row.tokens) for row in part])
        yield tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long(), learnt


def _logprobs(network: torch.nn.Module, tokens: Tensor, shown: Tensor) -> Tensor:
    """Of every token but the first [B, S - 1, V]."""
    return network(input_ids=tokens, attention_mask=shown).logits[:, :-1].float().log_softmax(-1)
