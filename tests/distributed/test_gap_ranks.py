"""`aligner gap` sees the same under tensor, sequence, pipeline, context and expert parallelism, and an engine split otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

from ranks import joined, laid_out
from training_jobs import SIZES, write_task

from aligner.algorithms.grpo import TrainGRPO
from aligner.commands import gap
from aligner.commands.parts import GapOptions
from aligner.settings.compose import compose

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


# In each of two layers: norms, qkv, queries, keys, attention, projection, two residuals, MLP and its inner activations (or its router).
PLACES = 2 * 11 + 3


def settings(folder: Path) -> list[str]:
    return [
        *(f"model.tokenizer={folder / 'tokenizer'}", f"data.train={folder / 'prompts.jsonl'}", *SIZES),
        *("model.make_vocab_divisible_by=2", "model.micro_batch_size=2", "rollout.kernels=torch", "data.max_prompt_length=8"),
        *("rollout.sampling.temperature=0.8", "rollout.prefill_chunk_tokens=6"),
    ]


def comparisons(folder: Path) -> list[tuple]:
    """`aligner gap` under every layout, of the engine as it is and (CHANGED) with one norm of its second layer off: layout, the first place
    that differs, how many are compared, and whether the log-probs agree."""
    found, create = [], gap.create_engine

    def create_changed(*arguments, **options):
        engine = create(*arguments, **options)
        decoder = engine.engine.decoder
        first, second = decoder.weights.layers
        norm = replace(second.mlp_norm, weight=second.mlp_norm.weight * 1.01)
        decoder.weights = replace(decoder.weights, layers=(first, replace(second, mlp_norm=norm)))
        return engine

    with joined():
        for name, layout in LAYOUTS.items():
            config = compose(TrainGRPO, "grpo", [*settings(folder), *layout])
            with laid_out({name: getattr(config.parallel, name) for name in config.parallel.__slots__}, seed=3) as topology:
                for maker in (create, create_changed) if name in CHANGED else (create,):
                    with mock.patch.object(gap, "create_engine", maker):
                        report = gap.compare(config, topology, GapOptions(num_prompts=5, num_tokens=6, num_traced=3))
                    place = "nothing" if report.first is None else f"{report.first[1].place.describe(2)} ({report.first[0]})"
                    seen = len({one.place for ones in report.paths.values() for one in ones})
                    found.append((name, place, seen, report.statistics["rollout/logprob_gap_max"] < 1e-4))
    return found


def test_every_layout(on_ranks, tmp_path: Path) -> None:
    write_task(tmp_path)
    found = on_ranks(comparisons, 2, tmp_path)[0]
    assert sorted(found) == sorted(
        [(name, "nothing", PLACES, True) for name in LAYOUTS] + [(name, "layer 1, mlp norm (prefill)", PLACES, False) for name in CHANGED]
    )
