"""`aligner preflight` on ranks that are well, that differ, that hang, or of which one never comes.

preflight_job.py MODE FOLDER    FOLDER has tokenizer/ and prompts.jsonl; rank 0 writes FOLDER/<MODE>.json
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from aligner.commands.parts import PreflightOptions
from aligner.commands.preflight import cluster, command, ranks
from aligner.commands.preflight.command import preflight

MODE, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
ITEMS = {
    "well": ("versions", "devices", "clock", "network", "filesystem", "ports", "tokenizer", "data", "reward", "weights", "engine"),
    "differ": ("versions", "clock", "network", "data"),
    "absent": ("versions",),
    "uneven": ("network",),
}


def settings() -> list[str]:
    """Two ranks that share a tiny model; two nodes are pretended, so the servers must listen for others."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 64}
    return [
        f"model.tokenizer={FOLDER / 'tokenizer'}",
        f"data.train={FOLDER / 'prompts.jsonl'}",
        f"run.directory={FOLDER / 'run'}",
        *(f"model.architecture.{name}={size}" for name, size in (sizes | {"max_position_embeddings": 32}).items()),
        *("num_processes=2", "parallel.tp=2", "data.max_prompt_length=8", "rollout.sampling.max_response_length=8"),
        *("critic.server.host=0.0.0.0", "reward.server.host=0.0.0.0"),
        "reward.function.path=aligner.rewards.builtin:exact_match",
    ]


def end(code: int) -> None:
    """In place of os._exit: the tests of these ranks want a good end."""
    print(f"ended with {code}", flush=True)
    raise SystemExit(0)


def differ() -> None:
    """Rank 1 has another torch, and its clock check never comes back."""

    def hangs(context):
        time.sleep(60)

    command.ITEMS = tuple(replace(item, observe=hangs, timeout_seconds=2.0) if item is cluster.clock else item for item in command.ITEMS)
    own = ranks.own_versions
    ranks.own_versions = lambda: own() | {"torch": "0.1"}


def main() -> None:
    os.environ["SLURMD_NODENAME"] = f"n{max(0, RANK - 1)}" if MODE == "uneven" else f"n{RANK}"
    if MODE == "absent" and RANK == 1:
        return
    if MODE == "differ" and RANK == 1:
        differ()
    # What is compared here is how the parts act together; each one has its own tests, and planning takes ten seconds.
    options = PreflightOptions(only=",".join(ITEMS[MODE]), json_path=FOLDER / f"{MODE}.json", timeout=1.5 if MODE == "absent" else 0.0)
    print("returned", preflight("ppo", settings(), options, end=end), flush=True)


if __name__ == "__main__":
    main()
