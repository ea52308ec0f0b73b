"""What recording a run's trace costs: the CPU time of a span, and its share of the steps of a run.

    python benchmarks/trace_cost.py                 # a span alone
    python benchmarks/trace_cost.py --run runs/mine # and of that run's processes: spans of its steps x the cost of one / its steps' seconds

A share is of wall time, so with several threads that of CPU time is smaller.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

from aligner.commands.report import step_of
from aligner.telemetry.recording import Recorder, read_spans


def cost_of_a_span(directory: Path, count: int) -> float:
    """CPU seconds to record one request and to write it: formatting, and the file system's part."""
    recorder = Recorder()
    recorder.open(directory / "trace" / "actor.0.jsonl", rank=0, most_bytes=1 << 30)
    begin = time.process_time()
    for number in range(count):
        recorder.add("response", time.perf_counter(), "replica 0", prompt=312, tokens=number, ended_by="stop")
    recorder.close()
    return (time.process_time() - begin) / count


def shares(run: Path, cost: float) -> dict[str, float]:
    """By component, the part of the busiest process's time that recording took, from the first recorded step to the last one's end."""
    spans, _ = read_spans(run / "trace")
    steps = [span for span in spans if step_of(span)]
    if not steps:
        raise SystemExit(f"{run}: has recorded no step")
    begin, end = min(span.start for span in steps), max(span.end for span in steps)
    counts = Counter(span.component for span in spans if begin <= span.start <= end)
    ranks = Counter({component: len(list((run / "trace").glob(f"{component}.*[0-9].jsonl"))) for component in counts})
    return {component: cost * count / ranks[component] / (end - begin) for component, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="directory of a run")
    parser.add_argument("--spans", type=int, default=200_000)
    parser.add_argument("--output", type=Path, help="directory for trace_cost.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cost = cost_of_a_span(Path(folder), options.spans)
    print(f"a span: {cost * 1e6:.1f} us of CPU time")
    found = {"seconds_of_a_span": cost}
    if options.run is not None:
        for component, share in shares(options.run, cost).items():
            print(f"{component}: {share:.3%} of its steps' time")
            found[component] = share
    if options.output is not None:
        (options.output / "trace_cost.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
