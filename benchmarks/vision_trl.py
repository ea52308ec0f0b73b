"""One GRPO step of a tiny vision model against TRL's `GRPOTrainer`: same LLaVA, pictures, batch, lengths, threads, loss and learning rate.

    python benchmarks/vision_trl.py [--rounds 3] [--steps 4] [--width 128] [--pixels 32] [--trl-python PATH]

As grpo_vs_trl.py: the sides in turn, each in a process of its own; medians over the steps of a round, then over the rounds; ratios
TRL / ours (above 1: this stack is faster). Loss and gradient norm of a fixed batch must agree. Neither side samples the token in whose
places the features of images come: TRL's training pass ends with an error for a response that has one.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from grpo_vs_trl import check_same_work, middle, table
from sides import HERE, Mismatch, run_side
from trl_environment import EnvironmentFailed, trl_python

sys.path.append(str(HERE.parent / "examples" / "vision"))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default 3)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run (default 4), after one that warms up")
    parser.add_argument("--prompts", type=int, default=8, help="each a picture and a question")
    parser.add_argument("--group-size", type=int, default=4, help="responses per prompt")
    parser.add_argument("--response-length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128, help="of the tower's four layers and the language model's two")
    parser.add_argument("--pixels", type=int, default=32, help="of a picture's side; a token for 4 x 4 of them")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="sequences per forward pass, on both sides; 0: all at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-python", type=Path, help="an interpreter that can import trl (default: .venv-trl is made)")
    parser.add_argument("--ours-only", action="store_true", help="time this stack alone")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the figures are written, as JSON")
    return parser.parse_args(arguments)


def write_task(chosen: argparse.Namespace, folder: Path) -> tuple[dict, int]:
    """A random LLaVA and random pictures below `folder`; the sides' spec, and the number of parameters."""
    import numpy as np
    from digits import IMAGE, QUESTION, TOKENS, write_model
    from PIL import Image
    from transformers import AutoProcessor

    positions = (chosen.pixels // 4) ** 2 + chosen.response_length + 32
    parameters = write_model(0, folder / "model", width=chosen.width, size=chosen.pixels, positions=positions)
    processor = AutoProcessor.from_pretrained(folder / "model")
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    text = processor.apply_chat_template(asked, add_generation_prompt=True)
    files, prompts, rng = [], [], np.random.default_rng(0)
    for number in range(chosen.prompts):
        picture = Image.fromarray(rng.integers(0, 256, (chosen.pixels, chosen.pixels, 3), dtype=np.uint8))
        files.append(str(folder / f"{number}.png"))
        picture.save(files[-1])
        prompts.append(processor(images=picture, text=text)["input_ids"][0])
    spec = {"model": str(folder / "model"), "prompts": prompts, "images": files, "question": QUESTION, "slot": TOKENS.index(IMAGE)}
    spec |= {"group_size": chosen.group_size, "max_new_tokens": chosen.response_length, "steps": chosen.steps}
    return spec | {"micro_batch_size": chosen.micro_batch_size, "threads": chosen.threads}, parameters


def compare(chosen: argparse.Namespace, trl: Path | None, folder: Path) -> dict:
    """Run the rounds; prints the table and returns everything measured."""
    spec, parameters = write_task(chosen, folder)
    spec_file, result_file = folder / "spec.json", folder / "result.json"
    spec_file.write_text(json.dumps(spec))
    sides: dict[str, list[dict]] = {"ours": [], "trl": []}
    for number in range(1, chosen.rounds + 1):
        sides["ours"].append(run_side(Path(sys.executable), "vision_ours.py", spec_file, result_file, threads=chosen.threads))
        if trl is None:
            continue
        sides["trl"].append(run_side(trl, "trl_grpo_reference.py", spec_file, result_file, threads=chosen.threads))
        check_same_work(sides["ours"][-1], sides["trl"][-1])
        a, b = (sides[side][-1]["median"]["total"]["cpu_seconds"] for side in ("ours", "trl"))
        print(f"round {number} of {chosen.rounds}: CPU seconds a step, ours {a:.2f}, TRL {b:.2f}, {b / a:.2f}x", flush=True)
    rows = chosen.prompts * chosen.group_size
    title = (
        f"\nLLaVA of {parameters / 1e6:.2f}M parameters, {chosen.prompts} prompts with a picture x {chosen.group_size} responses = {rows} "
        f"sequences of {len(spec['prompts'][0])} + {chosen.response_length} tokens,\n  {chosen.threads} thread(s), micro-batches of "
        f"{chosen.micro_batch_size or rows}; seconds a step"
    )
    print("\n".join(table(title, sides["ours"], sides["trl"])), flush=True)
    return {"parameters": parameters, "rounds": sides}


def main() -> int:
    chosen = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an exception: the running side is ended with us
    try:
        trl = None if chosen.ours_only else chosen.trl_python or trl_python(HERE.parent / ".venv-trl")
        with tempfile.TemporaryDirectory() as folder:
            measured = compare(chosen, trl, Path(folder))
    except (EnvironmentFailed, Mismatch, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / time.strftime("vision_trl-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(measured, indent=2) + "\n")
    if trl is not None:
        a, b = (middle(measured["rounds"][side], "total", "cpu_seconds") for side in ("ours", "trl"))
        print(f"\nend to end, CPU time, TRL / ours: {b / a:.2f}x")
    print(f"figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
