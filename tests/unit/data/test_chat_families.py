"""What is learnt of conversations, by the chat templates of the usual families.

The facts of the published templates are written out here in short, one template and one expected row each: how turns are framed, what is
different for the last one, what becomes of thinking and of calls. TRL's package has the published files of some, and versions of them that
mark what an assistant wrote: where they are, the rows are held against `transformers` on those.
"""

# ruff: noqa: E501  (templates are lines)

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import write_byte_tokenizer

from aligner.data.encoding import Encoded, encode_conversation
from aligner.data.messages import Conversation, parse_messages
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.errors import DataError

_LOOP, _END = "{% for m in messages %}", "{% endfor %}"


def marked(head: str, end: str, ask: str, *, first: str = "", content: str = "m.content", roles: str = "m.role", behind: str = "") -> str:
    """Templates that write every turn as head(role), content, end."""
    turn = f"{{{{ {head.replace('ROLE', roles)} + {content} + {end} }}}}"
    return f"{first}{_LOOP}{turn}{_END}{{% if add_generation_prompt %}}{{{{ {ask} }}}}{{% else %}}{behind}{{% endif %}}"


def chatml(first: str = "", content: str = "m.content") -> str:
    return marked("'<|im_start|>' + ROLE + '\\n'", "'<|im_end|>\\n'", "'<|im_start|>assistant\\n'", first=first, content=content)


# Earlier thinking is left out; the last turn has a place for it, empty or not (Qwen3).
_LAST_USER = (
    "{% set ns = namespace(u=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.u = loop.index0 %}{% endif %}{% endfor %}"
)
_QWEN3 = (
    _LAST_USER
    + "{% for m in messages %}{% set c = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content %}"
    "{% set r = m.reasoning_content or ('</think>' in m.content and m.content.split('</think>')[0].split('<think>')[-1].strip('\\n')) or '' %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > ns.u %}<think>\n{{ r.strip('\\n') }}\n</think>\n\n{% endif %}{{ c }}"
    "{% for t in m.tool_calls or [] %}{% set f = t.function or t %}<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nTHINK{% endif %}"
)
_INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}{{ USER }}{% elif m.role == 'assistant' %}{{ ASSISTANT }}{% else %}"
    "{{ raise_exception('roles') }}{% endif %}{% endfor %}"
)


def inst(user: str, assistant: str) -> str:
    return _INST.replace("USER", user).replace("ASSISTANT", assistant)


_GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "<|end|>{% endif %}{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_R1 = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}</s>"
    "{% else %}{{ '<｜User｜>' if m.role == 'user' else '' }}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
