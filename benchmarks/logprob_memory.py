"""Peak memory of a log-prob pass at vocabularies of 32k and 128k: this stack's chunks of tokens against a full logits tensor.

    python benchmarks/logprob_memory.py [--rows 4] [--length 1024] [--chunks 256 1024 4096]

Both compute the log-prob of every token of the same batch under the same weights, each in a process of its own: `MegatronPolicy.logprobs`
here, and a transformers model with `log_softmax` over its logits. The figure is how far resident memory rose above what it was before the
pass, with the weights loaded. The run ends with an error where the log-probs differ. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from random_model import Size, random_prompts, write_model
from sides import HERE, Mismatch

VOCABULARIES = (32_768, 131_072)
TOLERANCE = 1e-4  # of a log-prob
CHILD_TIMEOUT_SECONDS = 900


def size_of(vocab_size: int) -> Size:
    """A model so small that the output layer is nearly all of its pass."""
    return Size(
        num_layers=2,
        hidden_size=128,
        ffn_hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=vocab_size,
        tied_embeddings=True,
    )


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (highest since the last reset) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")


def measured(compute) -> tuple[list[float], int, float]:
    """(what `compute` returns as a list, bytes that resident memory rose by, CPU seconds)."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before, started = resident("VmRSS"), time.process_time()
    result = compute()
    return result.flatten().tolist(), resident("VmHWM") - before, time.process_time() - started


def ours(model: str, tokens: list[list[int]], chunk: int) -> tuple[list[float], int, float]:
    """The policy's own log-prob pass over all rows at once."""
    import torch

    from aligner.algorithms.sft import TrainSFT
    from aligner.models import create
    from aligner.models.config import ModelConfig
    from aligner.run.session import open_session
    from aligner.run.settings import RunConfig
    from aligner.types import LabeledBatch

    rows = torch.tensor(tokens)
    mask = torch.ones(rows.shape, dtype=torch.bool)
    mask[:, 0] = False
    batch = LabeledBatch(tokens=rows, lengths=torch.full((rows.shape[0],), rows.shape[1]), loss_mask=mask)
    with tempfile.TemporaryDirectory() as folder:
        settings = ModelConfig(path=model, micro_batch_size=len(tokens), logits_chunk_size=chunk)
        config = TrainSFT(run=RunConfig(directory=folder, num_threads=1), model=settings)
        with open_session(config, config.run, config.parallel, component="trainer") as session:
            architecture = create.read_architecture(settings, vocab_size=0)
            policy = create.create_policy(settings, architecture, config.parallel, session.topology, create.training(settings, None))
            return measured(lambda: policy.logprobs(batch)[:, 1:])


def full(model: str, tokens: list[list[int]]) -> tuple[list[float], int, float]:
    """transformers: logits of all tokens, log_softmax over them, and one number of each taken."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    rows = torch.tensor(tokens)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    @torch.no_grad()
    def compute():
        logits = network(rows, use_cache=False).logits
        return logits.log_softmax(-1)[:, :-1].gather(-1, rows[:, 1:, None])[..., 0]

    return measured(compute)


def child(spec_file: str, result_file: str) -> None:
    """One measurement, in a process of its own."""
    spec = json.loads(Path(spec_file).read_text())
    chunk = spec.pop("chunk")
    logprobs, rise, seconds = ours(**spec, chunk=chunk) if chunk else full(**spec)
    Path(result_file).write_text(json.dumps({"logprobs": logprobs, "bytes": rise, "cpu_seconds": seconds}))


def run_child(spec: dict, folder: Path) -> dict:
    """Raises RuntimeError with its last lines where it fails."""
    (folder / "spec.json").write_text(json.dumps(spec))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
    }
    command = [sys.executable, __file__, "--child", str(folder / "spec.json"), str(folder / "result.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).strip().splitlines()[-15:]))
    return json.loads((folder / "result.json").read_text())


def compare(vocab_size: int, chosen: argparse.Namespace, folder: Path) -> list[dict]:
    """Measure one vocabulary; prints its lines. Raises Mismatch where the log-probs differ."""
    size, model = size_of(vocab_size), folder / str(vocab_size)
    write_model(size, model, positions=chosen.length, seed=0)
    spec = {"model": str(model), "tokens": random_prompts(size, count=chosen.rows, length=chosen.length, seed=1)}
    reference = run_child(spec | {"chunk": 0}, folder)
    logits = chosen.rows * chosen.length * vocab_size * 4
    print(f"\nvocabulary {vocab_size:,}, {chosen.rows} x {chosen.length} tokens: the logits are {logits / 2**20:,.0f} MiB in float32")
    print(f"  {'':<24}{'peak, MiB':>11}{'of full':>9}{'CPU, s':>9}")
    lines = []
    for chunk in (0, *chosen.chunks):
        result = reference if chunk == 0 else run_child(spec | {"chunk": chunk}, folder)
        error = max(abs(a - b) for a, b in zip(result["logprobs"], reference["logprobs"], strict=True))
        if not error <= TOLERANCE:
            raise Mismatch(f"log-probs in chunks of {chunk} are {error} from those of the full logits")
        name = f"chunks of {chunk} tokens" if chunk else "full logits"
        share = result["bytes"] / reference["bytes"]
        print(f"  {name:<24}{result['bytes'] / 2**20:>11,.0f}{share:>9.1%}{result['cpu_seconds']:>9.1f}", flush=True)
        lines.append({"vocab_size": vocab_size, "chunk": chunk, "bytes": result["bytes"], "cpu_seconds": result["cpu_seconds"]})
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 1024, 4096], help="model.logits_chunk_size to measure")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="where the figures are written, as JSON")
    chosen = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            lines = [line for vocab_size in VOCABULARIES for line in compare(vocab_size, chosen, Path(folder))]
    except (Mismatch, RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen.output.mkdir(parents=True, exist_ok=True)
    path = chosen.output / time.strftime("logprob_memory-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(lines, indent=2) + "\n")
    print(f"\nfigures: {path}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        sys.exit(main())
