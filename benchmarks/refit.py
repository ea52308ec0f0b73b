"""Giving the engine the policy's new weights: seconds and GB/s against a plain copy of the same bytes, and the memory that it takes.

    python benchmarks/refit.py [--size large] [--bucket-mib 16] [--cases in_place pp2_to_tp2 ...]

A case has one or two ranks, processes on this machine. How to read it: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from random_model import GPU_SIZES, SIZES, write_model
from sides import CHILD_TIMEOUT_SECONDS, HERE

GIB = 1e9
CASES = {  # name: (ranks, training layout, ranks of an engine's replica, whether whole tensors are streamed)
    "in_place": (1, {}, 1, False),
    "in_place_tp2": (2, {"tp": 2, "sequence_parallel": True}, 2, False),
    "pp2_to_tp2": (2, {"pp": 2}, 2, False),
    "pp2_to_tp1": (2, {"pp": 2}, 1, False),
    "tp2_to_tp1": (2, {"tp": 2, "sequence_parallel": True}, 1, False),
    "dp2_to_tp2": (2, {}, 2, False),
    "streamed": (1, {}, 1, True),
    "streamed_tp2": (2, {"tp": 2, "sequence_parallel": True}, 1, True),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=[*SIZES, *GPU_SIZES], default="large")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the figures are written, as JSON and as a table")
    chosen = parser.parse_args(arguments)
    if min(chosen.bucket_mib, chosen.repeats) < 1:
        parser.error("the size of a bucket and the repeats must be at least 1")
    return chosen


def run_case(name: str, model: Path, chosen: argparse.Namespace, folder: Path) -> dict:
    """What a case's ranks measured; their memory in a run of its own, in which what is freed goes back to the system at once."""
    case = run_ranks(name, model, chosen, folder, {})
    memory = run_ranks(name, model, chosen, folder, {"MALLOC_MMAP_THRESHOLD_": "65536"})
    for rank, other in zip(case["ranks"], memory["ranks"], strict=True):
        rank["extra_bytes"] = other["extra_bytes"]
    return case


def run_ranks(name: str, model: Path, chosen: argparse.Namespace, folder: Path, extra: dict[str, str]) -> dict:
    """What a case's ranks measured with these variables. Raises RuntimeError with their last lines where one fails."""
    ranks, parallel, tp, streamed = CASES[name]
    spec, result = folder / "spec.json", folder / "result.json"
    fields = {"model": str(model), "parallel": parallel, "tp": tp, "streamed": streamed}
    spec.write_text(json.dumps(fields | {"bucket_mib": chosen.bucket_mib, "repeats": chosen.repeats}))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}",
    } | extra
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "refit_ours.py"), str(spec), str(result)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        tail = "\n".join([line for line in lines if line.startswith("[rank")][-15:] or lines[-15:])  # the launcher's own say nothing
        raise RuntimeError(f"{name} ended with exit code {done.returncode}:\n{tail}")
    return {"case": name, **json.loads(result.read_text())}


def line(case: dict) -> str:
    """One case as a line of the table: the slowest rank's figures."""
    ranks = case["ranks"]
    wall, cpu = (max(rank["refit"][unit] for rank in ranks) for unit in (0, 1))
    copy_wall, copy_cpu = (max(rank["copy"][unit] for rank in ranks) for unit in (0, 1))
    moved = max(rank["num_bytes"] for rank in ranks)
    extra = max(rank["extra_bytes"] for rank in ranks) / ranks[0]["bucket_bytes"]
    cells = [case["case"], len(ranks), f"{moved / 2**20:.0f}", f"{wall:.4f} / {cpu:.4f}"]
    if moved:
        cells += [f"{moved / wall / GIB:.2f}", f"{copy_wall:.4f} / {copy_cpu:.4f}", f"{copy_wall / wall:.0%} / {copy_cpu / cpu:.0%}"]
    else:
        cells += ["", "", ""]
    wires = [rank["wire"] for rank in ranks if moved and rank["wire"]]
    cells.append(f"{max(w[0] for w in wires) / wall:.0%} / {max(w[1] for w in wires) / cpu:.0%}" if wires else "")
    return "| " + " | ".join(map(str, (*cells, f"{extra:.2f}"))) + " |"


HEADING = [
    "| case | ranks | MiB into a rank | refit, wall / CPU s | GB/s | copy, wall / CPU s | of a copy | of the wire | peak extra, buckets |",
    "|---|---|---|---|---|---|---|---|---|",
]


def main() -> int:
    chosen = parse(sys.argv[1:])
    size = (SIZES | GPU_SIZES)[chosen.size]
    size, cases = replace(size, num_layers=size.num_layers + size.num_layers % 2), []  # two stages of a pipeline have as many
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_model(size, Path(folder) / "model", positions=512, seed=0)
            print("\n".join(HEADING), flush=True)
            for name in chosen.cases:
                cases.append(run_case(name, Path(folder) / "model", chosen, Path(folder)))
                print(line(cases[-1]), flush=True)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / time.strftime("refit-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(cases, indent=2) + "\n")
    path.with_suffix(".md").write_text("\n".join([*HEADING, *map(line, cases)]) + "\n")
    print(f"figures: {path} and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
