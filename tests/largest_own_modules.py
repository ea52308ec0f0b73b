"""The largest dense models of `transformers`' own modules that fit, as `aligner plan` counts them; writes the table of docs/models.md.

usage: python tests/largest_own_modules.py

Models of L layers are 128 L wide, with heads of 128 dimensions, 8 key-value heads, feed-forward layers of 3.5 times the width, and 128,256
tokens with an output layer of their own; `sft` in bfloat16 on DGX H100, one row of 4,096 tokens at a time, the layers recomputed.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: tests/largest_own_modules.py -->\n", "<!-- end of the largest -->"
GPUS = (1, 2, 4, 8, 16, 64)
WAYS = {
    "all weights": (),
    "all weights, `optimizer.cpu_offload`": ("optimizer.cpu_offload=true",),
    "`model.lora.rank=16`": ("model.lora.rank=16",),
}
MOST_LAYERS = 96
_COMMON = ("cluster=dgx_h100", "model.recompute=full", "model.micro_batch_size=1", "model.seq_length=4096", "data.max_length=4096")


def write_model(layers: int, folder: Path) -> Path:
    """A directory with the `config.json` of such a model."""
    sizes = {"num_hidden_layers": layers, "hidden_size": 128 * layers, "num_attention_heads": layers, "head_dim": 128}
    sizes |= {"num_key_value_heads": math.gcd(layers, 8), "intermediate_size": 448 * layers, "vocab_size": 128256}
    sizes |= {"max_position_embeddings": 8192, "tie_word_embeddings": False}
    path = folder / str(layers)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], **sizes}))
    return path


def fits(layers: int, gpus: int, way: str, folder: Path) -> bool:
    """Whether the plan of such a model finds no problem."""
    from aligner.commands.plan.command import plan_job

    given = (f"model.path={write_model(layers, folder)}", f"num_processes={gpus}", f"algorithm.batch_size={gpus}", "data.train=x", *_COMMON)
    return not plan_job("sft", [*given, *WAYS[way]]).problems


def billions(layers: int, folder: Path) -> float:
    """The parameters of such a model."""
    from aligner.models.families.own_modules import hf_architecture, outline

    model = outline(hf_architecture(json.loads((write_model(layers, folder) / "config.json").read_text())))
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9


def largest(gpus: int, way: str, folder: Path) -> int:
    """The layers of the largest model that fits."""
    low, high = 1, MOST_LAYERS + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle, gpus, way, folder) else (low, middle)
    return low


def cell(layers: int, folder: Path) -> str:
    return f"{billions(layers, folder):.1f} B ({layers} layers)"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [[f"{gpus}", *(cell(largest(gpus, way, folder), folder) for way in WAYS)] for gpus in GPUS]
    lines = [["GPUs", *WAYS], ["---"] * (1 + len(WAYS)), *rows]
    table = "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
