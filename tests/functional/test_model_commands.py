"""`aligner generate`, `chat` and `eval` on a pretrained model, on an adapter of it and on a run; transformers and PEFT agree with them."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from judge_server import asked, judge_server
from preloaded import preloaded
from terminals import DRAWN
from training_jobs import ROOT, read_rows, run_aligner, run_job, train, write_rows

pytestmark = [pytest.mark.shared, pytest.mark.timeout(600)]
PROMPTS = ("Once upon a time", "Lily saw", "One day, Tom", "The big dog")
GREEDY = ("--temperature", 0, "--max-tokens", 24)


@pytest.fixture(scope="module")
def model(shared_data: Path) -> Path:
    return shared_data / "stories260k"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": text, "answer": "the", "level": number} for number, text in enumerate(PROMPTS)]
    return write_rows(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PEFT's, with random products that change what the model says."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    tuned = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
    directory = tmp_path_factory.mktemp("adapter")
    tuned.save_pretrained(directory)
    return directory


@functools.cache
def told_by_transformers(model: Path, adapter: Path | None = None) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is not None:
        from peft import PeftModel

        found = PeftModel.from_pretrained(found, adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    told = []
    for text in PROMPTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        whole = found.generate(input_ids=ids, max_new_tokens=24, do_sample=False)[0]
        told.append(tokenizer.decode(whole, skip_special_tokens=True)[len(tokenizer.decode(ids[0], skip_special_tokens=True)) :])
    return told


def generated(source: Path, prompts: Path, output: Path, *more: object) -> list[dict]:
    code, said = run_aligner("generate", source, "--input", prompts, "--output", output, *GREEDY, *more)
    assert code == 0, said
    return read_rows(output)


def test_greedy_text_is_that_of_transformers_and_peft(model: Path, adapter: Path, prompts: Path, tmp_path: Path) -> None:
    told = told_by_transformers(model)
    code, said = run_aligner("generate", model, PROMPTS[0], *GREEDY)
    assert (code, said.strip()) == (0, told[0].strip())
    assert run_aligner("generate", model)[0] == run_aligner("generate", model, "a", "--input", "b", "--output", "c")[0] == 2
    rows = generated(model, prompts, tmp_path / "own.jsonl", "--logprobs")
    assert [row["response"] for row in rows] == told
    assert [row["level"] for row in rows] == [0, 1, 2, 3] and rows[0]["finish_reason"] == "length"
    assert len(rows[0]["token_ids"]) == len(rows[0]["logprobs"]) == 24 and max(rows[0]["logprobs"]) <= 0
    tuned = [row["response"] for row in generated(adapter, prompts, tmp_path / "tuned.jsonl")]
    assert tuned == told_by_transformers(model, adapter) and tuned != [row["response"] for row in rows]


def test_a_call_that_was_killed_goes_on_where_it_was(model: Path, prompts: Path, tmp_path: Path) -> None:
    sampled = ("--samples", 3, "--temperature", 1, "--seed", 5)
    whole = generated(model, prompts, tmp_path / "whole" / "out.jsonl", *sampled)
    assert len({row["response"] for row in whole}) > 8 and len(whole) == 12
    again = generated(model, prompts, tmp_path / "again" / "out.jsonl", *sampled)
    assert again == whole and [path.name for path in (tmp_path / "again").iterdir()] == ["out.jsonl"]
    with_part = tmp_path / "part"
    code, said = run_aligner("generate", model, "--input", prompts, "--output", with_part / "out.jsonl", *GREEDY, "--field", "level")
    assert code == 2 and "prompts.jsonl:1: has a field 'level' already; allowed: --field NAME of another" in said
    # The name of the half-written file is of what is asked; one that was killed has whole lines, and the beginning of another.
    probe = ROOT / "tests" / "functional" / "killed_generate.py"
    arguments = [str(path) for path in (probe, model, prompts, with_part / "out.jsonl")]
    code, _ = preloaded().run(arguments, {**os.environ, "PYTHONPATH": str(ROOT)}, ROOT, timeout=300)
    (part,) = with_part.glob(".out.jsonl.*.part")
    assert code == 9 and not (with_part / "out.jsonl").exists() and part.read_bytes().count(b"\n") == 5
    lines = part.read_bytes().splitlines()
    part.write_bytes(b"\n".join([lines[0].replace(b'"level": 0', b'"level": 99'), *lines[1:]]) + b'\n{"prompt": "ha')
    gone_on = generated(model, prompts, with_part / "out.jsonl", *sampled)
    assert gone_on[0]["level"] == 99 and gone_on[1:] == whole[1:]


def test_the_recipe_that_writes_responses_is_greedy_too(model: Path, prompts: Path, tmp_path: Path) -> None:
    sampling = ["rollout.sampling.temperature=0", "rollout.sampling.max_response_length=24"]
    run_job(train("generate"), tmp_path / "run", [f"model.path={model}", f"data.train={prompts}", *sampling])
    rows = read_rows(tmp_path / "run" / "written" / "records.jsonl")
    assert [told in json.dumps(row) for told, row in zip(told_by_transformers(model), rows, strict=True)] == [True] * 4


def test_lines_of_standard_input(model: Path) -> None:
    """Without a terminal nothing but the answers is on stdout, and a wrong line costs itself."""
    command = [sys.executable, "-m", "aligner.cli", "chat", str(model), *map(str, GREEDY)]
    lines = f"{PROMPTS[0]}\n/reset\n/who\n/system Be kind.\n{PROMPTS[1]}\n{'word ' * 600}\n/reset\n{PROMPTS[2]}\n/quit\n{PROMPTS[3]}\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment, timeout=300)
    told = told_by_transformers(model)
    answers = [line.strip() for line in done.stdout.splitlines() if not line.startswith("[stories260k: cut at")]
    assert done.returncode == 0, done.stderr
    assert answers == [line.strip() for text in told[:3] for line in text.splitlines()]
    assert "/who: no such command" in done.stderr and "a system message needs a chat template" in done.stderr
    assert "leaves no room in the context of 512" in done.stderr


class Terminal:
    """A person at a terminal of this size."""

    def __init__(self, command: list[str], columns: int) -> None:
        self.process, self.descriptor = pty.fork()
        if not self.process:
            os.environ |= {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TERM": "xterm-256color",
                "COLUMNS": str(columns),
                "LINES": "40",
            }
            os.execv(sys.executable, [sys.executable, "-m", "aligner.cli", *command])
        self.seen, self.ended = "", False

    def until(self, pattern: str, seconds: float = 120.0) -> str:
        """What has come since the last call, up to the pattern."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < deadline and not self.ended, f"{self.seen} ({'the program has ended' if self.ended else seconds})"
            self.read()
        said, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return said

    def read(self) -> None:
        if select.select([self.descriptor], [], [], 0.1)[0]:
            try:
                self.seen += DRAWN.sub("", os.read(self.descriptor, 65536).decode(errors="replace"))
            except OSError:
                self.ended = True

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())


