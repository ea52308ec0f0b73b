"""The vision demo's task: two handwritten digits side by side, "What is their sum?", answered as `3+8=11`.

`write_data` makes what a user would bring: folders of PNG files, and JSON lines with `messages` and `images`. Half of the answers of the
supervised set are wrong on purpose: they are one too many. `write_model` makes a LLaVA of random weights with tokenizer,
chat template and image processor. Same seed, same bytes.

The digits are the 1,797 of scikit-learn (8 x 8 pixels), of which only its 57 KB of CSV are read. A pair is of two images of the same side:
those that questions are held out with are in no other file.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CSV = "sklearn/datasets/data/digits.csv.gz"
QUESTION = "What is their sum?"
SIZE, PATCH = 16, 4
NUM_HELD_OUT = 297  # digits
IMAGE, USER, ASSISTANT, END = "<image>", "<|user|>", "<|assistant|>", "<|end|>"
TOKENS = ("<pad>", END, USER, ASSISTANT, IMAGE, "<unk>", "What", " is", " their", " sum", "?", "+", "=", *"0123456789")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class NoDigits(Exception):
    """The images of the digits cannot be had; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """How many questions of each kind, and which fraction of the supervised answers is wrong."""

    num_sft: int = 6000
    num_prompts: int = 3000
    num_validation: int = 300
    wrong: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFiles:
    """What `write_data` wrote."""

    sft: Path
    prompts: Path
    validation: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Digits:
    """Images uint8 [n, 8, 8] and the digit on each [n]."""

    images: np.ndarray
    labels: np.ndarray


def load(folder: Path, wheel: Path | None = None) -> Digits:
    """scikit-learn's digits: of the installed package, of a `wheel` of it, or of one that pip downloads to `folder`. Raises NoDigits."""
    return parsed(_packed(folder, wheel))


def parsed(packed: bytes) -> Digits:
    """The digits in a compressed CSV of 64 pixels from 0 to 16 and a label a row."""
    rows = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",", dtype=np.uint8)
    grey = np.minimum(rows[:, :64].astype(int) * 16, 255).astype(np.uint8)
    return Digits(images=grey.reshape(-1, 8, 8), labels=rows[:, 64].astype(int))


def _packed(folder: Path, wheel: Path | None) -> bytes:
    installed = None if wheel else importlib.util.find_spec("sklearn")  # not imported: that takes scipy too
    if installed is not None and installed.origin is not None and (file := Path(installed.origin).parents[1] / CSV).is_file():
        return file.read_bytes()
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "scikit-learn"]
        try:
            done = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, timeout=300, check=False)
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        except subprocess.TimeoutExpired:
            said = ["no end after 300 s"]
        wheel = next(iter(sorted(folder.glob("scikit_learn-*.whl"))), None)
        if wheel is None:
            raise NoDigits(
                f"the handwritten digits are a file in the package scikit-learn, which is not installed, and pip could not download it "
                f"({said[0]}); where there is a network: pip download --no-deps scikit-learn, then --wheel FILE here"
            )
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(CSV)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise NoDigits(f"{wheel}: no wheel of scikit-learn with {CSV}: {error}") from error


def write_data(seed: int, folder: Path, digits: Digits, task: Task | None = None) -> TaskFiles:
    """Write the questions below `folder`: PNG files, and for each set of them a file of JSON lines beside their folder."""
    task = Task() if task is None else task
    order = np.random.default_rng(0).permutation(len(digits.labels))  # of no seed: what is held out never changes
    held_out = order[:NUM_HELD_OUT] if len(order) > 2 * NUM_HELD_OUT else order[: len(order) // 2]
    pool = order[len(held_out) :]
    rng = np.random.default_rng(seed)
    files = TaskFiles(**{name: folder / f"{name}.jsonl" for name in TaskFiles.__slots__})
    sizes = (task.num_sft, task.num_prompts, task.num_validation)
    for file, count, of in zip((files.sft, files.prompts, files.validation), sizes, (pool, pool, held_out), strict=True):
        (folder / file.stem).mkdir(parents=True, exist_ok=True)
        with file.open("w") as lines:
            for image, a, b in _questions(rng, count, digits, of, folder / file.stem):
                question: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "images": [str(image.relative_to(folder))]}
                if file == files.sft:
                    said = a + b + int(rng.random() < task.wrong)
                    question["messages"].append({"role": "assistant", "content": f"{a}+{b}={said}"})
                else:
                    question["answer"] = f"{a}+{b}={a + b}"
                lines.write(json.dumps(question) + "\n")
    return files


def _questions(rng: np.random.Generator, count: int, digits: Digits, of: np.ndarray, folder: Path) -> Iterator[tuple[Path, int, int]]:
    """So many pairs: the PNG file, and the two digits, each of which is up to a pixel above or below the middle."""
    from PIL import Image

    for number in range(count):
        canvas = np.zeros((SIZE, SIZE), np.uint8)
        pair = rng.choice(of, 2)
        for side, one in enumerate(pair):
            top = int(rng.integers(3, 6))
            canvas[top : top + 8, 8 * side : 8 * side + 8] = digits.images[one]
        path = folder / f"{number:05d}.png"
        Image.fromarray(canvas).save(path)
        yield path, *(int(digits.labels[one]) for one in pair)


def write_model(seed: int, folder: Path, *, width: int = 64, size: int = SIZE, positions: int = 64) -> int:
    """A LLaVA of random weights, 0.2 million by default, with all that `transformers` reads beside them; returns their number."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    write_tokenizer(folder)
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "initializer_range": 0.1}
    vision = CLIPVisionConfig(num_hidden_layers=4, image_size=size, patch_size=PATCH, projection_dim=width, **sizes)
    ids = {"eos_token_id": TOKENS.index(END), "pad_token_id": 0, "bos_token_id": None}
    sizes |= {"num_key_value_heads": 4, "vocab_size": len(TOKENS), "max_position_embeddings": positions, "tie_word_embeddings": False}
    text = LlamaConfig(num_hidden_layers=2, **ids, **sizes)
    torch.manual_seed(seed)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=TOKENS.index(IMAGE))
    model = LlavaForConditionalGeneration(config)
    model.save_pretrained(folder)
    return model.num_parameters()


def write_tokenizer(folder: Path) -> None:
    """The tokenizer, of whole words and single digits, its chat template, and the image processor."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in TOKENS[:6]])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    pixels = {"do_resize": False, "do_center_crop": False, "do_rescale": True, "do_normalize": True}
    pixels |= {"image_mean": [0.3] * 3, "image_std": [1.0] * 3}
    seen = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1, "image_token": IMAGE}
    kind = {"processor_class": "LlavaProcessor"}
    named = {"pad_token": "<pad>", "eos_token": END, "unk_token": "<unk>"}
    settings = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named},
        "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", **pixels},
        "processor_config.json": seen,
    }
    for name, fields in settings.items():
        (folder / name).write_text(json.dumps(fields | kind, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
