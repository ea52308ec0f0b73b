"""Save a model as Megatron-LM does. Alone: `whole`, and `model.nemo` of the same. On four ranks: read `whole`, save `split` at TP2 and PP2.

usage: megatron_saver.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import megatron_files


def main(folder: Path) -> None:
    from aligner.parallel import launch, platform, topology
    from aligner.parallel.mcore import dist_checkpointing, ensure_metadata_has_dp_cp_group
    from aligner.parallel.topology import ParallelConfig

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    layout = ParallelConfig(tp=2, pp=2, etp=2) if ranks == 4 else ParallelConfig()
    environ = dict(os.environ) if ranks == 4 else {"ALIGNER_LAUNCH": "single"}
    launch.initialize(platform.backend(), timeout_seconds=60, fingerprint="saver", environ=environ)
    here = topology.initialize(layout, seed=1)
    args = megatron_files.arguments("mixtral")
    model = megatron_files.build(args, tp=layout.tp, pp=layout.pp, first=here.pp_rank == 0, last=here.pp_rank == layout.pp - 1)
    if ranks == 1:
        megatron_files.save(folder / "whole" / "iter_0000007", model, args)
        (folder / "whole" / "latest_checkpointed_iteration.txt").write_text("7")
        weights = megatron_files.save(folder / "model_weights", model, None, prefix="model.")
        config = megatron_files.nemo_config("mixtral", num_moe_experts=4, tokenizer=TOKENIZER)
        megatron_files.pack(folder / "model.nemo", weights, config, {name: text.encode() for name, text in TOKENIZER_FILES.items()})
    else:
        state = model.sharded_state_dict(metadata=ensure_metadata_has_dp_cp_group(None))
        model.load_state_dict(dist_checkpointing.load(state, str(folder / "whole" / "iter_0000007")), strict=False)
        megatron_files.save(folder / "split" / "iter_0000007", model, args)
    launch.shutdown()


TOKENIZER = {"library": "megatron", "type": "GPT2BPETokenizer", "vocab_file": "nemo:0a1b_vocab.json", "merge_file": "nemo:0a1b_merges.txt"}
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"
TOKENIZER_FILES = {
    "0a1b_vocab.json": "{" + ", ".join(f'"{text}": {number}' for number, text in enumerate([*LETTERS, "ab", "<|endoftext|>"])) + "}",
    "0a1b_merges.txt": "#version: 0.2\na b\n",
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
