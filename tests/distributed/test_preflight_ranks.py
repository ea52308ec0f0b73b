"""`aligner preflight` on two ranks: all is well; versions differ and a check hangs on one; one never comes."""

import json
from pathlib import Path

import pytest
from builders import load_module

HERE = Path(__file__).parent
JOB = HERE / "preflight_job.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`tokenizer/` and `prompts.jsonl` of the demo's sums."""
    folder = tmp_path_factory.mktemp("preflight")
    load_module(HERE.parents[1] / "examples" / "demo" / "arithmetic.py").write_tokenizer(folder / "tokenizer")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(8)))
    return folder


def items(folder, mode):
    return json.loads((folder / f"{mode}.json").read_text())["items"]


def levels(found):
    return {name: finding["level"] for name, finding in found.items()}


def test_all_is_well(run_distributed, folder):
    first, second = run_distributed(JOB, 2, "well", folder)
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


def test_a_rank_that_differs_and_hangs(run_distributed, folder):
    first, second = run_distributed(JOB, 2, "differ", folder)
    found = items(folder, "differ")
    expected = {"ranks": "ok", "config": "ok", "versions": "fatal", "clock": "fatal", "network": "not run", "hub": "ok", "data": "ok"}
    assert levels(found) == expected
    assert found["versions"]["found"].startswith("rank 1 on n1: torch is 0.1 and not ")
    assert "rank 1 on n1: did not finish within" in found["clock"]["found"] and "(hangs)" in found["clock"]["found"]
    assert found["network"]["found"] == "needs versions"
    assert "ended with 2" in first and "ended with 2" in second


def test_a_rank_that_never_comes(run_distributed, folder):
    first, _ = run_distributed(JOB, 2, "absent", folder)
    found = items(folder, "absent")
    assert levels(found) == {"ranks": "fatal", "config": "not run", "versions": "not run", "hub": "not run"}
    assert found["ranks"]["found"] == "rank 0 waited for a sign of life: rank 1 of 2 did not come"
    assert "ended with 2" in first


def test_links_of_nodes_with_different_numbers_of_ranks_and_partners(run_distributed, folder):
    run_distributed(JOB, 4, "uneven", folder)
    found = items(folder, "uneven")
    assert levels(found)["ranks"] == "warning" and "unevenly spread (n1: 1, n2: 1, n0: 2)" in found["ranks"]["found"]
    text = found["network"]["found"]
    assert "within a node: " in text and "(n0)" in text
    assert "between nodes: " in text and "(2 measured, slowest n0 - n" in text  # n0 with n1, n0 with n2
