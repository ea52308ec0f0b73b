"""`aligner preflight` on two ranks: all is well; versions differ and a check hangs on one; one never comes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from training_jobs import SIZES, write_task

from aligner.commands.parts import PreflightOptions
from aligner.commands.preflight import cluster, command, ranks

ITEMS = {
    "well": ("versions", "devices", "clock", "network", "filesystem", "ports", "tokenizer", "data", "reward", "weights", "engine"),
    "differ": ("versions", "clock", "network", "data"),
    "absent": ("versions",),
    "uneven": ("network",),
}


def settings(folder: Path) -> list[str]:
    """Two ranks that share a tiny model; two nodes are pretended, so the servers must listen for others."""
    return [
        *(f"model.tokenizer={folder / 'tokenizer'}", f"data.train={folder / 'prompts.jsonl'}", f"run.directory={folder / 'run'}", *SIZES),
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


def checked(mode: str, folder: Path) -> str:
    """What a rank prints, and with what it ends: of ranks that are well, that differ, that hang, or of which one never comes."""
    rank = int(os.environ["RANK"])
    os.environ["SLURMD_NODENAME"] = f"n{max(0, rank - 1)}" if mode == "uneven" else f"n{rank}"
    if mode == "absent" and rank == 1:
        return ""
    if mode == "differ" and rank == 1:
        differ()
    # What is compared here is how the parts act together; each one has its own tests, and planning takes ten seconds.
    only = {"only": ",".join(ITEMS[mode]), "json_path": folder / f"{mode}.json", "timeout": 1.5 if mode == "absent" else 0.0}
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        print("returned", command.preflight("ppo", settings(folder), PreflightOptions(**only), end=end))
    return said.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    write_task(folder)
    return folder


def items(folder, mode):
    return json.loads((folder / f"{mode}.json").read_text())["items"]


def levels(found):
    return {name: finding["level"] for name, finding in found.items()}


def test_all_is_well(on_ranks, folder):
    first, second = on_ranks(checked, 2, "well", folder)
    found = items(folder, "well")
    assert levels(found) == dict.fromkeys(found, "ok") | {"weights": "warning"}  # random weights
    assert "2 ranks on 2 nodes" in found["ranks"]["found"]
    assert "between nodes: " in found["network"]["found"] and "(n0 - n1)" in found["network"]["found"]
    assert found["network"]["figures"]["between_nodes_gb_per_second"] > 0
    assert "others see it after" in found["filesystem"]["found"]
    assert "reached from the other node" in found["ports"]["found"]
    assert found["engine"]["figures"]["gap"] < 1e-4 > found["engine"]["figures"]["refitted_gap"]  # float32
    assert "ready (1 warning: weights)" in first and "returned 0" in first
    assert "returned 0" in second and "ready" not in second  # rank 0 alone prints
    assert not list((folder / "run").glob(".preflight*"))


def test_a_rank_that_differs_and_hangs(on_ranks, folder):
    first, second = on_ranks(checked, 2, "differ", folder)
    found = items(folder, "differ")
    expected = {"ranks": "ok", "config": "ok", "versions": "fatal", "clock": "fatal", "network": "not run", "hub": "ok", "data": "ok"}
    assert levels(found) == expected
    assert found["versions"]["found"].startswith("rank 1 on n1: torch is 0.1 and not ")
    assert "rank 1 on n1: did not finish within" in found["clock"]["found"] and "(hangs)" in found["clock"]["found"]
    assert found["network"]["found"] == "needs versions"
    assert "ended with 2" in first and "ended with 2" in second


def test_a_rank_that_never_comes(on_ranks, folder):
    first, _ = on_ranks(checked, 2, "absent", folder)
    found = items(folder, "absent")
    assert levels(found) == {"ranks": "fatal", "config": "not run", "versions": "not run", "hub": "not run"}
    assert found["ranks"]["found"] == "rank 0 waited for a sign of life: rank 1 of 2 did not come"
    assert "ended with 2" in first


def test_links_of_nodes_with_different_numbers_of_ranks_and_partners(on_ranks, folder):
    on_ranks(checked, 4, "uneven", folder)
    found = items(folder, "uneven")
    assert levels(found)["ranks"] == "warning" and "unevenly spread (n1: 1, n2: 1, n0: 2)" in found["ranks"]["found"]
    text = found["network"]["found"]
    assert "within a node: " in text and "(n0)" in text
    assert "between nodes: " in text and "(2 measured, slowest n0 - n" in text  # n0 with n1, n0 with n2
