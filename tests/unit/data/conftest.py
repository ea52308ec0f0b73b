"""A character tokenizer with a chat template, and jsonl files, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from aligner.data.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ("<pad>", "<bos>", "<eos>", "<u>", "<a>")  # ids 0 to 4
PRINTABLE = [chr(code) for code in range(32, 127)] + ["\n"]  # ' ' is id 5
TEMPLATE = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if m.role == 'user' %}<u>{{ m.content }}{% else %}<a>{{ m.content }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def write_tokenizer(directory: Path, **settings: object) -> Path:
    """One token per printable ASCII character; `settings` go to tokenizer_config.json."""
    from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, pre_tokenizers, processors

    backend = Backend(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *PRINTABLE])}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if "bos_token" in settings:  # as the tokenizers of Llama and Gemma
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))
    return directory


@pytest.fixture(scope="session")
def make_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return lambda **settings: write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t", **settings)


@pytest.fixture(scope="session")
def chars(make_tokenizer_dir: Callable[..., Path]) -> Tokenizer:
    """Begin, end and padding tokens, and the chat template above."""
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return load_tokenizer(make_tokenizer_dir(chat_template=TEMPLATE, **names))


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write lines (objects as JSON, strings and bytes as they are) and return the path."""

    def write(*lines: object, name: str = "d.jsonl") -> str:
        path = tmp_path / name
        with path.open("wb") as stream:
            for line in lines:
                raw = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
                stream.write(raw + b"\n")
        return str(path)

    return write
