"""Directories of tiny random models that see: weights, tokenizer, chat template and image processor, as published ones are laid out."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
import transformers
from own_models import SIZES, VISION
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "do_rescale": True, "do_normalize": True, "do_resize": True, "resample": 2}
_QWEN = _PIXELS | {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
_QWEN |= {"size": {"shortest_edge": 64, "longest_edge": 1024}}
_SQUARE = {"size": {"height": 16, "width": 16}}
# The processor's class, the special tokens (the slot's first), preprocessor_config.json, processor_config.json, what a template writes.
PROCESSORS: dict[str, tuple[str, list[str], dict[str, Any], dict[str, Any], str]] = {
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"], _QWEN, {}, ""),
    "gemma3": (
        "Gemma3Processor",
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        _PIXELS | _SQUARE | {"image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 4, "do_pan_and_scan": False},
        {"image_seq_length": 4},
        "<start_of_image>",
    ),
    "llava": (
        "LlavaProcessor",
        ["<image>"],
        _PIXELS
        | {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "do_center_crop": True}
        | {"crop_size": {"height": 16, "width": 16}},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "<image>\n",
    ),
    "mistral3": (
        "PixtralProcessor",
        ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        _PIXELS | {"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": 16}},
        {"patch_size": 4, "spatial_merge_size": 2},
        "[IMG]",
    ),
    "smolvlm": (
        "SmolVLMProcessor",
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
        + [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)],
        _PIXELS
        | {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
        | {"do_image_splitting": True, "do_pad": True, "do_convert_rgb": True},
        {"image_seq_len": 4},
        "<image>",
    ),
}
_AS_QWEN = {"qwen2_vl": "Qwen2VLProcessor"}
_AS_QWEN |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "Qwen3VLProcessor")
_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_seeing(name: str, directory: Path, **changes: Any) -> None:
    """A random model of `own_models.VISION` with everything that it reads images and texts with. A token is a character. `changes`: of the
    text part's sizes."""
    processor, special, pixels, settings, written = PROCESSORS["qwen2_5_vl" if name in _AS_QWEN else name]
    frames = ["<unk>", "<|im_start|>", "<|im_end|>", *special]
    vocabulary = {token: number for number, token in enumerate([*frames, *string.printable])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    named = dict(zip(("image_token", "boi_token", "eoi_token"), special, strict=False))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<unk>", extra_special_tokens=special
    )
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", written or "<|vision_start|><|image_pad|><|vision_end|>")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    kind = {"processor_class": _AS_QWEN.get(name, processor)}
    own = {"extra_special_tokens": named} if name == "gemma3" else {}
    file.write_text(json.dumps(json.loads(file.read_text()) | kind | own))
    (directory / "preprocessor_config.json").write_text(json.dumps(pixels | kind))
    if settings:
        (directory / "processor_config.json").write_text(json.dumps(settings | kind))
    sizes = {"vocab_size": len(vocabulary)} | changes
    _write_model(name, directory, [vocabulary[token] for token in special], sizes, vocabulary["<|im_end|>"])


def _write_model(name: str, directory: Path, ids: list[int], sizes: dict[str, Any], end: int) -> None:
    kind, text, tower, more = VISION[name]
    fields = [field for field in more if field.endswith(("_token_id", "_token_index"))]
    torch.manual_seed(1 if name == "qwen3_5_moe" else 0)  # with 0 its greedy responses have slots, which `transformers` refuses
    config = getattr(transformers, f"{kind}Config")(
        text_config=SIZES | {"max_position_embeddings": 512, "eos_token_id": end, "pad_token_id": end} | text | sizes,
        vision_config=tower,
        **(more | dict(zip(fields, ids, strict=False))),
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    for parameter in model.parameters():  # made so small that nothing depends on it, or zero
        if float(parameter.detach().std()) < 0.05 and parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    if name == "qwen3_vl_moe":  # as published; `transformers` writes them as its modules have them, and reads both
        tensors = load_file(directory / "model.safetensors")
        stacks = {one: tensor.transpose(1, 2).contiguous() for one, tensor in tensors.items() if ".experts." in one}
        save_file(tensors | stacks, directory / "model.safetensors", metadata={"format": "pt"})


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A random picture."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator).numpy())


def write_questions(folder: Path) -> Path:
    """Four pictures in a folder, and the file of twelve questions on no, one and two of them."""
    for number in range(4):
        picture(12 + 8 * number, 20, seed=number).save(folder / f"{number}.png")
    seen: list[list[dict[str, Any]]] = [[{"type": "image", "image": f"{n}.png"} for n in numbers] for numbers in ([], [0], [1, 2])]
    rows = [[*own, {"type": "text", "text": f"what is {number}?"}] for number in range(4) for own in seen]
    lines = [json.dumps({"messages": [{"role": "user", "content": own}]}) for own in rows]
    (folder / "prompts.jsonl").write_text("\n".join([*lines, ""]))
    return folder / "prompts.jsonl"