@contextmanager
def terminal(*command: object, columns: int = 80) -> Iterator[Terminal]:
    person = Terminal([str(part) for part in command], columns)
    status = 0
    try:
        yield person
        deadline = time.monotonic() + 60
        while not (ended := os.waitpid(person.process, os.WNOHANG))[0]:
            assert time.monotonic() < deadline, person.seen
            person.read()
        person.process, status = 0, ended[1]
    finally:
        if person.process:
            os.kill(person.process, signal.SIGKILL)
            os.waitpid(person.process, 0)
        os.close(person.descriptor)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_session_in_a_terminal(model: Path) -> None:
    told = told_by_transformers(model)
    with terminal("chat", model, "--temperature", 0, "--max-tokens", 400) as person:
        assert "stories260k: no chat template: it continues your text" in person.until("> ")
        for _ in range(5):  # an answer may be complete before a busy machine hears of the key
            person.type(PROMPTS[0] + "\n")
            said = person.until(re.escape(told[0][:30]))
            assert PROMPTS[0] in said
            person.type("\x03")  # Ctrl-C: the answer ends, the program does not
            if "[stopped]" in person.until(r"\[(stopped|stories260k: cut[^\]]*)\]\s+> "):
                break
            person.type("/reset\n")
            person.until("/reset[^>]*> ")
        else:
            pytest.fail("no answer was stopped")
        person.type("half a line")
        person.until("half a line")
        for attempt in range(20):  # it is dropped; readline may hear of it with the next key only, if it was just reading one
            person.type("x\x03" if attempt else "\x03")
            with suppress(AssertionError):
                person.until("> ", seconds=5)
                break
        else:
            pytest.fail(person.seen)
        person.type("/reset\n")
        person.until("/reset[^>]*> ")
        person.type(f"{PROMPTS[1]}\n")
        person.until(re.escape(told[1][:20]))
        person.type("\x03")
        person.until(r"\[(stopped|stories260k: cut[^\]]*)\]\s+> ")
        person.type("\x04")  # Ctrl-D


