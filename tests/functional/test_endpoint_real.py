"""The endpoint over the built-in engine on a pretrained model: the same tokens as in process, adapters and runs, the command, lm-eval."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_live_engine import TEMPLATE
from training_jobs import ALIGNER, run_aligner

from aligner.endpoint.app import Endpoint
from aligner.endpoint.generation import choice_seed
from aligner.errors import ConfigError
from aligner.jobs.serving_policy import OpenPolicy, open_policy
from aligner.models.checkpoint import checkpoint
from aligner.rollout.live import LiveRequest
from aligner.servers.access import Access
from aligner.servers.config import ServerConfig
from aligner.types import SamplingConfig

openai = pytest.importorskip("openai", reason="the package openai is not installed")
KEY = "5e" * 32
PROMPT = "Once upon a time, there was a little girl"
pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def stories(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the stories, with a chat template."""
    directory = tmp_path_factory.mktemp("models") / "stories"
    shutil.copytree(shared_data / "stories260k", directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    return directory


@contextmanager
def serving(policy: OpenPolicy) -> Iterator[tuple[Endpoint, Any]]:
    with Endpoint(policy.served(), Access(KEY), ServerConfig()) as endpoint:
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
            yield endpoint, client


@pytest.fixture(scope="module")
def served(stories: Path, topology: Any) -> Iterator[tuple[OpenPolicy, Any]]:
    with open_policy(str(stories), layout=topology, max_batch_size=8) as policy, serving(policy) as (_, client):
        yield policy, client


def in_process(policy: OpenPolicy, tokens: list[int], seed: int, **sampling: Any) -> Any:
    asked = LiveRequest(tokens=tuple(tokens), seed=seed, sampling=SamplingConfig(**sampling))
    return policy.live.submit(asked).result(120)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
        {"stop_strings": ["Lily", "."]},
        {"min_response_length": 20, "stop_token_ids": [13]},
    ],
    ids=lambda sampling: ",".join(sampling),
)
def test_the_same_seed_gives_the_same_tokens_as_in_process(served: tuple[OpenPolicy, Any], sampling: dict[str, Any]) -> None:
    """Through every interface, streamed and not, one by one and several at once."""
    policy, client = served
    ids = policy.tokenizer.encode(PROMPT, add_special=True)
    chat_ids = client.post("/../tokenize", cast_to=dict, body={"messages": [{"role": "user", "content": "Hi"}]})["tokens"]
    names = {"stop_strings": "stop", "min_response_length": "min_tokens"}
    how = {names.get(name, name): value for name, value in sampling.items()} | {"max_tokens": 40, "return_token_ids": True}
    expected = {seed: in_process(policy, ids, seed, max_response_length=40, **sampling) for seed in (3, choice_seed(3, 1))}
    chatted = in_process(policy, chat_ids, 3, max_response_length=40, **sampling)

    for prompt in (PROMPT, ids):
        said = client.post("/completions", cast_to=dict, body=how | {"prompt": prompt, "seed": 3, "n": 2, "logprobs": 0})
        for choice, result in zip(said["choices"], expected.values(), strict=True):
            assert tuple(choice["token_ids"]) == result.tokens and choice["finish_reason"] == result.finish_reason.value
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(result.logprobs, abs=1e-5)
            assert not any(stop in choice["text"] for stop in sampling.get("stop_strings", []))
            whole = policy.tokenizer.decode_after(ids, result.tokens)
            assert whole.startswith(choice["text"]) and (len(whole) == len(choice["text"]) or "stop_strings" in sampling)
    raw = {name: value for name, value in how.items() if name != "return_token_ids"}
    out = client.post("/inference/v1/generate", cast_to=dict, body={"token_ids": ids, "sampling_params": raw | {"seed": 3, "logprobs": 1}})
    assert tuple(out["choices"][0]["token_ids"]) == expected[3].tokens
    chunks = client.completions.create(model="", prompt=PROMPT, seed=3, stream=True, extra_body=how)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert tuple(token for choice in choices for token in choice.token_ids) == expected[3].tokens
    assert (
        "".join(choice.text for choice in choices)
        == client.completions.create(model="", prompt=ids, seed=3, extra_body=how).choices[0].text
    )
    chat = client.chat.completions.create(model="", messages=[{"role": "user", "content": "Hi"}], seed=3, extra_body=how)
    assert tuple(chat.choices[0].token_ids) == chatted.tokens
    if "stop_strings" not in sampling and "min_response_length" not in sampling:
        own = {name: value for name, value in how.items() if name != "max_tokens"} | {"seed": 3}
        assert tuple(client.responses.create(model="", input="Hi", max_output_tokens=40, extra_body=own).token_ids) == chatted.tokens


