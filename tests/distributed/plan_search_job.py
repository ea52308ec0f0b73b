"""The search of a small job beside everything that it may choose, planned in full. In a process of its own: plans have a world.

usage: plan_search_job.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from aligner import cli
from aligner.commands.parts import PlanOptions
from aligner.commands.plan.search import _Search

SMALL = [f"model.architecture.{size}" for size in ("num_layers=4", "hidden_size=512", "vocab_size=8000", "max_position_embeddings=512")]
TYPED = [
    *SMALL,
    "+cluster=dgx_h100",
    "data.max_prompt_length=128",
    "rollout.sampling.max_response_length=128",
    "algorithm.prompts_per_step=8",
]
TYPED += ["parallel.vpp=1", "parallel.cp=1", "optimizer.offload=false", "rollout.offload=false", "rollout.asynchronous.max_staleness=0"]
TYPED += ["algorithm.mini_batch_size=64", "plan.response_length=60", "model.recompute=none"]


def exhaustive(search: _Search) -> tuple[float, dict[str, str]]:
    """The fastest of all layouts, micro-batches and engines on up to four ranks."""
    ((one,), _) = search.searches  # the others let the host update, where nothing else fits
    component, best = one.arrangement.components[0], (float("inf"), {})
    for ranks in search.space.ranks(component, 4):
        for layout in search.space.layouts(component, ranks):
            for model in search.space.models(layout):
                for engine in search.space.engines(layout, component.engine, ranks):
                    chosen = search.space.settings(
                        type(component)(**{**_fields(layout), "model": model, "engine": engine, "work": component.work})
                    )
                    job = search.evaluate(chosen)
                    if job is not None and not job.problems and job.step_seconds < best[0]:
                        best = (job.step_seconds, chosen)
    return best


def _fields(component) -> dict:
    return {name: getattr(component, name) for name in component.__dataclass_fields__}


def main() -> None:
    folder = Path(sys.argv[1])
    search = _Search("grpo", TYPED, PlanOptions(gpus=4))
    found = search.found(0.0)
    seconds, settings = exhaustive(search)
    code = cli.main(
        ["plan", "grpo", *TYPED, "--search", "--gpus", "4", "--write", str(folder), "--steps", "20", "--json", str(folder / "s.json")]
    )
    again = cli.main(["plan", "grpo_4_gpus", "--config-dir", str(folder), "--json", str(folder / "again.json")])
    refused = cli.main(["plan", "grpo", *TYPED, "--search", "--gpus", "7"])
    late = cli.main(["plan", "grpo", *TYPED, "--search", "--gpus", "4", "--steps", "1000000", "--deadline", "1m"])
    result = {
        "found": found.best.seconds,
        "found_settings": dict(found.best.settings),
        "best": seconds,
        "best_settings": settings,
        "codes": [code, again, refused, late],
        "written": json.loads((folder / "s.json").read_text()),
        "again": json.loads((folder / "again.json").read_text()),
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
