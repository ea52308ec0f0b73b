"""The model of the stand-in: one of transformers, with the package's fused tensors and hooks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

FUSED = (re.compile(r"(.*)\.(q|k|v)_proj\.(weight|bias)"), re.compile(r"(.*)\.(gate|up)_proj\.(weight|bias)"))


class Misuse(AssertionError):
    """A rule of the package was broken."""


class FusedLinear(nn.Module):
    """Holds what came of one fused tensor until it is finalised. Its hooks have the package's names."""

    def __init__(self, owner: Model, names: tuple[str, ...]) -> None:
        super().__init__()
        self.owner = [owner]  # in a list: not a sub-module
        self.names = names
        self.came: dict[str, Tensor] = {}
        self.is_ready = False

    def pre_reload_weights(self) -> None:
        self.is_ready = True

    def take(self, weights: dict[str, Tensor]) -> None:
        if not self.is_ready:
            raise Misuse("a module's weights were loaded before its pre_reload_weights()")
        self.came |= {name: tensor.clone() for name, tensor in weights.items()}

    def process_weights_after_loading(self) -> None:
        if not self.is_ready:
            raise Misuse("process_weights_after_loading() before pre_reload_weights()")

    @torch.no_grad()
    def post_load_weights(self) -> None:
        targets = self.owner[0].targets
        for name, tensor in self.came.items():
            targets[name].copy_(tensor)
        self.came, self.is_ready = {}, False
        self.owner[0].finalised.add(self)


class Model(nn.Module):
    """A model of transformers with random weights, of which fused tensors can only be given together."""

    def __init__(self, path: str, dtype: str) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(path)
        inner = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        self.inner = [inner]  # in a list: named_parameters() shows this model's own names alone
        self.targets = {name: p for name, p in inner.named_parameters()}
        self.given: set[str] = set()
        self.finalised: set[FusedLinear] = set()
        self.groups: dict[str, tuple[set[str], FusedLinear]] = {}
        self.fused = nn.ModuleList()
        for name in self.targets:
            if key := group_of(name):
                names = tuple(other for other in self.targets if group_of(other) == key)
                if key not in self.groups:
                    self.fused.append(FusedLinear(self, names))
                    self.groups[key] = (set(names), self.fused[-1])
        self.scramble()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.targets.items() if group_of(name) is None)

    @torch.no_grad()
    def scramble(self) -> None:
        for parameter in self.targets.values():
            parameter.fill_(float("nan"))
        self.given = set()

    @torch.no_grad()
    def take(self, weights: dict[str, Tensor]) -> None:
        if unknown := set(weights) - set(self.targets):
            raise Misuse(f"reload: unknown weights {sorted(unknown)}")
        for names, module in self.groups.values():
            came = {name: weights[name] for name in names if name in weights}
            if came and len(came) < len(names):
                raise Misuse(f"reload: {sorted(came)} without {sorted(names - set(came))}, with which they are fused")
            if came:
                module.take(came)
        for name, tensor in weights.items():
            if tensor.shape != self.targets[name].shape:
                raise Misuse(f"reload: {name} is {list(tensor.shape)}, not {list(self.targets[name].shape)}")
            if group_of(name) is None:
                self.targets[name].copy_(tensor)
        self.given |= set(weights)

    @torch.no_grad()
    def logits(self, rows: list[list[int]]) -> Tensor:
        """After the last token of each row: padding on the right does not reach them."""
        width = max(map(len, rows))
        found = self.inner[0](torch.tensor([row + [0] * (width - len(row)) for row in rows])).logits
        return torch.stack([logits[len(row) - 1] for logits, row in zip(found, rows, strict=True)]).float()


def group_of(name: str) -> str | None:
    """What tensors that are fused have in common."""
    for kind, pattern in enumerate(FUSED):
        if found := pattern.fullmatch(name):
            return f"{found[1]}.{kind}.{found[3]}"
    return None
