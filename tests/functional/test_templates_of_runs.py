"""The chat template of a run is that of its data, its checkpoints, its export, and of the stage that begins with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_jobs import run_job, supervised_settings, train, write_task

from aligner.data.config import SFTDataConfig
from aligner.data.encoding import encode_conversation
from aligner.data.messages import Message
from aligner.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(300)
OLD = "{% for m in messages %}0{{ m.content }}{% endfor %}"
NEW = (
    "{% for m in messages %}{{ '=' if m.role == 'assistant' else '+' }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
TURNS = (Message(role="user", content="1+1"), Message(role="assistant", content="2"))


def test_the_next_stage_reads_the_same(tmp_path: Path) -> None:
    write_task(tmp_path)
    named = [{"name": "default", "template": OLD}, {"name": "tool_use", "template": OLD}]
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": named}))
    (tmp_path / "new.jinja").write_text(NEW)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [turn.as_json() for turn in TURNS]}) + "\n")
    own = (f"data.chat_template={tmp_path / 'new.jinja'}", "algorithm.batch_size=1", "loop.max_steps=1")
    run = tmp_path / "run"
    run_job(train("sft"), run, supervised_settings(tmp_path, tmp_path / "chats.jsonl", *own))
    expected = encode_conversation(
        load_tokenizer(tmp_path / "tokenizer").chatting(SFTDataConfig(train="x", chat_template=str(tmp_path / "new.jinja"))), TURNS
    )
    for left in (run / "export", run / "checkpoints" / "policy" / "step_000001"):
        assert (left / "chat_template.jinja").read_text() == NEW
        assert encode_conversation(load_tokenizer(left), TURNS) == expected
