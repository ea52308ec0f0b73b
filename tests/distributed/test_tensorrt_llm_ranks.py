"""The TensorRT-LLM engine where several ranks share a replica: over gloo, with a process that runs the stand-in."""

from __future__ import annotations

from pathlib import Path

JOB = Path(__file__).with_name("tensorrt_llm_job.py")


def test_two_ranks_share_a_replica(run_distributed, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=61, max_position_embeddings=64, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    run_distributed(JOB, 2, tmp_path / "model", tmp_path)
