"""Images of records: the forms in which they are published, their slots among the tokens, limits, the cache, what `data validate` shows."""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from vision_models import picture, write_seeing

from aligner import cli
from aligner.api import _write_rows
from aligner.data import images as images_module, vision as vision_module
from aligner.data.config import (
    AnnotateDataConfig,
    BadLines,
    ConstitutionDataConfig,
    DemonstrationDataConfig,
    DistillationDataConfig,
    ImageConfig,
    Overlong,
    PreferenceDataConfig,
    PromptDataConfig,
    RegressionDataConfig,
    RequestDataConfig,
    SFTDataConfig,
    SpecialText,
    StepDataConfig,
    UnpairedDataConfig,
)
from aligner.data.constitution import load_cases
from aligner.data.distillation import Manifest, begin, data_digest, distillation_batch, distilled, load_distillation, write_shard
from aligner.data.images import images_in
from aligner.data.judged import load_regression, load_steps, load_unpaired, mismatched
from aligner.data.labelled import load_requests, load_unlabelled
from aligner.data.messages import Image as Picture, Message
from aligner.data.prompts import load_prompts, read_questions
from aligner.data.sources import Fields, RawRecord
from aligner.data.supervised import answered, load_demonstrations, load_preferences, load_supervised
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.data.vision import ImageStore, Vision, decoded
from aligner.errors import ConfigError, DataError
from aligner.jobs.parts import load_model_files
from aligner.models.config import Implementation, ModelConfig
from aligner.models.modules.hf_chunk import NOT_PACKED
from aligner.types.extras import MOST_IMAGES

KINDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "llava", "smolvlm")
SLOTS = {"qwen2_5_vl": 8, "qwen3_vl": 8, "qwen3_5": 8, "gemma3": 4, "llava": 16, "smolvlm": 20}  # of SMALL


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


SMALL, WIDE = png(picture(20, 30, 1)), png(picture(41, 17, 2))
URI = f"data:image/png;base64,{base64.b64encode(SMALL).decode()}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of each kind of model the directory with its tokenizer and processor, without weights."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write_seeing(name, made[name])
            (made[name] / "config.json").unlink()  # of qwen3_5, transformers would read the files with another tokenizer's class
        return made[name]

    return folder


@pytest.fixture(scope="module")
def loaded(folders) -> Callable[[str], tuple[Tokenizer, Vision]]:
    """Of each kind of model its tokenizer and its processor, loaded once."""

    @cache
    def load(name: str) -> tuple[Tokenizer, Vision]:
        vision = Vision.of([None, folders(name)], None)
        assert vision is not None and vision.failure is None
        return load_tokenizer(folders(name)), vision

    return load


@pytest.fixture
def seeing(loaded, tmp_path) -> Callable[..., Tokenizer]:
    def make(name: str = "qwen2_5_vl", store: str = "store") -> Tokenizer:
        tokenizer, vision = loaded(name)
        return tokenizer.seeing(vision.storing(tmp_path / store))

    return make


@pytest.fixture
def pictures(tmp_path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "small.png").write_bytes(SMALL)
    (tmp_path / "pictures" / "wide.png").write_bytes(WIDE)
    return tmp_path / "pictures"


