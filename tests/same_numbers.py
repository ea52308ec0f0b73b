"""Does every recipe compute what it computed before? Runs each one in two checkouts and compares metrics and files bit for bit.

    python tests/same_numbers.py BEFORE [AFTER] [--only RECIPE ...]

BEFORE and AFTER are directories with a checkout, or commits of this repository (AFTER: this checkout). A change of structure passes; one
that means to change numbers shows which.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builders import load_module

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600
NOT_COMPARED = ("time/",), ("per_second", "imbalance")  # beginnings and ends of names: durations, and who sampled how much
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 64}
MODEL = [
    *(f"model.architecture.{name}={size}" for name, size in (SIZES | {"max_position_embeddings": 320}).items()),
    *("model.tokenizer={data}/tokenizer", "model.make_vocab_divisible_by=2", "model.micro_batch_size=4"),
    *("logging.tensorboard=false", "logging.progress=plain"),
]
LEARNING = ["optimizer.lr=1e-2", "optimizer.warmup_steps=1", "loop.max_steps=3", "loop.save_every=2", "loop.validate_every=2"]
LEARNING += ["guard.learnt_nothing=warn"]
TRAINER = [*LEARNING, "algorithm.batch_size=4", "data.max_length=96"]
ONLINE = [*LEARNING, "data.train={data}/prompts.jsonl", "data.validation={data}/prompts.jsonl", "data.max_prompt_length=16"]
ONLINE += ["rollout.sampling.max_response_length=8", "reward.function.path=aligner.rewards.builtin:length"]
GROUPS = ["algorithm.prompts_per_step=4", "algorithm.group_size=4"]
SIMPO = ["algorithm.loss=simpo", "algorithm.beta=2.0", "algorithm.gamma=1.0"]
WRITER = ["algorithm.part_size=3"]


@dataclass(frozen=True, slots=True)
class Case:
    """One run: of which file of conf/, with what settings; `{data}` is the folder of the data, `{runs}` that of the cases before."""

    recipe: str
    settings: Sequence[str]
    ranks: int = 1


def _sets(name: str) -> list[str]:
    return [f"data.train={{data}}/{name}.jsonl", f"data.validation={{data}}/{name}.jsonl"]


CASES = {
    "sft": Case("sft", [*TRAINER, *_sets("sft")]),
    "sft_pp2": Case("sft", [*TRAINER, *_sets("sft"), "parallel.pp=2", "model.packing=true", "model.micro_batch_tokens=256"], ranks=2),
    "sft_muon": Case("sft", [*TRAINER, *_sets("sft"), "optimizer.kind=muon", "optimizer.distributed=false"]),
    "sft_nvme_dp2": Case("sft", [*TRAINER, *_sets("sft"), "optimizer.cpu_offload=true", "optimizer.nvme_path={data}"], ranks=2),
    "sft_int8": Case("sft", [*TRAINER, *_sets("sft"), "model.lora.rank=4", "model.quantization=int8"]),
    "reward_model": Case("reward_model", [*TRAINER, *_sets("pairs")]),
    "regression_reward_model": Case("regression_reward_model", [*TRAINER, *_sets("labelled"), "data.attributes=[quality]"]),
    "process_reward_model": Case("process_reward_model", [*TRAINER, *_sets("steps")]),
    "dpo": Case("dpo", [*TRAINER, *_sets("pairs")]),
    "dpo_precomputed": Case("dpo", [*TRAINER, *_sets("pairs"), "algorithm.reference=precomputed"], ranks=2),
    "simpo": Case("dpo", [*TRAINER, *_sets("pairs"), *SIMPO]),
    "kto": Case("kto", [*TRAINER, *_sets("unpaired")]),
    "kto_precomputed": Case("kto", [*TRAINER, *_sets("unpaired"), "algorithm.reference=precomputed"]),
    "steerlm": Case("steerlm", [*TRAINER, *_sets("labelled"), "data.max_length=128"]),
    "proposals": Case("proposals", [*WRITER, "data.train={data}/sampled.jsonl", "data.max_length=96", "algorithm.adds=response"]),
    "steerlm2": Case("steerlm2", [*TRAINER, *_sets("proposed"), "data.max_length=128"]),
    "teacher_logprobs": Case("teacher_logprobs", [*_sets("sft"), "data.max_length=96", "algorithm.top_k=4", "algorithm.shard_size=3"]),
    "distill": Case("distill", [*TRAINER, *(f"data.{name}={{runs}}/teacher_logprobs/teacher/{name}" for name in ("train", "validation"))]),
    "generate": Case("generate", [*WRITER, "data.train={data}/prompts.jsonl", "rollout.sampling.max_response_length=8"]),
    "annotate": Case(
        "annotate",
        [*WRITER, "data.train={data}/labelled.jsonl", "model.path={runs}/regression_reward_model/export", "algorithm.attributes=[quality]"],
    ),
    "constitution": Case(
        "constitution",
        [
            *(*WRITER, "data.train={data}/prompts.jsonl", "data.constitution={data}/constitution.json", "algorithm.pairs=sampled"),
            *("data.max_prompt_length=40", "data.max_history_length=280", "rollout.sampling.max_response_length=30"),
            f"rollout.sampling.stop_token_ids=[{','.join(map(str, range(30, 55)))}]",
        ],
    ),
    "grpo": Case("grpo", [*ONLINE, *GROUPS, "algorithm.mini_batch_size=8", "algorithm.kl_coef=0.01"]),
    "grpo_dp2": Case("grpo", [*ONLINE, *GROUPS, "algorithm.mini_batch_size=8", "algorithm.dynamic_sampling=true"], ranks=2),
    "grpo_async": Case(
        "grpo",
        [*ONLINE, *GROUPS, "algorithm.mini_batch_size=8", "rollout.asynchronous.max_staleness=1", "algorithm.correction.kind=tis"],
    ),
    "remax": Case("grpo", [*ONLINE, "algorithm=remax", *GROUPS, "algorithm.group_size=1", "algorithm.mini_batch_size=4"]),
    "ppo": Case("ppo", [*ONLINE, "algorithm.rollouts_per_step=8", "algorithm.mini_batch_size=4", "critic.mini_batch_size=4"]),
    "ppo_head": Case("ppo", [*ONLINE, "algorithm.rollouts_per_step=8", "algorithm.mini_batch_size=4", "critic.kind=head"]),
    "ppo_served": Case(
        "ppo",
        [*ONLINE[:-1], "reward.serve=true", "reward.model.path={runs}/reward_model/export"]
        + ["algorithm.rollouts_per_step=8", "algorithm.mini_batch_size=4", "critic.mini_batch_size=4"],
    ),
    "online_dpo": Case("online_dpo", [*ONLINE, *GROUPS, "algorithm.mini_batch_size=4"]),
    "rejection_sampling": Case("rejection_sampling", [*ONLINE, *GROUPS, "algorithm.keep=2", "algorithm.mini_batch_size=4"]),
    "online_distill": Case("online_distill", [*ONLINE, *GROUPS, "algorithm.mini_batch_size=4", "teacher.path={runs}/sft/export"]),
    "spin": Case("spin", [*ONLINE, *_sets("sft"), "algorithm.batch_size=4", "data.max_length=96"]),
    "self_rewarding": Case("self_rewarding", [*ONLINE, "algorithm.judge=reward", "algorithm.batch_size=4"]),
}


def write_data(folder: Path) -> None:
    """A tokenizer with one token per printable character, and a few records of every kind."""
    module = load_module(ROOT / "tests" / "unit" / "data" / "conftest.py", "character_tokenizer")
    module.write_tokenizer(folder / "tokenizer", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    sums = [(f"{a}+{b}=", str(a + b), str(a * b + 7)) for a in range(4) for b in range(3)]
    logs = [{"log(P(a|x,y))": -1.0 - n, "log(P(y|x))": -2.0, "log(Q(y|a,x))": -3.5} for n in range(2)]

    def turns(prompt: str, response: str, number: int) -> list[dict]:
        return [{"from": "User", "value": prompt}, {"from": "Assistant", "value": response, "label": f"quality:{number % 5}"}]

    def group(prompt: str, texts: Sequence[str], more: Sequence[dict]) -> dict:
        responses = [{"from": "Assistant", "value": text} | logs for text, logs in zip(texts, more, strict=True)]
        return {"system": "", "prompt_turns": turns(prompt, "", 0)[:1], "label": "quality:4", "responses": responses}

    records = {
        "prompts": [{"prompt": prompt, "answer": good} for prompt, good, _ in sums],
        "sft": [{"prompt": prompt, "response": good} for prompt, good, _ in sums],
        "pairs": [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in sums],
        "unpaired": [{"prompt": p, "response": r, "preference": ok} for p, good, bad in sums for r, ok in ((good, True), (bad, False))],
        "steps": [{"prompt": prompt, "steps": [good, bad], "labels": [1, 0]} for prompt, good, bad in sums],
        "labelled": [
            {"system": "", "conversations": turns(prompt, good, number), "mask": "User", "type": "VALUE_TO_TEXT"}
            for number, (prompt, good, _) in enumerate(sums)
        ],
        "sampled": [group(prompt, (good, bad), ({}, {})) for prompt, good, bad in sums],
        "proposed": [group(prompt, (good, bad), logs) for prompt, good, bad in sums],
    }
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asks = {"critique_request": "Bad?", "revision_request": "Mend.", "question": "Better?"}
    (folder / "constitution.json").write_text(json.dumps({"principles": [{"name": name, **asks} for name in ("one", "two")]}))


def arguments(case: Case, data: Path, directory: Path) -> list[str]:
    own = {"data": data, "runs": directory.parent}
    settings = [setting.format(**own) for setting in (*MODEL, *case.settings)]
    return ["-m", "aligner.cli", "launch", "local", case.recipe, *settings, f"run.directory={directory}", f"num_processes={case.ranks}"]


def run(checkout: Path, case: Case, data: Path, directory: Path) -> None:
    """One run of a checkout's code. Raises RuntimeError with its output where it fails."""
    command = [sys.executable, *arguments(case, data, directory)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{directory}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def result(directory: Path) -> dict[str, object]:
    """What is compared of a run: metrics by step and name, SHA-256 of the files that it leaves for others."""
    begins, ends = NOT_COMPARED
    found: dict[str, object] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        step, _ = metrics.pop("step"), metrics.pop("time")
        values = {name: value for name, value in metrics.items() if not name.startswith(begins) and not name.endswith(ends)}
        found |= {f"step {step}: {name}": value for name, value in values.items()}
    for part in ("export", "teacher", "written"):
        for path in sorted((directory / part).rglob("*")):
            if path.is_file() and path.suffix in (".safetensors", ".jsonl"):
                found[str(path.relative_to(directory))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """One line for each value that is not the same, NaN being NaN."""
    names = [*before, *(name for name in after if name not in before)]
    pairs = ((name, before.get(name, "(not there)"), after.get(name, "(not there)")) for name in names)
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if json.dumps(old) != json.dumps(new)]


def checkout_of(what: str, folder: Path) -> Path:
    """The directory itself, or the commit's files in `folder`."""
    if (Path(what) / "aligner").is_dir():
        return Path(what).resolve()
    folder.mkdir()
    archive = subprocess.run(["git", "archive", what], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], input=archive, cwd=folder, check=True)
    return folder


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", help="directory or commit")
    parser.add_argument("after", nargs="?", default=str(ROOT), help="directory or commit (this checkout)")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="these, and those before them that they need")
    chosen = parser.parse_args(argv)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as place:
        folder = Path(place)
        write_data(folder)
        sides = {side: checkout_of(getattr(chosen, side), folder / f"code_{side}") for side in ("before", "after")}
        for name, case in CASES.items():
            if (
                chosen.only
                and name not in chosen.only
                and not any(f"{{runs}}/{name}/" in s for c in chosen.only for s in CASES[c].settings)
            ):
                continue
            found = {}
            try:
                for side, checkout in sides.items():
                    run(checkout, case, folder, folder / side / name)
                    found[side] = result(folder / side / name)
            except RuntimeError as error:
                wrong += 1
                print(f"{name}: {error}", flush=True)
                continue
            lines = differences(found["before"], found["after"])
            wrong += bool(lines)
            print(
                f"{name}: {f'{len(lines)} of ' if lines else ''}{len(found['before'])} values {'DIFFER' if lines else 'equal'}", flush=True
            )
            for line in lines[:10]:
                print(f"  {line}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
