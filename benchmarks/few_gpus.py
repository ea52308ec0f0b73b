"""The price in time of what saves memory (`docs/few_gpus.md`): training steps of adapters on dense and packed weights, and of all weights
with every optimizer, on one CPU thread, as ratios to the first of each group.

    python benchmarks/few_gpus.py [--layers 4] [--hidden 512] [--tokens 1024] [--rounds 5]

A round has a step of each, one after the other; the median of a variant's rounds counts, since other programs share the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from tempfile import gettempdir
from typing import Any

ROW = 128  # tokens


def groups() -> dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]]:
    """Variants by name: fields of the model's and of the optimizer's config."""
    from aligner.models.config import LoraConfig, Quantization
    from aligner.models.training.optimizer import OptimizerKind

    lora = LoraConfig(rank=16)
    packed = {kind.value: ({"lora": lora, "quantization": kind}, {}) for kind in (Quantization.none, Quantization.nf4, Quantization.int8)}
    kinds: dict[str, dict[str, Any]] = {kind.value: {"kind": kind} for kind in OptimizerKind}
    kinds["muon"]["distributed"] = False
    disk = {"cpu_offload": True, "nvme_path": gettempdir()}
    optimizers = {"adam": kinds["adam"], "cpu_offload": {"cpu_offload": True}, "nvme_path": disk}
    optimizers |= {"adam8bit": kinds["adam8bit"], "muon": kinds["muon"]}
    return {"adapters": packed, "all weights": {name: ({}, fields) for name, fields in optimizers.items()}}


def medians(models: dict[str, Any], batch: Any, rounds: int) -> dict[str, float]:
    """CPU seconds of a step; the first round, in which state is made, does not count."""
    from aligner.losses.sft import sft_loss

    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            started = time.process_time()
            model.train_step(batch, sft_loss)
            found[name].append(time.process_time() - started)
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("hidden", 512), ("tokens", 1024), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    import torch

    from aligner.models.config import Architecture, Dtype, Family, ModelConfig
    from aligner.models.create import create_policy
    from aligner.models.training.optimizer import OptimizerConfig
    from aligner.models.training.trainable import Training
    from aligner.parallel import launch
    from aligner.parallel.topology import ParallelConfig, initialize
    from aligner.types import LabeledBatch

    torch.set_num_threads(1)
    launch.initialize("gloo", timeout_seconds=60, fingerprint="benchmark", environ={"ALIGNER_LAUNCH": "single"})
    topology, heads = initialize(ParallelConfig(), seed=1), options.hidden // 64
    sizes = {"num_layers": options.layers, "hidden_size": options.hidden, "ffn_hidden_size": 4 * options.hidden, "vocab_size": 1024}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": ROW}
    rows = options.tokens // ROW
    tokens = torch.randint(1, 1024, (rows, ROW), generator=torch.Generator().manual_seed(1))
    batch = LabeledBatch(tokens=tokens, lengths=torch.full((rows,), ROW), loss_mask=torch.arange(ROW).expand(rows, ROW) > 0)
    result: dict[str, Any] = {"torch": torch.__version__, "tokens": rows * ROW}
    for group, variants in groups().items():
        models = {
            name: create_policy(
                ModelConfig(dtype=Dtype.float32, **model),
                Architecture(family=Family.llama, **sizes),
                ParallelConfig(),
                topology,
                Training(optimizer=OptimizerConfig(warmup_steps=0, **optimizer), micro_batch_size=rows, total_steps=100),
            )
            for name, (model, optimizer) in variants.items()
        }
        seconds = medians(models, batch, options.rounds)
        first = next(iter(seconds.values()))
        result[group] = {name: {"seconds": round(one, 3), "ratio": round(one / first, 2)} for name, one in seconds.items()}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