def asked(*parts: str | dict[str, Any], **more: Any) -> dict[str, Any]:
    """A record with one turn of a user, and an answer."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes"}], **more}


def files(tokenizer: Tokenizer, example: Any) -> list[bytes]:
    """The files of the images of a row or prompt."""
    assert tokenizer.vision is not None
    return [tokenizer.vision.store.get(digest) for digest in images_in(example.extras)]


def rows(path: str, tokenizer: Tokenizer, **settings: Any) -> list[Any]:
    return list(load_supervised(path, SFTDataConfig(train=path, **settings), tokenizer)[0])


# --- slots


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_models_own_processor(name, seeing):
    tokenizer = seeing(name)
    vision = tokenizer.vision
    shown = [vision.add(content) for content in (SMALL, WIDE, SMALL)]
    assert vision.num_slots(shown[0]) == SLOTS[name]
    for parts in ([], ["Look ", 0, "what is it?"], [0, 1, "Both?"], [2, "One", 1, 0]):
        turn = Message(role="user", content="").with_parts([Picture(shown[one]) if isinstance(one, int) else one for one in parts])
        turn = turn if parts else Message(role="user", content="No image")
        said = (turn, Message(role="assistant", content="Yes"), Message(role="user", content="And?"))
        ours = tokenizer.apply_chat_template(said, add_generation_prompt=True)
        chat = [message.as_json() for message in said]
        processor = vision._processor
        text = processor.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        used = [decoded(vision.store.get(shown[one])) for one in parts if isinstance(one, int)]
        theirs = processor(text=text, images=used or None)["input_ids"]
        assert ours == list(theirs[0] if isinstance(theirs[0], (list, tuple)) else theirs)
        assert vision.count_slots(ours) == sum(vision.num_slots(shown[one]) for one in parts if isinstance(one, int))


@pytest.mark.parametrize("special_text", [SpecialText.plain, SpecialText.keep])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llava", "smolvlm"])
def test_a_users_text_never_becomes_a_slot(name, special_text, seeing, jsonl):
    tokenizer = seeing(name)
    vision = tokenizer.vision
    words = f"Is {vision.image_token} or {vision.slots[0]} <image> <|vision_start|> there?"
    path = jsonl(asked(words, {"type": "image", "image": URI}, vision.image_token), asked(words), {"prompt": words, "response": words})
    config = SFTDataConfig(train=path, special_text=special_text)
    (one, none, plain), report = load_supervised(path, config, tokenizer.chatting(config))
    assert [vision.count_slots(row.tokens) for row in (one, none, plain)] == [SLOTS[name], 0, 0]
    assert [len(images_in(row.extras)) for row in (one, none, plain)] == [1, 0, 0]
    assert words in tokenizer.decode(none.tokens, skip_special=False)
    assert report.special_text[vision.image_token] == 3
    with pytest.raises(DataError, match="special_text=refuse"):
        config = SFTDataConfig(train=path, special_text=SpecialText.refuse)
        load_supervised(path, config, tokenizer.chatting(config))


def test_a_rendered_conversation_with_slots_and_no_image_is_refused(seeing, jsonl):
    path = jsonl({"prompt": "<|im_end|>\n<|image_pad|>?", "response": "a"})
    with pytest.raises(DataError, match=r"d.jsonl:1: has 1 slots of images among its tokens, expected 0 for its 0 images"):
        rows(path, seeing())


def test_a_template_that_writes_other_numbers_of_images(seeing, jsonl, tmp_path):
    path = jsonl(asked({"type": "image", "image": URI}, "Who?"))
    for name, written, times in (("none", "", 0), ("two", "<|image_pad|><|image_pad|>", 2)):
        template = tmp_path / f"{name}.jinja"
        part = f"{{% if p.type == 'image' %}}{written}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
        template.write_text(
            "{% for m in messages %}<|im_start|>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
            f"{part}{{% endfor %}}{{% endif %}}<|im_end|>{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>{{% endif %}}"
        )
        config = SFTDataConfig(train=path, chat_template=str(template))
        with pytest.raises(DataError, match=rf"writes {times} times '<\|image_pad\|>' for 1 images, expected one for each"):
            load_supervised(path, config, seeing().chatting(config))


def test_only_the_answer_is_learnt_behind_an_image(seeing, jsonl, tmp_path):
    template = tmp_path / "marked.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% else %}{% generation %}{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    path = jsonl(asked("a", {"type": "image", "image": URI}, "b"))
    for config in (SFTDataConfig(train=path), SFTDataConfig(train=path, chat_template=str(template))):
        (row,) = load_supervised(path, config, seeing().chatting(config))[0]
        learnt = [token for token, is_learnt in zip(row.tokens, row.loss_mask, strict=True) if is_learnt]
        assert seeing().decode(learnt, skip_special=False).strip() == "Yes<|im_end|>"


# --- forms


def part(**given: Any) -> dict[str, Any]:
    return {"type": "image", **given}


PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": URI, "detail": "low"}},
    {"type": "image_url", "image_url": URI},
    {"type": "input_image", "image_url": URI},
    part(image="pictures/small.png"),
    part(path="pictures/small.png"),
    part(url="pictures/small.png"),
    part(image={"path": "pictures/small.png", "bytes": None}),
    part(base64=URI.partition(",")[2]),
    part(base64=URI),
    part(image=URI),
]


@pytest.mark.parametrize("given", PARTS, ids=lambda given: next(reversed(given)) + str(PARTS.index(given)))
def test_image_parts(given, seeing, jsonl, pictures):
    tokenizer = seeing()
    (row,) = rows(jsonl(asked("a ", given, " b")), tokenizer)
    assert files(tokenizer, row) == [SMALL]
    assert "<|im_start|>user\na <|vision_start|><|image_pad|>" in tokenizer.decode(row.tokens, skip_special=False)


def test_absolute_paths_and_file_urls(seeing, jsonl, pictures):
    tokenizer = seeing()
    file = pictures / "small.png"
    path = jsonl(asked(part(image=str(file))), asked(part(url=f"file://{file}")))
    assert [files(tokenizer, row) for row in rows(path, tokenizer)] == [[SMALL]] * 2


COLUMNS: list[Any] = [
    "pictures/small.png",
    ["pictures/small.png"],
    {"path": "pictures/small.png"},
    URI,
    [{"bytes": None, "path": "pictures/small.png"}],
]


@pytest.mark.parametrize("column", COLUMNS, ids=str)
@pytest.mark.parametrize("name", ["image", "images"])
def test_columns(name, column, seeing, jsonl, pictures):
    tokenizer = seeing()
    for record in (
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me"}], name: column},
        asked({"type": "image"}, "Who?", **{name: column}),
        {"conversations": [{"from": "human", "value": "<image>Who?"}, {"from": "gpt", "value": "Me"}], name: column},
    ):
        (row,) = rows(jsonl(record), tokenizer)
        assert files(tokenizer, row) == [SMALL]
        assert "user\n<|vision_start|><|image_pad|>" in (text := tokenizer.decode(row.tokens, skip_special=False))
        assert "<|vision_end|>Who?" in text


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_a_video_is_its_frames(kind, seeing, jsonl, tmp_path):
    """Of a moving picture and of a list of images: as many as are allowed, evenly taken, in the place of the video."""
    moving = BytesIO()
    colours = [(40 * number, 0, 0) for number in range(6)]
    first, *others = (Image.new("RGB", (20, 30), colour) for colour in colours)
    first.save(moving, format=kind, save_all=True, append_images=others, duration=40, **({"lossless": True} if kind == "WEBP" else {}))
    (tmp_path / "film").write_bytes(moving.getvalue())
    stills = [png(Image.new("RGB", (20, 30), colour)) for colour in colours]
    uris = [f"data:image/png;base64,{base64.b64encode(still).decode()}" for still in stills]
    forms = [
        asked("Before", {"type": "video", "video": "film"}, "behind"),
        asked("Before", {"type": "video", "video": uris}, "behind"),
        asked("Before", {"type": "video_url", "video_url": {"url": "film"}}, "behind"),
        {**asked("Before", {"type": "video"}, "behind"), "videos": ["film"]},
        {"messages": [{"role": "user", "content": "Before<video>behind"}, {"role": "assistant", "content": "Yes"}], "videos": ["film"]},
        {"messages": [{"role": "user", "content": "Before<video>behind"}, {"role": "assistant", "content": "Yes"}], "video": uris},
    ]
    tokenizer, taken = seeing(), [0, 2, 5]
    found = rows(jsonl(*forms), tokenizer, images=ImageConfig(frames=3))
    plain = rows(jsonl(asked("Before", *(part(image=uris[number]) for number in taken), "behind"), name="stills.jsonl"), tokenizer)[0]
    for example in found:
        assert example.tokens == plain.tokens
        assert [decoded(file).getpixel((3, 3)) for file in files(tokenizer, example)] == [colours[number] for number in taken]
    assert len(files(tokenizer, rows(jsonl(forms[0]), tokenizer)[0])) == 6


def test_published_forms_in_their_order(seeing, jsonl, pictures):
    """LLaVA's, LLaMA-Factory's, verl's, TRL's and that of llava-instruct-mix."""
    tokenizer = seeing()
    both = ["pictures/small.png", "pictures/wide.png"]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Me"}]}
    turns = [{"role": "user", "content": "A <image> and <image>?"}, {"role": "assistant", "content": "Me"}]
    llava = {"id": "1", "image": both[0], "conversations": [{"from": "human", "value": "<image>\nWho?"}, {"from": "gpt", "value": "Me"}]}
    parts = [{"type": "image", "index": 1, "text": None}, {"type": "text", "index": None, "text": "?"}, {"type": "image", "index": 0}]
    records = [
        llava,
        {"messages": turns, "images": both},
        {"prompt": [turns[0]], "response": "Me", "images": both},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Who?"}]}],
            "completion": [answer],
            "images": both[:1],
        },
        {"messages": [{"role": "user", "content": parts}, answer], "images": both},
        {"messages": [{"role": "user", "content": "An <image> tag?"}, {"role": "assistant", "content": "<image>"}]},
        {"messages": [{"role": "user", "content": "None"}, {"role": "assistant", "content": "No"}], "images": []},
    ]
    found = rows(jsonl(*records), tokenizer)
    assert [files(tokenizer, row) for row in found] == [[SMALL], [SMALL, WIDE], [SMALL, WIDE], [SMALL], [WIDE, SMALL], [], []]
    texts = [tokenizer.decode(row.tokens, skip_special=False) for row in found]
    assert "<|vision_end|>\nWho?" in texts[0] and "A <|vision_start|>" in texts[1] and "<|vision_end|> and <|vision_start|>" in texts[2]
    assert "An <image> tag?" in texts[5]


def test_hub_columns_in_parquet_and_datasets(seeing, tmp_path):
    tokenizer = seeing()
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    prompts = [
        [{"role": "user", "content": "<image>Who?"}],
        [{"role": "user", "content": "<image><image>"}],
        [{"role": "user", "content": "x"}],
    ]
    columns = [[{"bytes": SMALL, "path": "gone.png"}], [{"bytes": WIDE, "path": None}] * 2, None]
    table = pa.table({"prompt": prompts, "images": pa.array(columns, pa.list_(kind)), "answer": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "d.parquet")
    path = str(tmp_path / "d.parquet")
    prompts, _ = load_prompts(path, PromptDataConfig(train=path), tokenizer)
    assert [files(tokenizer, prompt) for prompt in prompts] == [[SMALL], [WIDE, WIDE], []]
    assert prompts[0].text.count("<|image_pad|>") == 1 and len(prompts[0].tokens) > 8
    assert prompts[0].columns["images"] == list(images_in(prompts[0].extras)) and prompts[0].messages[0]["content"][0] == {"type": "image"}
    data = datasets.Dataset.from_dict(
        {"prompt": ["Who?", "x"], "image": [{"bytes": SMALL}, None], "others": [[{"bytes": WIDE}], []]},
        features=datasets.Features(
            {"prompt": datasets.Value("string"), "image": datasets.Image(), "others": datasets.List(datasets.Image())}
        ),
    )
    data.save_to_disk(str(tmp_path / "saved"))
    for location in (str(tmp_path / "saved"), f"datasets:{tmp_path / 'saved'}"):
        prompts, _ = load_prompts(location, PromptDataConfig(train=location, apply_chat_template=True), tokenizer)
        assert [files(tokenizer, prompt) for prompt in prompts] == [[SMALL], []]  # the file, not another one of the same pixels


def test_an_image_of_pil(seeing):
    tokenizer = seeing()
    raw = RawRecord(file="x.jsonl", line=1, index=0, value=Fields([("prompt", "Who?"), ("image", picture(8, 8))]))
    reader = images_module.ImageReader(PromptDataConfig(apply_chat_template=True), tokenizer.vision)
    reader.read(raw)
    ((found,),) = raw.value.images.column
    assert decoded(tokenizer.vision.store.get(found.digest)).tobytes() == picture(8, 8).tobytes()


def test_rows_of_python_and_csv(seeing, tmp_path, pictures):
    tokenizer = seeing()
    content = [{"type": "image", "image": picture(8, 8)}, {"type": "text", "text": "?"}]
    made = _write_rows(tmp_path / "rows.jsonl", "data.train", [{"prompt": [{"role": "user", "content": content}], "response": "a"}])
    (row,) = rows(str(made), tokenizer)
    assert decoded(files(tokenizer, row)[0]).tobytes() == picture(8, 8).tobytes()
    table = tmp_path / "d.csv"
    table.write_text(
        'prompt,response,images\nWho?,Me,"[""pictures/small.png"", ""pictures/wide.png""]"\nWho?,Me,pictures/small.png\nx,y,\n'
    )
    assert [files(tokenizer, row) for row in rows(str(table), tokenizer, apply_chat_template=True)] == [[SMALL, WIDE], [SMALL], []]


def test_every_loader_of_prompts_and_rows(seeing, jsonl, pictures):
    tokenizer = seeing()
    user = {"role": "user", "content": [part(image="pictures/small.png"), {"type": "text", "text": "Who?"}]}
    say = [{"role": "assistant", "content": text} for text in ("Me", "You")]
    settings = {"max_length": 200}
    pairs = jsonl({"prompt": [user], "chosen": say[:1], "rejected": say[1:]}, {"chosen": [user, say[0]], "rejected": [user, say[1]]})
    (pair, same), _ = load_preferences(pairs, PreferenceDataConfig(train=pairs, **settings), tokenizer)
    assert [files(tokenizer, row) for row in (pair.chosen, pair.rejected, same.chosen, same.rejected)] == [[SMALL]] * 4
    unpaired, _ = load_unpaired(pairs, UnpairedDataConfig(train=pairs, **settings), tokenizer)
    other = jsonl(
        {"prompt": [user], "completion": say[:1], "label": True}, {"prompt": [say[0] | {"role": "user"}], "completion": say, "label": 0}
    )
    assert [files(tokenizer, one.row) for one in unpaired] == [[SMALL]] * 4
    mixed, _ = load_unpaired(other, UnpairedDataConfig(train=other, bad_lines=BadLines.skip, **settings), tokenizer)
    assert [files(tokenizer, one.row) for one in mismatched([*unpaired[:1], *mixed], 200)] == [[SMALL]] * 2
    path = jsonl({"messages": [user, say[0]], "label": [1.0]})
    (scored,), _ = load_regression(path, RegressionDataConfig(train=path, attributes=["good"], **settings), tokenizer)
    path = jsonl({"prompt": [user], "steps": ["a", "b"], "labels": [1, 0]})
    (steps,), _ = load_steps(path, StepDataConfig(train=path, **settings), tokenizer)
    path = jsonl({"messages": [user, say[0]]})
    (shown,), _ = load_demonstrations(path, DemonstrationDataConfig(train=path, max_prompt_length=100, **settings), tokenizer)
    path = jsonl({"prompt": [user]})
    (request,), _ = load_requests(path, RequestDataConfig(train=path), tokenizer)
    demonstration = answered(shown.prompt, shown.response)
    examples = (scored.row, steps.row, shown.prompt, demonstration, request.prompt)
    assert [files(tokenizer, one) for one in examples] == [[SMALL]] * 5
    written = jsonl(request.answered("Me"))  # what `generate` writes can be trained on
    (row,) = rows(written, tokenizer)
    assert files(tokenizer, row) == [SMALL] and row.tokens[: len(request.prompt.tokens)] == request.prompt.tokens


def test_a_teachers_log_probs_with_images(seeing, jsonl, tmp_path):
    teacher, student = seeing(store="teacher/images"), seeing(store="student/images")
    found = rows(jsonl(asked(part(image=URI)), asked("none")), teacher)
    mask = torch.zeros(2, max(len(row.tokens) for row in found), dtype=torch.bool)
    for own, row in zip(mask, found, strict=True):
        own[: len(row.tokens)] = torch.tensor(row.loss_mask)
    taught = distilled(found, mask, torch.ones(*mask.shape, 1, dtype=torch.int64), torch.zeros(*mask.shape, 1))
    manifest = {"top_k": 1, "num_examples": 2, "shard_size": 2, "data": data_digest(found), "model": "m", "made_of": "it"}
    begin(tmp_path / "logprobs", Manifest(tokenizer=teacher.digest, **manifest))
    write_shard(tmp_path / "logprobs", 0, taught, teacher.vision.store)
    path = str(tmp_path / "logprobs")
    examples, _ = load_distillation(path, DistillationDataConfig(train=path), student)
    assert [files(student, row) for row in examples] == [[SMALL], []]
    assert distillation_batch(list(examples), 0).extras["images"].data.shape == (2, MOST_IMAGES, 4)
    long = DistillationDataConfig(train=path, max_length=len(found[0].tokens) - 1, overlong=Overlong.truncate)
    kept, report = load_distillation(path, long, student)
    assert len(kept) == 1 and report.num_too_long == 1
    assert data_digest(found) != data_digest([replace(found[0], extras={}), found[1]])
    with pytest.raises(DataError, match="examples with images, and the model does not see"):
        load_distillation(path, DistillationDataConfig(train=path), student.seeing(None))


def test_uses_that_cannot_hold_images_refuse_them(seeing, jsonl):
    tokenizer = seeing()
    user = {"role": "user", "content": [part(image=URI), {"type": "text", "text": "Who?"}]}
    path = jsonl({"prompt": [user], "response": "a"})
    with pytest.raises(DataError, match="has 1 images, of which this form or use of records can hold 0"):
        load_cases(path, ConstitutionDataConfig(train=path), tokenizer, given=False)
    with pytest.raises(DataError, match="this format cannot hold images"):
        load_requests(path, RequestDataConfig(train=path, attributes="quality:4"), tokenizer)
    with pytest.raises(DataError, match="this format cannot hold images"):
        load_unlabelled(path, AnnotateDataConfig(train=path), tokenizer)
    prompts, _ = load_prompts(path, PromptDataConfig(train=path), tokenizer)
    with pytest.raises(DataError, match=r"d.jsonl:1: holds an image, and a judge"):
        read_questions(path, PromptDataConfig(train=path), prompts)
    text = jsonl({"text": "abc", "image": URI})
    with pytest.raises(DataError, match="has 1 images, of which this form or use of records can hold 0"):
        rows(text, tokenizer)


USER = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "Me"}
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "more marks": (
        {"messages": [{"role": "user", "content": "<image><image>"}, ANSWER], "images": [URI]},
        "has 2 marks '<image>' in its texts for 1",
    ),
    "fewer marks": (
        {"messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": [URI] * 2},
        "has 1 marks '<image>' in its texts for 2",
    ),
    "an assistant's mark": (
        {"messages": [USER, {"role": "assistant", "content": "<image>"}], "images": [URI]},
        "one for each in prompts, or none",
    ),
    "bare parts": (asked({"type": "image"}, {"type": "image"}, images=[URI]), "has 2 image parts without an image, and 1 images in"),
    "no column": (asked({"type": "image"}), "has 1 image parts without an image, and 0 images in"),
    "an index twice": (asked(part(index=0), part(index=0), images=[URI] * 2), "has 2 image parts without an image, and 2 images in"),
    "both": (asked(part(image=URI), images=[URI]), "has images in its messages and in field 'images'"),
    "two columns": ({"messages": [USER, ANSWER], "image": URI, "images": [URI]}, "has 'image' and 'images', which is ambiguous"),
    "an assistant's": (
        {"messages": [USER, {"role": "assistant", "content": [part(image=URI)]}]},
        "field 'messages[1]' is an assistant's and holds an image, expected images only in prompts",
    ),
    "plain": (
        {"prompt": "Who?", "response": "Me", "image": URI},
        "has a plain text and images in field 'image', expected messages, or data.apply",
    ),
    "nobody": ({"messages": [{"role": "system", "content": "x"}, ANSWER], "image": URI}, "no message of a user"),
    "http": (asked(part(url="https://example.com/a.png")), "is 'https://example.com/a.png': nothing is loaded over the network"),
    "column http": (
        {"messages": [USER, ANSWER], "image": "http://example.com/a.png"},
        "field 'image[0]': the image is 'http://example.com",
    ),
    "base64": (asked(part(base64="!!")), "is '!!', which is not base64"),
    "another uri": (asked(part(image="data:text/plain,abc")), "expected data:image/png;base64,..."),
    "a number": (asked(part(image=7)), "field 'messages[0]': the image is 7, expected a path, bytes"),
    "null": ({"messages": [USER, ANSWER], "images": [None]}, "field 'images[0]': the image is None, expected a path"),
    "video": ({"messages": [USER, ANSWER], "videos": ["a.mp4"]}, "field 'videos[0]': the video"),
    "sound": (asked({"type": "audio", "audio": "a.wav"}), "has the type 'audio', expected text, an image or a video"),
    "marks of videos": (
        {"messages": [{**USER, "content": "<video> and <video>"}, ANSWER], "videos": [[URI]]},
        "has 2 marks '<video>' in its texts for 1 videos",
    ),
    "images and videos": (
        {"messages": [USER, ANSWER], "videos": [[URI]], "images": [URI]},
        "has 'images' and 'videos', which is ambiguous",
    ),
    "long path": (asked(part(image="A" * 5000)), "expected a path; base64 begins with data:image/png;base64,"),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_that_are_not_clear(name, seeing, jsonl):
    record, message = PLACES[name]
    with pytest.raises(DataError) as error:
        rows(jsonl(asked("fine"), record), seeing())
    assert "d.jsonl:2: " in str(error.value) and message in str(error.value)


def test_responses_hold_no_images(seeing, jsonl):
    chosen = [{"role": "assistant", "content": "Me"}, {"role": "user", "content": [part(image=URI)]}, ANSWER]
    path = jsonl({"prompt": [USER], "chosen": chosen, "rejected": [{"role": "assistant", "content": "You"}]})
    with pytest.raises(DataError, match="field 'chosen' holds an image, expected images only in prompts"):
        load_preferences(path, PreferenceDataConfig(train=path), seeing())


def test_a_model_that_does_not_see(chars, jsonl):
    path = jsonl({"prompt": "a", "response": "b", "image": "gone.png"})
    _, report = load_supervised(path, SFTDataConfig(train=path), chars)
    assert report.unused == {"image": 1}
    with pytest.raises(DataError, match=r"d.jsonl:1: field 'messages\[0\]': a part of the content has the type 'image'.*does not see"):
        rows(jsonl(asked(part(image=URI))), chars)


@pytest.mark.parametrize(
    ("processor", "pixels", "named"),
    [
        ("LlavaProcessor", "NoSuch", "its image processor does not load"),
        ("Blip2Processor", "BlipImageProcessor", r"its image processor \(Blip2Processor\) does not say which tokens an image takes"),
    ],
)
def test_a_processor_of_no_use_matters_only_for_images(processor, pixels, named, folders, jsonl, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folders("llava").glob("*.json*"):
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "chat_template.jinja").write_bytes((folders("llava") / "chat_template.jinja").read_bytes())
    (broken / "processor_config.json").unlink()
    (broken / "preprocessor_config.json").write_text(json.dumps({"processor_class": processor, "image_processor_type": pixels}))
    tokenizer = load_tokenizer(broken).seeing(Vision.of([broken], tmp_path / "s"))
    assert len(rows(jsonl(asked("fine")), tokenizer)) == 1
    with pytest.raises(ConfigError, match=named):
        rows(jsonl(asked(part(image=URI))), tokenizer)


# --- lengths


@pytest.mark.parametrize("cache", [False, True])
def test_a_run_that_cannot_have_images_says_so_before_it_trains(cache, seeing, jsonl, tmp_path):
    tokenizer, path = seeing("llava"), jsonl(asked({"type": "image", "image": URI}, "?"))
    settings = {"cache": str(tmp_path / "cache")} if cache else {}
    if cache:
        rows(path, tokenizer, **settings)
    tokenizer.vision.refusal = NOT_PACKED
    with pytest.raises(ConfigError, match=r"model.packing=true: .*images"):
        rows(path, tokenizer, **settings)
    assert rows(jsonl(asked("no image"), name="text.jsonl"), tokenizer, **settings)


def test_packing_refuses_images_of_transformers_modules(folders, tmp_path):
    folder = tmp_path / "llava"
    shutil.copytree(folders("llava"), folder)
    write_seeing("llava", folder)
    for packing, refusal in ((True, NOT_PACKED), (False, "")):
        config = ModelConfig(path=str(folder), packing=packing, micro_batch_tokens=64, implementation=Implementation.transformers)
        assert load_model_files(config)[0].vision.refusal == refusal


def test_rows_that_are_cut(seeing, jsonl):
    """An example loses its end: images behind the cut are left out, and a cut inside one drops the record."""
    tokenizer = seeing()
    user = {"role": "user", "content": [part(image=URI)]}
    path = jsonl({"messages": [user, ANSWER, user, ANSWER]})
    (whole,) = rows(path, tokenizer)
    places = [place for place, token in enumerate(whole.tokens) if token in tokenizer.vision.slot_ids]
    first, second = places[: SLOTS["qwen2_5_vl"]], places[SLOTS["qwen2_5_vl"] :]
    cut = {"overlong": Overlong.truncate}
    for length, number in ((second[0], 1), (second[-1] + 1, 2), (len(whole.tokens), 2)):
        (row,) = rows(path, tokenizer, max_length=length, **cut)
        assert len(images_in(row.extras)) == number and tokenizer.vision.count_slots(row.tokens) == number * len(first)
    for length in (second[0] + 1, second[-1]):
        with pytest.raises(DataError, match=rf"no usable record: .*1 left out: longer than {length} tokens"):
            rows(path, tokenizer, max_length=length, **cut)


def test_a_prompt_that_would_lose_an_image_is_too_long(seeing, jsonl):
    tokenizer = seeing()
    long = {"role": "user", "content": [{"type": "text", "text": "x" * 20}, part(image=URI), {"type": "text", "text": "Who?"}]}
    path = jsonl({"prompt": [long]}, {"prompt": [{"role": "user", "content": "y" * 60}]})

    def read(length: int) -> Any:
        return load_prompts(path, PromptDataConfig(train=path, max_prompt_length=length, overlong=Overlong.truncate), tokenizer)

    (both, _), report = read(70)
    assert len(images_in(both.extras)) == 1
    whole = len(both.tokens)
    assert len(read(whole - 5)[0][0].extras) == 1
    prompts, report = read(whole - 40)
    assert [prompt.id for prompt in prompts] == [1] and report.num_too_long == 1
    assert report.too_long[0].limit == f"{whole - 40} tokens (data.max_prompt_length)"


# --- limits


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header says so many pixels, and whose content is missing."""
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT")
    return b"\x89PNG\r\n\x1a\n" + b"".join(struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks)