_GLM = "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
_COHERE = (
    "<s>{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
    "{% else %}<|{{ m.role | upper }}_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}"
)
_PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
_LLAMA3 = "'<|start_header_id|>' + ROLE + '<|end_header_id|>\\n\\n'"
_GEMMA = ("'<start_of_turn>' + ROLE + '\\n'", "'<end_of_turn>\\n'", "'<start_of_turn>model\\n'")
_MODEL = "('model' if m.role == 'assistant' else m.role)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """`row`: two turns each, what is learnt in [[ ]]; A and B stand for the first and the last answer."""

    template: str
    row: str
    end: str = "</s>"


def two(user: str, head: str, end: str, *, first: str = "", last: str = "", behind: str = "") -> str:
    """The row of a template that writes every turn alike; `last` stands before the last answer, `behind` behind the last end."""
    return f"{first}{user.replace('U', 'uone')}{head}[[A{end}]]{user_between(end, user)}{head}[[{last}B{end}{behind}]]"


def user_between(end: str, user: str) -> str:
    return ("\n" if user.startswith("<|im_start|>") or "start_of_turn" in user else "") + user.replace("U", "utwo")


_IM_USER, _IM_HEAD = "<|im_start|>user\nU<|im_end|>\n", "<|im_start|>assistant\n"
_IM = two(_IM_USER, _IM_HEAD, "<|im_end|>")
_G_ROW = two("<start_of_turn>user\nU<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>", first="<s>")
_L_USER = "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
_L_ROW = two(_L_USER, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", first="<s>")
_PHI = "<s><|user|>\nuone<|end|>\n<|assistant|>\n[[A<|end|>]]\n<|user|>\nutwo<|end|>\n<|assistant|>\n[[B<|end|>\n<|endoftext|>]]"
_I_ROW = "<s>[INST] uone [/INST][[ A</s>]][INST] utwo [/INST][[ B</s>]]"

FAMILIES = {
    "qwen2_5": Family(template=chatml(), row=_IM, end="<|im_end|>"),
    "chatml_on_a_base_tokenizer": Family(template=chatml(), row=_IM.removesuffix("]]") + "<|endoftext|>]]", end="<|endoftext|>"),
    "qwen3": Family(
        template=_QWEN3.replace("THINK", ""),
        row="<|im_start|>user\nuone<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>]]\n<|im_start|>user\nutwo<|im_end|>\n<|im_start|>assistant\n"
        "[[<think>\n\n</think>\n\nB<|im_end|>]]",
        end="<|im_end|>",
    ),
    "qwen3_on_a_base_tokenizer": Family(
        template=_QWEN3.replace("THINK", ""),
        row="<|im_start|>user\nuone<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>]]\n<|im_start|>user\nutwo<|im_end|>\n<|im_start|>assistant\n"
        "[[<think>\n\n</think>\n\nB<|im_end|><|endoftext|>]]",
        end="<|endoftext|>",
    ),
    "qwen3_5_thinking": Family(  # the generation prompt opens the thinking, which earlier turns do not have
        template=_QWEN3.replace("THINK", "<think>\n"),
        row="<|im_start|>user\nuone<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>]]\n<|im_start|>user\nutwo<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n[[\n</think>\n\nB<|im_end|>]]",
        end="<|im_end|>",
    ),
    "qwen3_5_without_thinking": Family(
        template=_QWEN3.replace("THINK", "<think>\n\n</think>\n\n"),
        row="<|im_start|>user\nuone<|im_end|>\n<|im_start|>assistant\n[[A<|im_end|>]]\n<|im_start|>user\nutwo<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[[B<|im_end|>]]",
        end="<|im_end|>",
    ),
    "smollm2": Family(
        template=chatml(first="<|im_start|>system\nYou are SmolLM.<|im_end|>\n"),
        row="<|im_start|>system\nYou are SmolLM.<|im_end|>\n" + _IM,
        end="<|im_end|>",
    ),
    "yi": Family(template=chatml(), row=_IM, end="<|im_end|>"),
    "internlm2": Family(template=chatml(first="<s>"), row="<s>" + _IM, end="<|im_end|>"),
    "minicpm": Family(
        template=inst("'<用户>' + m.content.strip() + '<AI>'", "m.content.strip()"),
        row="<s><用户>uone<AI>[[A]]<用户>utwo<AI>[[B</s>]]",
    ),
    "phi3": Family(
        template=marked("'<|' + ROLE + '|>\\n'", "'<|end|>\\n'", "'<|assistant|>\\n'", first="<s>", behind="<|endoftext|>"),
        row=_PHI,
        end="<|endoftext|>",
    ),
    "phi3_5": Family(
        template="<s>{% for m in messages %}{% if m.role == 'system' and m.content %}<|system|>\n{{ m.content }}<|end|>\n{% elif m.role == 'user' %}"
        "<|user|>\n{{ m.content }}<|end|>\n{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}",
        row=_PHI,
        end="<|endoftext|>",
    ),
    "phi4": Family(
        template=marked("'<|im_start|>' + ROLE + '<|im_sep|>'", "'<|im_end|>'", "'<|im_start|>assistant<|im_sep|>'"),
        row="<|im_start|>user<|im_sep|>uone<|im_end|><|im_start|>assistant<|im_sep|>[[A<|im_end|>]]<|im_start|>user<|im_sep|>utwo<|im_end|>"
        "<|im_start|>assistant<|im_sep|>[[B<|im_end|>]]",
        end="<|im_end|>",
    ),
    "phi4_mini": Family(
        template=marked("'<|' + ROLE + '|>'", "'<|end|>'", "'<|assistant|>'", behind="<|endoftext|>"),
        row="<|user|>uone<|end|><|assistant|>[[A<|end|>]]<|user|>utwo<|end|><|assistant|>[[B<|end|><|endoftext|>]]",
        end="<|endoftext|>",
    ),
    "llama2": Family(
        template=inst("'[INST] ' + m.content.strip() + ' [/INST]'", "' ' + m.content.strip() + ' ' + eos_token"),
        row=_I_ROW.replace("A</s>", "A </s>").replace("B</s>", "B </s>"),
    ),
    "llama3": Family(
        template=marked(_LLAMA3, "'<|eot_id|>'", _LLAMA3.replace("ROLE", "'assistant'"), first="<s>", content="m.content | trim"),
        row=_L_ROW,
        end="<|eot_id|>",
    ),
    "llama3_with_the_end_of_its_base": Family(
        template=marked(_LLAMA3, "'<|eot_id|>'", _LLAMA3.replace("ROLE", "'assistant'"), first="<s>"),
        row=_L_ROW.removesuffix("]]") + "<|endoftext|>]]",
        end="<|endoftext|>",
    ),
    "llama4": Family(
        template=marked(
            "'<|header_start|>' + ROLE + '<|header_end|>\\n\\n'",
            "'<|eot|>'",
            "'<|header_start|>assistant<|header_end|>\\n\\n'",
            first="<s>",
        ),
        row="<s><|header_start|>user<|header_end|>\n\nuone<|eot|><|header_start|>assistant<|header_end|>\n\n[[A<|eot|>]]"
        "<|header_start|>user<|header_end|>\n\nutwo<|eot|><|header_start|>assistant<|header_end|>\n\n[[B<|eot|>]]",
        end="<|eot|>",
    ),
    "mistral": Family(template=inst("'[INST] ' + m.content + ' [/INST]'", "' ' + m.content + eos_token"), row=_I_ROW),
    "mistral_v7": Family(
        template=inst("'[INST]' + m.content + '[/INST]'", "m.content + eos_token"),
        row="<s>[INST]uone[/INST][[A</s>]][INST]utwo[/INST][[B</s>]]",
    ),
    "gemma": Family(template=marked(*_GEMMA, first="<s>", roles=_MODEL, content="m.content | trim"), row=_G_ROW, end="<end_of_turn>"),
    "gemma_with_the_end_of_its_base": Family(template=marked(*_GEMMA, first="<s>", roles=_MODEL), row=_G_ROW.removesuffix("]]") + "</s>]]"),
    "gemma4": Family(
        template=marked("'<|turn>' + ROLE + '\\n'", "'<turn|>\\n'", "'<|turn>model\\n'", roles=_MODEL),
        row="<|turn>user\nuone<turn|>\n<|turn>model\n[[A<turn|>]]\n<|turn>user\nutwo<turn|>\n<|turn>model\n[[B<turn|>]]",
        end="<turn|>",
    ),
    "deepseek_v2": Family(
        template=inst("'User: ' + m.content + '\\n\\n'", "'Assistant: ' + m.content + eos_token")
        + "{% if add_generation_prompt %}Assistant:{% endif %}",
        row="<s>User: uone\n\nAssistant:[[ A</s>]]User: utwo\n\nAssistant:[[ B</s>]]",
    ),
    "deepseek_r1": Family(template=_R1, row="<s><｜User｜>uone<｜Assistant｜>[[A</s>]]<｜User｜>utwo<｜Assistant｜>[[B</s>]]"),
    "deepseek_v3_1": Family(
        template=_R1.replace("<think>\n", "</think>"), row="<s><｜User｜>uone<｜Assistant｜>[[A</s>]]<｜User｜>utwo<｜Assistant｜>[[B</s>]]"
    ),
    "gpt_oss": Family(
        template=_GPT_OSS,
        row="<|start|>user<|message|>uone<|end|><|start|>assistant[[<|channel|>final<|message|>A<|end|>]]"
        "<|start|>user<|message|>utwo<|end|><|start|>assistant[[<|channel|>final<|message|>B<|return|>]]",
        end="<|return|>",
    ),
    "glm4": Family(  # no mark of its own ends a turn: the next speaker's does
        template=_GLM, row="[gMASK]<sop><|user|>\nuone<|assistant|>\n[[A<|user|>]]\nutwo<|assistant|>\n[[B<|user|>]]", end="<|user|>"
    ),
    "command_r7b": Family(
        template=_COHERE,
        row="<s><|START_OF_TURN_TOKEN|><|USER_TOKEN|>uone<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>"
        "[[A<|END_RESPONSE|><|END_OF_TURN_TOKEN|>]]<|START_OF_TURN_TOKEN|><|USER_TOKEN|>utwo<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>[[B<|END_RESPONSE|><|END_OF_TURN_TOKEN|>]]",
        end="<|END_OF_TURN_TOKEN|>",
    ),
    "granite3": Family(
        template=marked("'<|start_of_role|>' + ROLE + '<|end_of_role|>'", "'</s>\\n'", "'<|start_of_role|>assistant<|end_of_role|>'"),
        row="<|start_of_role|>user<|end_of_role|>uone</s>\n<|start_of_role|>assistant<|end_of_role|>[[A</s>]]\n"
        "<|start_of_role|>user<|end_of_role|>utwo</s>\n<|start_of_role|>assistant<|end_of_role|>[[B</s>]]",
    ),
    "olmo2": Family(  # only the last answer of a conversation has the end token behind it, no line break
        template="<s>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\\n' }}<|assistant|>\n{% endif %}",
        row="<s><|user|>\nuone\n<|assistant|>\n[[A</s>]]\n<|user|>\nutwo\n<|assistant|>\n[[B</s>]]",
    ),
    "zephyr": Family(
        template=marked("'<|' + ROLE + '|>\\n'", "eos_token + '\\n'", "'<|assistant|>\\n'"),
        row="<|user|>\nuone</s>\n<|assistant|>\n[[A</s>]]\n<|user|>\nutwo</s>\n<|assistant|>\n[[B</s>]]",
    ),
    "falcon3": Family(
        template="{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        row="<|user|>\nuone\n<|assistant|>\n[[A</s>]]\n<|user|>\nutwo\n<|assistant|>\n[[B</s>]]",
    ),
    "vicuna": Family(
        template="{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        row="USER: uone ASSISTANT:[[ A</s>]]USER: utwo ASSISTANT:[[ B</s>]]",
    ),
    "kimi_k2": Family(
        template="{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
        row="<|im_user|>user<|im_middle|>uone<|im_end|><|im_assistant|>assistant<|im_middle|>[[A<|im_end|>]]"
        "<|im_user|>user<|im_middle|>utwo<|im_end|><|im_assistant|>assistant<|im_middle|>[[B<|im_end|>]]",
        end="<|im_end|>",
    ),
    "idefics3": Family(  # contents as lists of parts alone
        template=_PARTS,
        row="user:uone<end_of_utterance>\nassistant:[[A<end_of_utterance>]]\nuser:utwo<end_of_utterance>\nassistant:[[B<end_of_utterance>]]",
        end="<end_of_utterance>",
    ),
}
_SPECIAL = re.compile(
    r"<\|[\w]+\|>|<｜\w+｜>|<\|turn>|<turn\|>|</?s>|</?think>|</?tool_call>|\[/?INST\]|\[gMASK\]|<sop>|<(?:start|end)_of_\w+>|<用户>|<AI>"
)
_OTHERS = ("<|endoftext|>", "<s>", "</s>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|END_THINKING|>", "<|eom|>")


def make_tokenizer(folder: Path, template: str, end: str, row: str = "") -> Tokenizer:
    """Bytes, and the special tokens that the template and the row have."""
    special = list(dict.fromkeys([*_OTHERS, end, *_SPECIAL.findall(template + row)]))
    return load_tokenizer(write_byte_tokenizer(folder, special, bos_token="<s>", eos_token=end, chat_template=template))


def conversation(*said: str, **last: object) -> Conversation:
    """Of the user and the assistant in turns; `last`: more fields of the last."""
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]
    return parse_messages([*turns[:-1], turns[-1] | last], "messages")


def shown(tokenizer: Tokenizer, row: Encoded) -> str:
    """The text, what is learnt in [[ ]]."""
    pieces, learnt = [""], False
    for token, on in zip(row.tokens, row.loss_mask, strict=True):
        if on != learnt:
            pieces, learnt = [*pieces, "[[" if on else "]]"], on
        pieces.append(tokenizer._backend.convert_ids_to_tokens(token))
    alphabet = {letter: byte for letter, byte in zip(*_alphabet(), strict=True)}
    raw = b"".join(piece.encode() if piece in ("[[", "]]") or len(piece) > 1 else bytes([alphabet[piece]]) for piece in pieces if piece)
    return raw.decode() + ("]]" if learnt else "")


def _alphabet() -> tuple[str, bytes]:
    """GPT-2's letters for bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return "".join(map(chr, [*kept, *range(256, 256 + len(others))])), bytes([*kept, *others])


