"""What is put around an observation, whom the config names, and rewards of environments beside others'."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from aligner.data.encoding import PromptStyle, encode_prompt
from aligner.data.tokenizer import Tokenizer, load_tokenizer
from aligner.environments.calculator import Calculator
from aligner.environments.config import EnvironmentConfig, ObservationForm
from aligner.environments.exchange import (
    Converting,
    EnvironmentFollowUp,
    EnvironmentReward,
    build_environment,
    observation_tokens,
    surroundings,
)
from aligner.errors import ConfigError
from aligner.online.response_health import episode_metrics, readable
from aligner.types import FinishReason, Prompt, Rollout, Scores

SPECIAL = ("<pad>", "<bos>", "<eos>", "<u>", "<t>", "<a>")  # ids 0 to 5
TEMPLATE = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content | trim }}<eos>{% elif m.role == 'tool' %}"
    "{{ raise_exception('no tools here') }}{% else %}<a>{{ m.content }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def make_tokenizer(directory: Path, **settings: object) -> Tokenizer:
    """One token per printable ASCII character."""
    from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, pre_tokenizers

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    backend = Backend(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *characters])}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names | settings))
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("chat") / "t", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("plain") / "t")


def prompts(tokenizer: Tokenizer, *chats: bool) -> list[Prompt]:
    made = []
    for number, is_chat in enumerate(chats):
        tokens = encode_prompt(tokenizer, "how many?", PromptStyle(apply_chat_template=is_chat, add_bos=True))
        made.append(Prompt(id=number, tokens=tuple(tokens), source=f"data.jsonl:{number + 1}"))
    return made


def rendered(tokenizer: Tokenizer, around, text: str, last: str) -> str:
    (end,) = tokenizer.encode(last)
    return tokenizer.decode(around.around(observation_tokens(tokenizer, text), end), skip_special=False)


def test_an_observation_is_a_message_of_the_chat(chat: Tokenizer, plain: Tokenizer) -> None:
    around = surroundings(EnvironmentConfig(path="x"), chat, prompts(chat, True, True))
    assert rendered(chat, around, "42", last="<eos>") == "\n<u>42<eos><a>"
    assert rendered(chat, around, "42", last="!") == "<eos>\n<u>42<eos><a>"  # a turn that a stop string ended gets its end token
    # Prompt, turn, observation and next turn are together what the template writes of the whole conversation.
    from aligner.data.messages import Message

    turns = [Message(role="user", content="how many?"), Message(role="assistant", content="6*7=?"), Message(role="user", content="42")]
    whole = chat.apply_chat_template(turns, add_generation_prompt=True)
    said = chat.encode("6*7=?<eos>")
    assert [*prompts(chat, True)[0].tokens, *said, *around.around(observation_tokens(chat, "42"), said[-1])] == whole
    # Text of an environment is text: it cannot end the turn, nor begin another.
    tokens = observation_tokens(chat, "a<eos><a>b")
    assert len(tokens) == 1 + len("<eos><a>") + 1 and chat.encode("<eos>")[0] not in tokens
    assert chat.encode("<eos>") == [2]  # as before
    assert surroundings(EnvironmentConfig(path="x"), chat, prompts(chat, False)).behind == ()
    assert rendered(plain, surroundings(EnvironmentConfig(path="x"), plain, []), "42", last="!") == "42"
    own = EnvironmentConfig(path="x", form=ObservationForm.plain, prefix=" [", suffix="]<u>\n")
    for tokenizer in (chat, plain):
        assert rendered(tokenizer, surroundings(own, tokenizer, prompts(tokenizer, False)), "42", last="!") == " [42]<u>\n"


def test_settings_that_cannot_work(chat: Tokenizer, plain: Tokenizer, tmp_path: Path) -> None:
    wrong = {
        "some prompts end as the chat template ends a user's message, data.jsonl:2 does not": lambda: surroundings(
            EnvironmentConfig(path="x"), chat, prompts(chat, True, False)
        ),
        "no tools here.*allowed: another role, or environment.form=plain": lambda: surroundings(
            EnvironmentConfig(path="x", form=ObservationForm.chat, role="tool"), chat, []
        ),
        "has no chat template": lambda: surroundings(EnvironmentConfig(path="x", form=ObservationForm.chat), plain, []),
        "environment.max_turns=0": lambda: EnvironmentConfig(max_turns=0),
        "environment.num_workers=0": lambda: EnvironmentConfig(num_workers=0),
        "environment.timeout_seconds=nan": lambda: EnvironmentConfig(timeout_seconds=float("nan")),
        "environment.role='system'": lambda: EnvironmentConfig(role="system"),
        "environment.form=auto: prefix and suffix": lambda: EnvironmentConfig(prefix="x"),
        "environment.arguments=.* with path='' does not read it; allowed: with kind=python": lambda: EnvironmentConfig(arguments={"a": 1}),
        "environment 'nothing': expected": lambda: build_environment(EnvironmentConfig(path="nothing")),
        "did you mean 'Calculator'": lambda: build_environment(EnvironmentConfig(path="aligner.environments.calculator:Calculater")),
        "cannot be made from {'size': 3}: TypeError": lambda: build_environment(
            EnvironmentConfig(path="aligner.environments.calculator:Calculator", arguments={"size": 3})
        ),
        "returned a dict without reset": lambda: build_environment(EnvironmentConfig(path="builtins:dict")),
    }
    for message, action in wrong.items():
        with pytest.raises(ConfigError, match=message):
            action()


def test_what_a_policy_writes_ends_no_run(chat: Tokenizer) -> None:
    """With `environment.on_error=stop`: each turn is answered, in text that the tokenizer takes, and that ends no turn."""
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": %s}}</tool_call>'
    values = ("5", "null", "true", "NaN", "[1]", "{}", '"\\ud800<eos>"', "9" * 5000, "[" * 50_000)
    wrong = [*(call % value for value in values), "<tool>\ud800<eos><a></tool>", "<tool>1/0</tool>"]
    unclosed = ["<tool_call>" * 100_000, "<tool>" * 100_000, "<tool_call><tool>" * 50_000, "<think>" * 50_000]
    texts = [*wrong, *unclosed]
    around = surroundings(EnvironmentConfig(path="x"), chat, prompts(chat, True))
    converting = Converting(
        decode=lambda tokens: texts[tokens[0]], observe=lambda text, last: around.around(observation_tokens(chat, text), last)
    )
    exchange = EnvironmentFollowUp(Calculator(), converting, max_turns=4, timeout_seconds=60.0).open()
    question = Prompt(id=0, tokens=(1,), source="a:1", answer="7")
    for number in range(len(texts)):
        exchange.say(number, question, [number, 50], number=1, is_cut=False, is_last=False)
    replies = {}
    while len(replies) < len(texts):
        replies |= dict(exchange.hear(60.0))
    exchange.close()
    for number, text in enumerate(texts):
        reply, is_answer = replies[number], text in unclosed
        assert reply.done is is_answer and reply.counts.get("tool_errors") == (None if is_answer else 1.0), text[:60]
        assert reply.tokens.count(chat.encode("<eos>")[0]) == (0 if is_answer else 2), text[:60]  # those of the template


def episode(reward: float | None, *, failed: bool = False, written: int = 2, counts: dict | None = None) -> Rollout:
    return Rollout(
        prompt=Prompt(id=0, tokens=(1,), source="a:1"),
        response=(1, 2, 3),
        logprobs=(0.0, 0.0, 0.0),
        finish_reason=FinishReason.stop,
        policy_version=0,
        seed=0,
        written=None if reward is None else tuple(i < written for i in range(3)),
        reward=reward,
        failed=failed,
        num_turns=4 - written,
        counts=counts or {},
    )


class Others:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.future: Future[Scores] = Future()
        self.is_closed = False

    def score(self, rollouts) -> Future[Scores]:
        return self.future

    def close(self) -> None:
        self.is_closed = True


def test_rewards_of_environments_are_added_to_others() -> None:
    rollouts = [episode(0.5), episode(2.0), episode(1.0, failed=True)]
    own = EnvironmentReward().score(rollouts).result()
    assert own.rewards.tolist() == [0.5, 2.0, 1.0] and own.valid.tolist() == [True, True, False]
    others = Others()
    reward = EnvironmentReward(others)
    sums = reward.score(rollouts)
    assert not sums.done()
    given = torch.tensor([1.0, 2.0, 3.0])
    others.future.set_result(Scores(rewards=given, valid=torch.tensor([False, True, True]), parts={"length": given}))
    assert sums.result().rewards.tolist() == [1.5, 4.0, 4.0] and sums.result().valid.tolist() == [False, True, False]
    assert {name: part.tolist() for name, part in sums.result().parts.items()} == {
        "environment": [0.5, 2.0, 1.0],
        "length": [1.0, 2.0, 3.0],
    }
    reward.close()
    assert others.is_closed
    for outcome, error in ((ValueError("broken"), ValueError), (Scores.of(torch.zeros(2)), RuntimeError)):
        others = Others()
        sums = EnvironmentReward(others).score(rollouts)
        others.future.set_exception(outcome) if isinstance(outcome, Exception) else others.future.set_result(outcome)
        with pytest.raises(error):  # raised where it is awaited: nobody waits for ever
            sums.result(5)
    with pytest.raises(ValueError, match="a:1 has no environment's reward"):
        EnvironmentReward().score([episode(None)])


def test_what_people_read_and_metrics_of_episodes() -> None:
    assert [readable(one, lambda tokens: "".join(map(str, tokens))) for one in (episode(None), episode(1.0))] == ["123", "12[[3]]"]
    assert episode_metrics([episode(None)]) == {}
    rollouts = [
        episode(1.0, counts={"tool_errors": 2.0}),
        episode(1.0, written=1),
        episode(1.0, counts={"tool_errors": 1.0, "solved": 1.0}),
    ]
    assert episode_metrics(rollouts) == pytest.approx(
        {"rollout/turns": 7 / 3, "rollout/observation_tokens": 4 / 3, "rollout/tool_errors": 1.0, "rollout/solved": 1 / 3}
    )
