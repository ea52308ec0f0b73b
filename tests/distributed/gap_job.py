"""Two ranks: `aligner gap`'s comparison under every layout, of the engine as it is and (CHANGED) with one norm of its second layer off.

usage: gap_job.py FOLDER    (with `tokenizer` and `prompts.jsonl`)
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from aligner.parallel import launch

LAYOUTS = {
    "sequence": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "tensor, engine whole": ["parallel.tp=2", "parallel.sequence_parallel=true", "rollout.tp=1"],
    "pipeline": ["parallel.pp=2"],
    "context": ["parallel.cp=2", "model.micro_batch_tokens=64", "model.packing=true"],
    "replicas, engine split": ["rollout.tp=2"],
    "experts": [
        *("parallel.ep=2", "model.architecture.family=mixtral", "model.architecture.num_experts=4"),
        *("model.architecture.experts_per_token=2", "model.architecture.expert_ffn_hidden_size=64"),
        "model.architecture.tied_embeddings=false",
    ],
}
CHANGED = ("sequence", "pipeline", "context")


def settings(folder: Path) -> list[str]:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "ffn_hidden_size": 64}
    return [
        f"model.tokenizer={folder / 'tokenizer'}",
        f"data.train={folder / 'prompts.jsonl'}",
        *(f"model.architecture.{name}={size}" for name, size in (sizes | {"max_position_embeddings": 32}).items()),
        *("model.make_vocab_divisible_by=2", "model.micro_batch_size=2", "rollout.kernels=torch", "data.max_prompt_length=8"),
        *("rollout.sampling.temperature=0.8", "rollout.prefill_chunk_tokens=6"),
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    launch.initialize("gloo", timeout_seconds=60, fingerprint="gap", collective_timeout_seconds=60)
    from aligner.algorithms.grpo import TrainGRPO
    from aligner.commands import gap
    from aligner.commands.parts import GapOptions
    from aligner.parallel.mcore import parallel_state
    from aligner.parallel.topology import initialize
    from aligner.settings.compose import compose

    create = gap.create_engine

    def create_changed(*arguments, **options):
        engine = create(*arguments, **options)
        decoder = engine.engine.decoder
        first, second = decoder.weights.layers
        norm = replace(second.mlp_norm, weight=second.mlp_norm.weight * 1.01)
        decoder.weights = replace(decoder.weights, layers=(first, replace(second, mlp_norm=norm)))
        return engine

    for name, layout in LAYOUTS.items():
        config = compose(TrainGRPO, "grpo", [*settings(folder), *layout])
        topology = initialize(config.parallel, seed=3)
        for maker in (create, create_changed) if name in CHANGED else (create,):
            gap.create_engine = maker
            report = gap.compare(config, topology, GapOptions(num_prompts=5, num_tokens=6, num_traced=3))
            found = report.first
            place = "nothing" if found is None else f"{found[1].place.describe(2)} ({found[0]})"
            seen = len({one.place for ones in report.paths.values() for one in ones})
            if dist.get_rank() == 0:
                print(f"{name}: {place}; {seen} places; gap {report.statistics['rollout/logprob_gap_max'] < 1e-4}", flush=True)
        parallel_state.destroy_model_parallel()
    launch.shutdown()


if __name__ == "__main__":
    main()
