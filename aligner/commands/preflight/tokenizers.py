"""Tokenizers and chat templates: they load, fit their models, and are the same for every component and on every node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from aligner.commands.preflight.items import Context, Finding, Item, Level, Where, who
from aligner.data.messages import Message
from aligner.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from aligner.errors import ConfigError
from aligner.run.settings import JobRun
from aligner.run.traits import UsedModel
from aligner.servers.components import in_section

SAMPLE = "The quick brown fox: 3 + 4 = 7, naïve café, 你好.\n\tdef f(x): return x"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """One node's tokenization of a sample."""

    described: dict[str, str] = field(default_factory=dict)  # component -> a few words
    digests: dict[str, str] = field(default_factory=dict)  # component -> of the sample's ids and the special tokens
    apart: list[str] = field(default_factory=list)  # components that may have a tokenizer of their own
    notes: list[str] = field(default_factory=list)  # what a person should know, though it is no mistake


def tokenizer_of(model: UsedModel) -> Tokenizer:
    """The tokenizer of a model, checked against the model's vocabulary. Raises ConfigError or CheckpointError naming the component."""
    from aligner.jobs.parts import tokenizer_directory  # Megatron-Core comes with it
    from aligner.models.create import read_architecture, source_directory

    with in_section(model.key.rpartition(".")[0]):
        tokenizer = load_tokenizer(str(tokenizer_directory(model.config)), source_directory(model.config))
        architecture = read_architecture(model.config, vocab_size=tokenizer.vocab_size)
        check_vocabulary(tokenizer, architecture.vocab_size)
    return tokenizer


def _observe(context: Context) -> Tokens:
    described, digests, notes = {}, {}, []
    for model in context.config.models():
        try:
            data = context.config.data
            tokenizer = tokenizer_of(model).chatting(data)
            described[model.component], found = look(tokenizer, context.config)
        except ConfigError as error:
            raise ConfigError(f"{model.component} ({model.key}): {error}") from error
        digests[model.component] = digest(tokenizer)
        notes += found if digests[model.component] not in list(digests.values())[:-1] else []  # once for the same tokenizer
    apart = [model.component for model in context.config.models() if model.reads_text]
    return Tokens(described=described, digests=digests, apart=apart, notes=notes)


def look(tokenizer: Tokenizer, config: JobRun) -> tuple[str, list[str]]:
    """(a few words, notes). Raises ConfigError if the data need a chat template that is missing or broken."""
    notes = []
    back = tokenizer.decode(tokenizer.encode(SAMPLE))
    if back.strip() != SAMPLE.strip():
        notes.append(f"a text with accents, Chinese and code does not survive encoding and decoding: {back!r}")
    if config.data.apply_chat_template or tokenizer.has_chat_template:
        try:
            rendered = tokenizer.apply_chat_template((Message(role="user", content="Hello"),), add_generation_prompt=True)
        except ConfigError:
            raise
        except Exception as error:  # a template is a program: whatever it raises
            raise ConfigError(f"the chat template of {tokenizer.path} fails: {type(error).__name__}: {error}") from error
        if not rendered:
            raise ConfigError(f"the chat template of {tokenizer.path} makes no token of a message")
    template = "with" if tokenizer.has_chat_template else "without"
    if tokenizer.has_chat_template and not config.data.apply_chat_template:
        notes.append("has a chat template; plain-text prompts do not get it (data.apply_chat_template=false)")
    return f"{tokenizer.vocab_size} tokens, {template} chat template", notes


def digest(tokenizer: Tokenizer) -> str:
    """A digest of a sample's ids and of the special tokens; equal digests mean equal encoding."""
    ids = [tokenizer.encode(SAMPLE), tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def judge(context: Context, seen: Mapping[int, Tokens]) -> Finding:
    """Fatal if nodes or components disagree: they exchange token ids."""
    first = seen[0]
    if others := [rank for rank, tokens in seen.items() if tokens.digests != first.digests]:
        text = f"{who(context.allocation, others)}: another tokenizer under the same path than on {context.allocation.node_of(0)}"
        return Finding(level=Level.fatal, found=text, advice="put models on a file system that all nodes share")
    main, *rest = first.digests
    if different := [name for name in rest if name not in first.apart and first.digests[name] != first.digests[main]]:
        text = f"the tokenizer of {' and '.join(different)} is not that of the {main}, whose token ids it is sent"
        advice = "train the reward model and critic on the actor's tokenizer"
        return Finding(level=Level.fatal, found=text, advice=advice)
    found = "; ".join(f"{name}: {words}" for name, words in first.described.items())
    return Finding(level=Level.ok, found="\n".join([found, *first.notes]))


TOKENIZER = Item("tokenizer", Where.every_node, _observe, judge, timeout_seconds=180.0, needs=("config", "hub"))