@pytest.mark.parametrize("name", FAMILIES)
def test_of_two_turns_the_answers_and_their_ends_are_learnt(name, tmp_path):
    family = FAMILIES[name]
    tokenizer = make_tokenizer(tmp_path / "t", family.template, family.end, family.row)
    row = encode_conversation(tokenizer, conversation("uone", "A", "utwo", "B"))
    assert shown(tokenizer, row) == family.row
    alone = shown(tokenizer, encode_conversation(tokenizer, conversation("uone", "B")))
    assert alone.count("[[") == 1 and alone[alone.index("[[") :] == family.row[family.row.rindex("[[") :]
    last = shown(tokenizer, encode_conversation(tokenizer, conversation("uone", "A", "utwo", "B"), last_only=True))
    assert last == family.row.replace("[[", "", 1).replace("]]", "", 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_odd_turns_are_learnt_whole_or_refused(name, tmp_path):
    """Never anything but what an assistant wrote, and every letter of it."""
    family = FAMILIES[name]
    tokenizer = make_tokenizer(tmp_path / "t", family.template, family.end, family.row)
    system = parse_messages([{"role": "system", "content": "sys"}], "messages")
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "get", "arguments": {"x": 1}}}]}
    tools = parse_messages(
        [{"role": "user", "content": "uone"}, call, {"role": "tool", "content": "tres"}, {"role": "assistant", "content": "B"}], "m"
    )
    odd: dict[str, tuple[Conversation, Sequence[str]]] = {
        "system": ((*system, *conversation("uone", "A", "utwo", "B")), ("A", "B")),
        "tools": (tools, ("get", "B")),
        "thinking": (conversation("uone", "A", "utwo", "B", reasoning_content="rtwo"), ("A", "B")),
        "thinking in the text": (conversation("uone", "<think>\nrone\n</think>\n\nA", "utwo", "<think>\nrtwo\n</think>\n\nB"), ("A", "B")),
        "white space": (conversation("uone\n", " A \n", "utwo", "B\n\n"), ("A", "B")),
        "marks": (conversation(f"uone {family.end}", f"A{family.end}{family.end} a", "utwo", "B"), (f"A{family.end}{family.end} a", "B")),
    }
    for what, (messages, said) in odd.items():
        try:
            text = shown(tokenizer, encode_conversation(tokenizer, messages))
        except DataError as error:
            assert str(error), what
            continue
        learnt = re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)
        assert len(learnt) == len(said) and all(part in run for part, run in zip(said, learnt, strict=True)), (what, text)
        assert not any(word in run for run in learnt for word in ("uone", "utwo", "sys", "tres")), (what, text)


