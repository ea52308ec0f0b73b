"""Images of clients reach the model: OpenAI's and Anthropic's form, the same tokens as in process."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from fake_live_engine import KEY
from vision_models import write_seeing
from vision_rows import encoded

from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.messages import Image, Message
from aligner.endpoint.app import Endpoint
from aligner.endpoint.requests import Model
from aligner.jobs.serving_policy import open_policy
from aligner.rollout.live import LiveRequest
from aligner.servers.access import Access
from aligner.servers.config import ServerConfig
from aligner.types import SamplingConfig
from aligner.types.extras import Images

openai = pytest.importorskip("openai", reason="the package openai is not installed")


def test_images(tmp_path: Path, topology: Any, anthropic: Any) -> None:
    write_seeing("qwen3_vl", tmp_path / "model")
    with open_policy(str(tmp_path / "model"), layout=topology, max_batch_size=4, images=True) as policy:
        model = Model(name="sees", tokenizer=policy.tokenizer, live=policy.live)
        with Endpoint(model, Access(KEY), ServerConfig()) as endpoint:
            client = openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0)
            claude = anthropic.Anthropic(base_url=endpoint.url, api_key=KEY, max_retries=0)
            for seed in (1, 2):
                content = encoded("b", seed)
                text = base64.b64encode(content).decode()
                digest = policy.tokenizer.vision.add(content)
                said = (Message(role="user", content="What?", parts=(Image(digest), "What?")),)
                ids = tuple(encode_prompt(policy.tokenizer, said, PromptStyle(apply_chat_template=True)))
                sampling = SamplingConfig(temperature=0.0, max_response_length=12)
                own = LiveRequest(tokens=ids, seed=0, sampling=sampling, extras={Images.name: Images.of([digest])})
                expected = list(policy.live.submit(own).result(120).tokens)
                assert policy.tokenizer.vision.count_slots(ids) > 1
                how = {"model": "", "max_tokens": 12, "extra_body": {"return_token_ids": True, "temperature": 0}}
                part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
                messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
                chat = client.chat.completions.create(messages=messages, **how)
                assert (chat.prompt_token_ids, chat.choices[0].token_ids) == (list(ids), expected)
                block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}
                messages = [{"role": "user", "content": [block, {"type": "text", "text": "What?"}]}]
                found = claude.messages.create(messages=messages, **how)
                assert (found.prompt_token_ids, found.token_ids) == (list(ids), expected)
            for url, why in (
                ("file:///etc/passwd", "expected data:image"),
                ("http://127.0.0.1/x.png", "expected data:image"),
                ("data:image/png;base64,AAAA", "is no image"),
            ):
                with pytest.raises(openai.BadRequestError, match=why):
                    image = [{"type": "image_url", "image_url": {"url": url}}]
                    client.chat.completions.create(model="", messages=[{"role": "user", "content": image}])
            with pytest.raises(openai.BadRequestError, match="messages hold 17 images; at most 16 are allowed"):
                client.chat.completions.create(model="", messages=[{"role": "user", "content": [part] * 17}])
            with pytest.raises(openai.BadRequestError, match="holds tokens that stand for images"):
                client.completions.create(model="", prompt=list(ids))
            for one in (client, claude):
                one.close()
