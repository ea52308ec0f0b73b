"""What tests of every folder build."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def load_module(path: Path, name: str = "") -> ModuleType:
    """A Python file that is in no package, as a module; its name if no other is given."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def write_byte_tokenizer(
    directory: Path, special: Sequence[str], *, adds: Sequence[str] = (), first: Sequence[str] = (), **settings: object
) -> Path:
    """One token per byte, and special ones, behind them or `first`; `adds`: those that it begins every text with."""
    from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: number for number, letter in enumerate((*first, *letters))}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds:
        added = [(token, backend.token_to_id(token)) for token in adds]
        backend.post_processor = processors.TemplateProcessing(single=f"{' '.join(adds)} $A", special_tokens=added)
    directory.mkdir(parents=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))
    return directory
