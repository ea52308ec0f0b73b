"""The process of one stage of `gpu_check.py`: `gpu_check_stages.py STAGE FOLDER RESULT.json [tiny]`.

A stage yields (name of a figure, value), or a line of text, as it finds them; RESULT.json is written after each, so what a stage has
measured is kept if it fails later or runs out of time. The process loads its packages and then waits for a line on its standard input, so
that a stage can load while the one before it measures. `tiny` is for trying the check itself: everything as small as it can be.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_stages import arithmetic, layers, rollouts, speed, training
from gpu_stages.common import Check, Figures

STAGES: dict[str, Callable[[Check], Figures]] = {
    stage.__name__: stage
    for stage in (
        *(arithmetic.environment, arithmetic.numbers, arithmetic.kernels, arithmetic.flash_attn, arithmetic.varlen_attn),
        *(training.sft_bits, rollouts.gap, training.two_ranks, training.ppo, speed.speed),
        *(layers.transformer_engine, rollouts.vllm, rollouts.tensorrt_llm, speed.decode, speed.grpo_speed, layers.trl),
    )
}
SIDES: dict[str, Callable[..., None]] = {"numbers_side": arithmetic.numbers_side, "one_of_two": training.one_of_two}


def with_peak(figures: Figures) -> Figures:
    """At the end a line with what torch's allocator held at most, since a stage that measures memory has begun to."""
    yield from figures
    yield f"at most {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of torch's memory"


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name in SIDES:  # of a stage that has several processes
        SIDES[name](*sys.argv[2:])
        return
    result = Path(sys.argv[3])
    sys.stdin.readline()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU")
    figures: dict[str, float] = {}
    notes: list[str] = []
    for found in with_peak(STAGES[name](Check(folder, tiny="tiny" in sys.argv[4:]))):
        if isinstance(found, str):
            notes.append(found)
            print(found, flush=True)
        else:
            figures[found[0]] = found[1]
        written = result.with_suffix(".part")
        written.write_text(json.dumps({"figures": figures, "notes": notes}))
        os.replace(written, result)


if __name__ == "__main__":
    main()