def animated(kind: str) -> bytes:
    frames = [picture(8, 8, seed) for seed in range(3)]
    return png(frames[0], kind, save_all=True, append_images=frames[1:])


BAD: dict[str, tuple[bytes | None, str]] = {
    "missing.png": (None, "does not exist"),
    "empty.png": (b"", "is empty"),
    "text.png": (b"<svg></svg>", "is no image, or a damaged one"),
    "postscript.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "is no image"),
    "short.png": (SMALL[: len(SMALL) // 2], "is a damaged image"),
    "short.jpg": (png(picture(64, 64), "JPEG")[:-900], "is a damaged image"),
    "broken.png": (SMALL[:60] + bytes(40) + SMALL[100:], "is a damaged image"),
    "large.png": (bomb(6000, 6000), "has 6000 x 6000 = 36000000 pixels, allowed: at most data.images.max_pixels=33554432"),
    "bomb.png": (bomb(60000, 60000), "is too large"),
    "moving.gif": (animated("GIF"), "has several frames or pages"),
    "moving.webp": (animated("WEBP"), "has several frames or pages"),
    "moving.png": (animated("PNG"), "has several frames or pages"),
    "pages.tiff": (animated("TIFF"), "has several frames or pages"),
    "thin.png": (png(picture(1000, 2)), "refuses it"),
    "float.tiff": (png(Image.fromarray(np.zeros((8, 8), np.float32)), "TIFF"), "has pixels of 32 bits (mode F)"),
}


def test_images_that_cannot_be_used_are_named(seeing, jsonl, tmp_path):
    for name, (content, _) in BAD.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    bad = {name: message for name, (_, message) in BAD.items()} | dict.fromkeys(("folder.png", "pipe.png"), "is not a regular file")
    path = jsonl(asked("fine"), *(asked(part(image=name)) for name in bad))
    examples, report = load_supervised(path, SFTDataConfig(train=path, bad_lines=BadLines.skip), seeing())
    assert len(examples) == 1 and report.num_bad == len(bad)
    for line, (problem, (name, message)) in enumerate(zip(report.problems, bad.items(), strict=True), start=2):
        assert problem.startswith(f"{path}:{line}: field 'messages[0]': the image {tmp_path / name} ") and message in problem
    with pytest.raises(DataError, match="17 of 18 records of .* are bad"):
        rows(path, seeing())


def test_limits(seeing, jsonl, monkeypatch):
    path = jsonl(asked(part(image=URI), part(image=URI)))
    assert len(rows(path, seeing(), images=ImageConfig(max_pixels=600, max_per_record=2))) == 1
    with pytest.raises(DataError, match="has 20 x 30 = 600 pixels, allowed: at most data.images.max_pixels=599"):
        rows(path, seeing(), images=ImageConfig(max_pixels=599))
    with pytest.raises(DataError, match="has 2 images, allowed: at most data.images.max_per_record=1"):
        rows(path, seeing(), images=ImageConfig(max_per_record=1))
    monkeypatch.setattr(images_module, "MOST_BYTES", len(SMALL) - 1)
    with pytest.raises(DataError, match=f"has {len(SMALL)} bytes, allowed: at most {len(SMALL) - 1}"):
        rows(path, seeing())
    for name, value in (("max_per_record", MOST_IMAGES + 1), ("max_per_record", 0), ("max_pixels", 0), ("max_pixels", 10**9)):
        with pytest.raises(ConfigError, match=rf"data.images.{name} is {value}, allowed: 1 to "):
            ImageConfig(**{name: value})


def test_the_root_of_paths(seeing, jsonl, pictures, tmp_path):
    tokenizer = seeing()
    (pictures / "link.png").symlink_to(tmp_path / "outside.png")
    (tmp_path / "outside.png").write_bytes(WIDE)
    root = ImageConfig(root=str(pictures))
    fine = jsonl(asked(part(image="small.png")), asked(part(image=str(pictures / "small.png"))), asked(part(image="link.png")))
    assert [files(tokenizer, row) for row in rows(fine, tokenizer, images=root)] == [[SMALL], [SMALL], [WIDE]]
    for name in ("../outside.png", str(tmp_path / "outside.png"), "x/../../outside.png"):
        with pytest.raises(DataError, match=r"is not below data.images.root="):
            rows(jsonl(asked(part(image=name))), tokenizer, images=root)
    (tmp_path / "lists").mkdir()
    beside = jsonl(asked(part(image="../pictures/small.png")), name="lists/d.jsonl")
    assert len(rows(beside, tokenizer)) == 1


def test_pixels_are_those_that_transformers_loads(tmp_path):
    from transformers.image_utils import load_image

    turned = Image.Exif()
    turned[0x0112] = 6
    see_through = picture(8, 8).convert("RGBA")
    see_through.putalpha(64)
    made = {
        "turned.jpg": png(picture(20, 10), "JPEG", exif=turned),
        "cmyk.jpg": png(picture(8, 8).convert("CMYK"), "JPEG"),
        "palette.png": png(picture(8, 8).quantize(16)),
        "grey.png": png(picture(8, 8).convert("L")),
        "bits.png": png(picture(8, 8).convert("1")),
        "alpha.png": png(see_through),
        "alpha.webp": png(see_through, "WEBP", lossless=True),
        "one.gif": png(picture(8, 8), "GIF"),
    }
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
        ours, theirs = decoded(content), load_image(str(tmp_path / name))
        assert ours.mode == "RGB" and ours.size == theirs.size and ours.tobytes() == theirs.tobytes(), name
    assert decoded(made["turned.jpg"]).size == (10, 20)
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    assert np.array_equal(np.asarray(decoded(png(Image.fromarray(deep))))[..., 0], deep >> 8)  # not 255 wherever it is above 255


# --- the store, the cache


def test_every_image_is_processed_once(seeing, jsonl, monkeypatch):
    tokenizer, opened = seeing(), []
    monkeypatch.setattr(vision_module, "decoded", lambda content: (opened.append(1), decoded(content))[1])
    rows(jsonl(*[{"messages": [{"role": "user", "content": [part(image=URI)]}, ANSWER, USER, ANSWER]}] * 5), tokenizer)
    assert len(opened) == 1 and len(list(tokenizer.vision.store.directory.iterdir())) == 1


def test_a_store_of_its_own_goes_with_it():
    store = ImageStore(None)
    digest = store.put(SMALL)
    assert store.get(digest) == SMALL
    directory = store.directory
    del store
    assert not directory.exists()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_cache_keeps_images_for_other_runs(num_workers, seeing, jsonl, pictures, tmp_path, monkeypatch):
    settings = {"cache": str(tmp_path / "cache"), "num_workers": num_workers}
    path = jsonl(asked(part(image="pictures/small.png")), asked("none"), asked(part(image=URI), part(image="pictures/wide.png")))
    first = seeing(store="run_1/images")
    assert [files(first, row) for row in rows(path, first, **settings)] == [[SMALL], [], [SMALL, WIDE]]
    monkeypatch.setattr(images_module.ImageReader, "read", None)  # nothing is read again
    later = seeing(store="run_2/images")
    assert [files(later, row) for row in rows(path, later, **settings)] == [[SMALL], [], [SMALL, WIDE]]
    link = os.link

    def across(source: Path, target: Path) -> None:
        if "cache" in Path(source).parts:
            raise OSError(errno.EXDEV, "another file system")
        link(source, target)

    monkeypatch.setattr(os, "link", across)
    other = seeing(store="run_3/images")
    assert [files(other, row) for row in rows(path, other, **settings)] == [[SMALL], [], [SMALL, WIDE]]
    for file in (tmp_path / "cache" / "images").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"is missing; remove .*cache.*, and it will be made again"):
        rows(path, seeing(store="run_4/images"), **settings)


def test_the_cache_notices_other_images_processors_and_settings(folders, seeing, jsonl, pictures, tmp_path):
    settings = {"cache": str(tmp_path / "cache"), "num_workers": 1}
    path = jsonl(asked(part(image="pictures/small.png")))
    tokenizer = seeing()
    assert files(tokenizer, rows(path, tokenizer, **settings)[0]) == [SMALL]
    (pictures / "small.png").write_bytes(WIDE)
    assert files(tokenizer, rows(path, tokenizer, **settings)[0]) == [WIDE]
    (pictures / "small.png").unlink()
    with pytest.raises(DataError, match="does not exist"):
        rows(path, tokenizer, **settings)
    (pictures / "small.png").write_bytes(SMALL)
    with pytest.raises(DataError, match="max_pixels=599"):
        rows(path, tokenizer, images=ImageConfig(max_pixels=599), **settings)
    copied = tmp_path / "model"
    copied.mkdir()
    for file in folders("qwen2_5_vl").iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    size = {"size": {"shortest_edge": 64, "longest_edge": 256}}
    pixels = json.loads((copied / "preprocessor_config.json").read_text()) | size
    (copied / "preprocessor_config.json").write_text(json.dumps(pixels))
    smaller = tokenizer.seeing(Vision.of([copied], tmp_path / "store"))
    before, after = (rows(path, one, **settings)[0] for one in (tokenizer, smaller))
    assert len(after.tokens) < len(before.tokens)


# --- what people see


def test_validate_shows_images(folders, jsonl, pictures, tmp_path, capsys):
    path = jsonl(
        asked(part(image="pictures/small.png"), "Who?"), asked("none"), asked(part(image="gone.png")), asked(part(image=URI), "Who?")
    )
    page = tmp_path / "page.html"
    named = ["--kind", "sft", "--tokenizer", str(folders("qwen2_5_vl")), "--html", str(page), "--samples", "2"]
    assert cli.main(["data", "validate", path, *named]) == 1
    out = capsys.readouterr().out
    assert f"bad: {path}:3: field 'messages[0]': the image {tmp_path / 'gone.png'} does not exist" in out
    assert "images of a record: 0 (1 records), 1 (2 records)" in out and "tokens of an image: min 8, median 8, p95 8, max 8" in out
    assert ", 1 images of 8 tokens\n" in out and "<|vision_start|><|image_pad|>*8<|vision_end|>Who?" in out
    assert f"warning: {path}:4: the same tokens as {path}:1" in out
    text = page.read_text()
    assert text.count('<img src="data:image/png;base64,') == 1 and "&lt;|image_pad|&gt;*8" in text and "<mark>Yes" in text
    uri = text.partition('<img src="data:image/png;base64,')[2].partition('"')[0]
    assert decoded(base64.b64decode(uri)).size == (20, 30)


def test_inspect_reads_images_with_a_tokenizer(folders, jsonl, capsys):
    path = jsonl({"prompt": [{"role": "user", "content": "<image>Who?"}], "images": [URI]})
    assert cli.main(["data", "inspect", path, "--tokenizer", str(folders("llava"))]) == 0
    assert "1 images of 16 tokens" in capsys.readouterr().out