def test_log_probs_of_prompts_are_the_models(served: tuple[OpenPolicy, Any], stories: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy, client = served
    rows = [policy.tokenizer.encode(text, add_special=True) for text in (PROMPT, "The dog ran.", "Hi")]
    said = client.completions.create(model="", prompt=rows, echo=True, logprobs=1, max_tokens=1, temperature=0)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(stories).float()
        for choice, row in zip(said.choices, rows, strict=True):
            reference = model(torch.tensor([row])).logits[0].log_softmax(-1)
            found = choice.logprobs.token_logprobs
            assert found[0] is None and len(found) == len(row) + 1
            assert found[1:-1] == pytest.approx([float(reference[at, token]) for at, token in enumerate(row[1:])], abs=2e-4)
            best = [float(line.max()) for line in reference[: len(row) - 1]]
            assert [max(top.values()) for top in choice.logprobs.top_logprobs[1:-1]] == pytest.approx(best, abs=2e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_the_likeliest_tokens_are_those_of_the_model(served: tuple[OpenPolicy, Any], stories: Path, temperature: float) -> None:
    """In chats, responses and completions, streamed too, up to 20 in each place: transformers' log-softmax."""
    from transformers import AutoModelForCausalLM

    policy, client = served
    how: dict[str, Any] = {"model": "", "temperature": temperature, "extra_body": {"return_token_ids": True, "seed": 5}}
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 20, "n": 2}
    chat = client.chat.completions.create(max_tokens=9, **asked, **how)
    included = {"include": ["message.output_text.logprobs"], "top_logprobs": 4}
    response = client.responses.create(input="Hi", max_output_tokens=9, **included, **how)
    ids = policy.tokenizer.encode(PROMPT, add_special=True)
    completed = {"prompt": ids, "logprobs": 20, "max_tokens": 9, **how}
    alone, echoed = (client.completions.create(echo=echo, **completed).choices[0] for echo in (False, True))
    model = AutoModelForCausalLM.from_pretrained(stories).float()

    def likeliest(prompt: list[int], tokens: list[int]) -> tuple[list[list[str]], list[list[float]]]:
        """Names and log-probs in the place of each token."""
        with torch.no_grad():
            found = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].div(temperature or 1.0)
            found = found.log_softmax(-1).topk(20)
        return [[policy.tokenizer.decode([one], skip_special=False) for one in line] for line in found.indices], found.values.tolist()

    for choice in chat.choices:
        names, values = likeliest(chat.prompt_token_ids, choice.token_ids)
        for one, name, value in zip(choice.logprobs.content, names, values, strict=True):
            assert [top.token for top in one.top_logprobs] == name
            assert [top.logprob for top in one.top_logprobs] == pytest.approx(value, abs=2e-4)
            assert one.logprob == pytest.approx(dict(zip(name, value, strict=True)).get(one.token, one.logprob), abs=2e-4)
    streamed: list[list[Any]] = [[], []]
    for chunk in client.chat.completions.create(max_tokens=9, stream=True, **asked, **how):
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    for found, choice in zip(streamed, chat.choices, strict=True):
        assert [one.model_dump() for one in found] == [one.model_dump() for one in choice.logprobs.content]
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(stream=True, **completed)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts for one in getattr(part, name)] == getattr(alone.logprobs, name)
    places = zip(response.output[-1].content[0].logprobs, chat.choices[0].logprobs.content, strict=True)
    assert all([top.token for top in own.top_logprobs] == [top.token for top in other.top_logprobs[:4]] for own, other in places)
    for choice, prompt, tokens in ((alone, ids, alone.token_ids), (echoed, ids, echoed.token_ids)):
        found = choice.logprobs
        assert len(found.top_logprobs) == len(found.tokens) == len(tokens) + (len(ids) if choice is echoed else 0)
        drawn = zip(found.top_logprobs, found.tokens, found.token_logprobs, strict=True)
        for (top, name, p), names, values in zip(list(drawn)[-len(tokens) :], *likeliest(prompt, tokens), strict=True):
            expected = dict(zip(reversed(names), reversed(values), strict=True))  # of several with one name the likeliest
            assert top == pytest.approx(expected | {name: p}, abs=2e-4)


