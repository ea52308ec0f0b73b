"""Common chat templates by name, for models without one or with another; each writes the same text as the published template.

An assistant's text, including its end mark, is in `{% generation %}`, which marks what is trained on. The language is Jinja as in
`transformers`, with `bos_token`, `eos_token`, `tools` and `raise_exception`.
"""

from __future__ import annotations

from pathlib import Path

from aligner.errors import ConfigError

SUFFIX = ".jinja"
OWN_TEMPLATE = "tokenizer:"  # before the name of one of the tokenizer's own templates
TEMPLATE_FILE = "chat_template.jinja"
DEFAULT, TOOL_USE = "default", "tool_use"  # names in `transformers`
_BEGIN = "{{ bos_token or '' }}"
_TAKE_TURNS = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant have to take turns behind at most one system message, the user first') }}{% endif %}"
)


def _system(default: str = "") -> str:
    return (
        "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
        f"{{% else %}}{{% set system = {default!r} %}}{{% set turns = messages %}}{{% endif %}}"
    )


def _learnt(text: str) -> str:
    return f"{{% generation %}}{{{{ {text} }}}}{{% endgeneration %}}"


def _ask(text: str) -> str:
    return f"{{% if add_generation_prompt %}}{{{{ {text} }}}}{{% endif %}}"


def _alternating(user: str, assistant: str) -> str:
    body = f"{{% if m.role == 'user' %}}{{{{ {user} }}}}{{% else %}}{assistant}{{% endif %}}"
    return f"{{% for m in turns %}}{_TAKE_TURNS}{body}{{% endfor %}}"


def _marked(head: str, text: str, end: str, after: str = "", before: str = "") -> str:
    """Turns of any role: a head with the role's name, the text, an end mark."""
    other = f"{{{{ {text} + {end} }}}}"
    return (
        f"{{% for m in messages %}}{before}{{{{ {head} }}}}{{% if m.role == 'assistant' %}}{_learnt(f'{text} + {end}')}{{% else %}}{other}"
        f"{{% endif %}}{after}{{% endfor %}}"
    )


_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_GEMMA_ROLES = (
    "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('there is no role ' + m.role + ' here, only user and assistant') }}"
    "{% endif %}" + _TAKE_TURNS
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}{% set f = call.function or call %}"
    "{{ '\\n<tool_call>\\n{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}"
)
_QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_QWEN_TOOLS = (
    "{{ '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n"
    "You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}"
    "{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    "{{ '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\' }}'
)
_QWEN_TURNS = (
    "{% for m in turns %}{% if m.role == 'tool' %}{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant' + ('\\n' if m.content or not m.tool_calls else '') }}"
    "{% generation %}{{ m.content }}" + _CALLS + "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
)

TEMPLATES = {
    "chatml": _marked("'<|im_start|>' + m.role + '\\n'", "m.content", "'<|im_end|>'", after="{{ '\\n' }}")
    + _ask("'<|im_start|>assistant\\n'"),
    "qwen2_5": _system(_QWEN)
    + "{{ '<|im_start|>system\\n' + system }}{% if tools %}"
    + _QWEN_TOOLS
    + "{% endif %}{{ '<|im_end|>\\n' }}"
    + _QWEN_TURNS
    + _ask("'<|im_start|>assistant\\n'"),
    "llama2": _system()
    + _alternating(
        "(bos_token or '') + '[INST] ' + "
        "(('<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system else '') + m.content) | trim + ' [/INST]'",
        _learnt("' ' + m.content | trim + ' ' + eos_token"),
    ),
    "llama3": _BEGIN
    + _marked("'<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n'", "m.content | trim", "'<|eot_id|>'")
    + _ask("'<|start_header_id|>assistant<|end_header_id|>\\n\\n'"),
    "mistral": _BEGIN
    + _system()
    + _alternating(
        "' [INST] ' + (system + '\\n\\n' if loop.first and system else '') + m.content + ' [/INST]'", _learnt("' ' + m.content + eos_token")
    ),
    "gemma": _BEGIN
    + _marked(
        "'<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n'",
        "m.content | trim",
        "'<end_of_turn>'",
        after="{{ '\\n' }}",
        before=_GEMMA_ROLES,
    )
    + _ask("'<start_of_turn>model\\n'"),
    "gemma3": _BEGIN
    + _system()
    + _alternating(
        "'<start_of_turn>user\\n' + (system + '\\n\\n' if loop.first and system else '') + m.content | trim + '<end_of_turn>\\n'",
        "{{ '<start_of_turn>model\\n' }}" + _learnt("m.content | trim + '<end_of_turn>'") + "{{ '\\n' }}",
    )
    + _ask("'<start_of_turn>model\\n'"),
    "phi3": _marked("'<|' + m.role + '|>\\n'", "m.content", "'<|end|>\\n'")
    + "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% elif messages[-1].role == 'assistant' %}"
    + _learnt("eos_token")
    + "{% else %}{{ eos_token }}{% endif %}",
    "zephyr": _marked("'<|' + m.role + '|>\\n'", "m.content", "eos_token", after="{{ '\\n' }}") + _ask("'<|assistant|>\\n'"),
    "alpaca": _BEGIN
    + _system(_ALPACA)
    + "{{ system + '\\n\\n' }}"
    + _alternating(
        "'### Instruction:\\n' + m.content + '\\n\\n'", "{{ '### Response:\\n' }}" + _learnt("m.content + eos_token") + "{{ '\\n\\n' }}"
    )
    + _ask("'### Response:\\n'"),
    "vicuna": _BEGIN
    + _system(_VICUNA)
    + "{{ system + ' ' }}"
    + _alternating("'USER: ' + m.content + ' '", "{{ 'ASSISTANT:' }}" + _learnt("' ' + m.content + eos_token"))
    + _ask("'ASSISTANT:'"),
}


def check_template(name: str) -> None:
    """Raise ConfigError for a `data.chat_template` that is neither a name nor a file name."""
    if name and name not in TEMPLATES and not name.endswith(SUFFIX) and not name.startswith(OWN_TEMPLATE):
        others = f"a file of Jinja that ends in {SUFFIX}, or {OWN_TEMPLATE}NAME for one of the tokenizer's own"
        raise ConfigError(f"data.chat_template is {name!r}, allowed: {', '.join(TEMPLATES)}, {others}")


def template_text(name: str) -> str:
    """The template of that name, or in that file. Raises ConfigError if the file cannot be read."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template is {name!r}: {error}") from error