def test_two_models_side_by_side(model: Path, adapter: Path) -> None:
    told, tuned = told_by_transformers(model)[0], told_by_transformers(model, adapter)[0]
    with terminal("chat", model, "--against", adapter, "--temperature", 0, "--max-tokens", 8, columns=140) as person:
        person.until("> ")
        person.type(f"{PROMPTS[0]}\n")
        said = person.until(r"cut at its most tokens\]\s+\[[^\n]*cut at[^\n]*\s+> ")
        assert any(told[:10].strip() in line and tuned[:10].strip() in line[40:] for line in said.splitlines()), said
        person.type("/quit\n")


REWARD = """\
def has_answer(prompts, responses, answers, level):
    return [float(f" {answer} " in response) if one < 3 else float("nan") for response, answer, one in zip(responses, answers, level)]

def share(prompts, responses, answers):
    return [float(len(response) % 2) for response in responses]
"""


def test_accuracy_and_pass_at_k(model: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    out = tmp_path / "result.json"
    code, said = run_aligner("eval", model, "--data", prompts, "--reward", f"{tmp_path}/reward.py:share", "--output", out, *GREEDY)
    assert code == 0, said
    right = sum(len(text.lstrip(" ")) % 2 for text in told_by_transformers(model))  # reward functions get a response alone
    record = json.loads(out.read_text())
    (accuracy, reward) = record["measures"]
    assert (accuracy["name"], accuracy["value"], accuracy["count"], accuracy["interval"]) == ("accuracy", right / 4, 4, "Wilson")
    assert reward["value"] == right / 4 and out.with_suffix(".md").read_text() in said
    more = ("--samples", 4, "--k", 1, "--k", 3, "--max-tokens", 40)
    code, said = run_aligner("eval", model, "--data", prompts, "--reward", f"{tmp_path}/reward.py:has_answer", "--output", out, *more)
    assert code == 0, said
    found = {one["name"]: one for one in json.loads(out.read_text())["measures"]}
    assert list(found) == ["accuracy", "pass@1", "pass@3", "mean reward"] and found["pass@3"]["count"] == 3
    assert found["pass@1"]["value"] == pytest.approx(found["accuracy"]["value"]) and found["pass@3"]["value"] > found["pass@1"]["value"] > 0
    assert "4 of 16 responses without a score are left out" in found["mean reward"]["note"]


def test_wins_under_a_judge(model: Path, adapter: Path, prompts: Path, tmp_path: Path) -> None:
    told, tuned = told_by_transformers(model), told_by_transformers(model, adapter)

    def reply(body: dict) -> str:
        """Likes what the base model says, but always prefers A for the last prompt, and is beside itself for the one before."""
        texts = [asked(body).split(f"[Response {name}]\n")[1].split("\n\n[")[0].strip() for name in "AB"]
        if PROMPTS[3] in asked(body):
            return "Better: A"
        if PROMPTS[2] in asked(body):
            return "I cannot say."
        return f"Better: {'A' if texts[0] in [text.strip() for text in told] else 'B'}"

    assert not {text.strip() for text in told} & {text.strip() for text in tuned}
    file, out = tmp_path / "judge.yaml", tmp_path / "wins.json"
    with judge_server(reply) as server:
        file.write_text(f"url: {server.url}\njudge:\n  model: m\n")
        code, said = run_aligner("eval", model, "--data", prompts, "--judge", file, "--against", adapter, "--output", out, *GREEDY)
        assert code == 0, said
        (wins,) = json.loads(out.read_text())["measures"]
        assert wins["value"] == pytest.approx((1 + 1 + 0.5) / 3) and wins["count"] == 3 and len(server.requests) == 8
        assert "2 wins, 1 ties, 0 losses, both orders asked; 1 without a verdict" in wins["note"]
        assert "unparsable answer 'I cannot say.'" in said
        run_aligner("eval", model, "--data", prompts, "--judge", file, "--against", adapter, "--output", out, *GREEDY)
        assert len(server.requests) == 8  # what was answered is beside the results
    with judge_server(lambda body: f"Score: {4 if 'Lily' in asked(body) else 1}") as server:
        file.write_text(f"url: {server.url}\njudge: {{model: m}}\n")
        code, said = run_aligner("eval", model, "--data", prompts, "--judge", file, *GREEDY)
    lily = sum("Lily" in prompt + text for prompt, text in zip(PROMPTS, told, strict=True))
    assert code == 0 and f"| mean score | {(4 * lily + 4 - lily) / 4:.4g} |" in said, said


def test_a_reward_model_on_pairs(model: Path, shared_data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    scorer.config.pad_token_id = tokenizer.eos_token_id
    scorer.save_pretrained(tmp_path / "scorer")
    tokenizer.save_pretrained(tmp_path / "scorer")
    pairs = [{"prompt": text, "chosen": " and then the cat", "rejected": f" {number} dogs ran"} for number, text in enumerate(PROMPTS * 3)]
    file, out = write_rows(tmp_path / "pairs.jsonl", pairs), tmp_path / "pairs.json"
    code, said = run_aligner("eval", tmp_path / "scorer", "--pairs", file, "--output", out, "--batch-size", 5)
    assert code == 0, said

    def score(text: str) -> float:
        ids = torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]])
        with torch.inference_mode():
            hidden = scorer.model(ids).last_hidden_state[0, -1]
            return float(scorer.score(hidden))

    margins = [score(row["prompt"] + row["chosen"]) - score(row["prompt"] + row["rejected"]) for row in pairs]
    accuracy, margin = json.loads(out.read_text())["measures"]
    assert accuracy["value"] == sum(margin > 0 for margin in margins) / 12 and accuracy["interval"] == "Wilson"
    assert margin["value"] == pytest.approx(sum(margins) / 12, abs=1e-4)
    code, said = run_aligner("eval", model, "--pairs", file)
    assert code == 2 and "no reward model, which --pairs needs" in said


def test_a_run_and_its_report(model: Path, prompts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = write_rows(tmp_path / "sft.jsonl", [{"prompt": text, "response": " went home."} for text in PROMPTS])
    settings = [f"model.path={model}", f"data.train={rows}", "data.max_length=64", "algorithm.batch_size=4", "loop.max_steps=3"]
    run_job(train("sft"), run, [*settings, "optimizer.lr=1e-3", "logging.tensorboard=false"])
    trained = [row["response"] for row in generated(run, prompts, tmp_path / "run.jsonl")]
    assert trained == told_by_transformers(run / "export") != told_by_transformers(model)
    (tmp_path / "reward.py").write_text(REWARD)
    code, said = run_aligner("eval", run, "--data", prompts, "--reward", f"{tmp_path}/reward.py:share", *GREEDY)
    assert code == 0 and "| accuracy |" in said, said
    assert sorted(path.suffix for path in (run / "evaluations").iterdir()) == [".json", ".md"]
    code, said = run_aligner("report", run)
    assert code == 0 and "| accuracy |" in said and "<td>accuracy</td>" in (run / "report.html").read_text()