def test_thinking_and_calls_are_learnt_as_the_template_writes_them(tmp_path):
    qwen, oss = FAMILIES["qwen3"], FAMILIES["gpt_oss"]
    tokenizer = make_tokenizer(tmp_path / "q", qwen.template, qwen.end)
    text = shown(
        tokenizer, encode_conversation(tokenizer, conversation("u", "<think>\nx\n</think>\n\nA", "v", "B", reasoning_content="why"))
    )
    assert "assistant\n[[A<|im_end|>]]" in text and "[[<think>\nwhy\n</think>\n\nB<|im_end|>]]" in text
    tokenizer = make_tokenizer(tmp_path / "g", oss.template, oss.end)  # which reads the field `thinking`
    text = shown(tokenizer, encode_conversation(tokenizer, conversation("u", "B", reasoning_content="why")))
    assert text.endswith("assistant[[<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>B<|return|>]]")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            "message 0: the chat template of .* omits or changes 'brief' of role 'system'",
        ),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "omits or changes 'brief'"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "omits or changes 'brief'"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}x{% endif %}",
            "after its own generation prompt",
        ),
    ],
)
def test_what_a_template_leaves_out_is_said(template, told, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "t", template, "</s>")
    with pytest.raises(DataError, match=told):
        encode_conversation(
            tokenizer, parse_messages([{"role": r, "content": c} for r, c in (("system", "brief"), ("user", "u"), ("assistant", "A"))], "m")
        )