def test_more_of_the_likeliest_tokens_than_there_are_is_refused_by_name(served: tuple[OpenPolicy, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs=21: .*; allowed: ") as refused:
        served[1].chat.completions.create(model="", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=21)
    assert refused.value.param == "top_logprobs"


def test_an_adapter_is_served_on_its_base(stories: Path, topology: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(stories).float()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "adapter")
    with open_policy(str(tmp_path / "adapter"), layout=topology) as policy, serving(policy) as (_, client):
        ids = policy.tokenizer.encode(PROMPT, add_special=True)
        said = client.completions.create(
            model="", prompt=ids, max_tokens=12, temperature=0, logprobs=0, extra_body={"return_token_ids": True}
        )
        found = said.choices[0]
        with torch.no_grad():
            reference = adapted(torch.tensor([[*ids, *found.token_ids]])).logits[0].log_softmax(-1)[len(ids) - 1 : -1]
        assert found.token_ids == reference.argmax(-1).tolist()
        assert found.logprobs.token_logprobs == pytest.approx(reference.max(-1).values.tolist(), abs=1e-3)
        run = tmp_path / "run"
        request = checkpoint.SaveRequest(step=1, state={}, tokenizer=stories)
        checkpoint.save(run / "checkpoints" / "policy", policy.policy.model, request)
    assert not [path for path in (tmp_path / "adapter").iterdir() if path.name.startswith("model")]  # nothing merged
    (run / "config.yaml").write_text("model: {}\n")
    with open_policy(str(run), layout=topology, name="a run") as policy:  # its newest policy: an adapter on the base
        assert policy.policy.chunks[0].lora.rank == 4 and policy.name == "a run" and policy.tokenizer.has_chat_template
        assert in_process(policy, ids, 0, temperature=0.0, max_response_length=12).tokens == tuple(found.token_ids)


def test_what_is_no_policy(tmp_path: Path, topology: Any) -> None:
    (tmp_path / "config.yaml").write_text("model: {}\n")
    with pytest.raises(ConfigError, match="the run has no checkpoint of a policy and no export yet"), open_policy(str(tmp_path)):
        pass
    with pytest.raises(ConfigError, match="nowhere: no such directory"), open_policy(str(tmp_path / "nowhere")):
        pass


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*ALIGNER, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def told(process: subprocess.Popen[str]) -> dict[str, str]:
    """What it says at its start."""
    found: dict[str, str] = {}
    while "key" not in found:
        line = process.stdout.readline()
        assert line, f"ended with {process.wait()}"
        name, _, value = line.strip().partition(": ")
        found[name] = value
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_end(stories: Path, tmp_path: Path, number: int) -> None:
    key = tmp_path / "key"
    how = ["--key-file", str(key)] if number == signal.SIGINT else []
    process = command(str(stories), "--greedy", "--name", "teller", *how)
    try:
        said = told(process)
        shown = key.read_text().strip() if how else said["key"]
        assert said["key"] == (str(key) if how else shown) and said["model"] == "teller, context of 512 tokens"
        with openai.OpenAI(base_url=said["url"], api_key=shown, max_retries=0) as client:
            texts = {client.completions.create(model="", prompt=PROMPT, max_tokens=20).choices[0].text for _ in range(2)}
            assert len(texts) == 1 and client.models.list().data[0].id == "teller"
        process.send_signal(number)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stdout.read()
    finally:
        process.kill()


def test_a_port_that_is_taken_is_named(stories: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = run_aligner("serve", stories, "--port", port := taken.getsockname()[1])
        assert code == 2 and f"error: cannot listen on 127.0.0.1:{port}: Address already in use" in said


LM_EVAL = Path(os.environ.get("ALIGNER_LM_EVAL", ""))


@pytest.mark.skipif(
    not os.environ.get("ALIGNER_LM_EVAL"), reason="ALIGNER_LM_EVAL names no environment with lm-eval: `make lm-eval` makes one"
)
def test_lm_eval(served: tuple[OpenPolicy, Any], shared_data: Path, tmp_path: Path) -> None:
    """Its own client: a generating task and one of log-likelihoods, offline; the log-likelihoods are the model's."""
    policy, client = served
    records = [json.loads(line) for line in (shared_data / "gsm8k" / "test.jsonl").read_text().splitlines()[:6]]
    data = tmp_path / "rows.jsonl"
    rows = [{"question": one["question"][:200], "choices": ["cats", "dogs", one["question"][:5]], "gold": 1} for one in records]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\ndoc_to_text: '{{{{question}}}}'\n"
    (tmp_path / "says.yaml").write_text(
        f"task: says\n{source}doc_to_target: '{{{{choices[0]}}}}'\noutput_type: generate_until\n"
        "generation_kwargs:\n  until: ['.']\n  max_gen_toks: 16\n  temperature: 0\nmetric_list:\n  - metric: exact_match\n"
    )
    (tmp_path / "picks.yaml").write_text(
        f"task: picks\n{source}doc_to_target: gold\ndoc_to_choice: '{{{{choices}}}}'\noutput_type: multiple_choice\n"
        "metric_list:\n  - metric: acc\n"
    )
    url = str(client.base_url).rstrip("/") + "/completions"
    how = f"model=stories,base_url={url},num_concurrent=4,max_retries=1,max_length=512"
    how += f",tokenizer_backend=remote,tokenized_requests=True,auth_token={KEY}"
    made = subprocess.run(
        [str(LM_EVAL), "-m", "lm_eval", "--model", "local-completions", "--model_args", how, "--tasks", "says,picks",
         "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"],
        env=os.environ | {"OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-6000:]
    print(made.stdout, file=sys.stderr)
    (samples,) = (tmp_path / "out").rglob("samples_picks*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for (context, continuation), answer in zip(
            ((one["arg_0"], one["arg_1"]) for one in sample["arguments"].values()), sample["filtered_resps"], strict=True
        ):
            whole, head = (policy.tokenizer.encode(text) for text in (context + continuation, context))
            own, _ = policy.score([whole])
            assert float(answer[0]) == pytest.approx(sum(own[0][len(head) - 1 :]), abs=1e-3)