TRL = (
    "cohere2 deepseek_r1_distill deepseekv3 gemma gemma3 glm4moe gptoss idefics3 llama3 llama3_1 llama3_2 llava_next nemotron_3_nano phi3 phi3_5 "
    "qwen2_5 qwen2_5_vl qwen3 qwen3_5_nothink qwen3_5_think qwen3_instruct_2507 qwen3_vl smolvlm"
).split()
TRL_ENDS = {
    "gemma": "<end_of_turn>",
    "llama3": "<|eot_id|>",
    "phi3": "<|endoftext|>",
    "gptoss": "<|return|>",
    "glm": "<|user|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
}
TRL_ENDS |= {"deepseek": "<｜end▁of▁sentence｜>", "idefics3": "<end_of_utterance>", "smolvlm": "<end_of_utterance>", "llava": "</s>"}


@pytest.mark.parametrize("name", TRL)
def test_published_templates_against_their_marked_versions(name, tmp_path):
    """The same tokens where the marked version writes them alike; learnt is what it marks, but for frames and white space at the edges."""
    trl = pytest.importorskip(
        "trl", reason="the published templates are in trl 1.16, which the `dev` extra installs on Python 3.11 and later"
    )
    folder = Path(trl.__file__).parent / "chat_templates"
    template, training = (folder / f"{name}.jinja").read_text(), folder / f"{name}_training.jinja"
    end = next((end for prefix, end in TRL_ENDS.items() if name.startswith(prefix)), "<|im_end|>")
    tokenizer = make_tokenizer(tmp_path / "t", template, end)
    messages = conversation("uone", "A", "utwo", "B")
    row = encode_conversation(tokenizer, messages)
    text = shown(tokenizer, row)
    runs = re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL)
    assert len(runs) == 2 and "A" in runs[0] and "B" in runs[1] and "u" not in re.sub(_SPECIAL, "", "".join(runs)), text
    if not training.exists():
        return
    parts = tokenizer._framing.wants_parts
    theirs = tokenizer._backend.apply_chat_template(
        [message.as_json(parts=parts) for message in messages],
        chat_template=training.read_text(),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    size, ids, mask = len(row.tokens), theirs["input_ids"], theirs["assistant_masks"]
    if list(row.tokens) != ids[:size]:
        assert name.startswith("qwen3")  # whose marked versions keep earlier thinking
        return
    frames = set(tokenizer._framing.ids) | set(tokenizer.encode("\n \nassistant<think></think>model"))
    for token, ours, marks in zip(ids, [*row.loss_mask, *[False] * (len(ids) - size)], map(bool, mask), strict=True):
        assert ours == marks or token in frames, (text, token)
