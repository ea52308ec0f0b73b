"""Hugging Face directories -> Megatron-Core -> Hugging Face: the logits of `transformers`, in both directions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from aligner.cluster.outcomes import exit_code_of
from aligner.errors import CheckpointError, ConfigError, ModelFilesError
from aligner.models import weights
from aligner.models.config import ModelConfig
from aligner.models.families import architecture_from_hf
from aligner.models.modules import fusions
from aligner.models.modules.build import build_model
from aligner.models.modules.scalar_head import ScalarHead
from aligner.models.weights import load_hf, save_hf
from aligner.parallel import platform
from aligner.parallel.logprobs import shaped
from aligner.parallel.topology import ParallelConfig
from aligner.rollout.config import RolloutConfig
from aligner.rollout.create import create_engine
from aligner.types import Prompt, SamplingConfig

pytestmark = pytest.mark.usefixtures("topology")

MODELS = ["llama", "llama_tied_llama3_rope", "llama_multi_head", "qwen2", "qwen2_tied", "qwen3", "qwen3_tied"]
MODELS += ["mixtral", "qwen3_moe", "qwen3_moe_unnormalized", "nemotron", "gpt2", "gpt2_scaled"]
MODELS += ["llama_biases_llama3_rope", "llama_linear_rope", "llama_yarn", "qwen3_yarn", "qwen2_dynamic_rope"]
MODELS += ["mistral", "mistral_no_window", "qwen2_windows", "qwen3_layer_types", "mixtral_window", "qwen3_moe_window"]
MODELS += ["phi3", "phi3_window", "phi3_longrope", "phi3_longrope_short", "gpt_neox", "gpt_neox_sequential", "opt", "opt_untied"]
MODELS += ["gemma2", "gemma2_plain", "gemma3_text", "olmo2", "olmo2_tied", "glm4", "glm4_tied", "cohere", "cohere_untied"]
MODELS += ["opt_projected", "opt_projected_untied", "ministral", "cohere_plus", "cohere2", "cohere2_untied"]
MODELS += ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_plain", "glm4_moe", "glm4_moe_plain", "olmo3", "olmo3_tied"]
MODELS += ["qwen2_moe", "qwen2_moe_normalized", "qwen2_moe_windows", "qwen3_moe_dense_layers"]
MODELS += ["gpt_oss", "gpt_oss_tied", "llama4_text", "llama4_text_tied"]
MODELS += ["qwen3_next", "qwen3_next_tied", "qwen3_5_text", "qwen3_5_moe_text"]
TOLERANCE = 5e-5  # of logits of order one
TOLERANCES = {
    "qwen3_next": 1e-4,
    "qwen3_5_text": 1e-4,
}  # transformers' own two forms of the delta rule, by chunk and by token, are 3e-5 apart


@torch.no_grad()
def our_logits(policy, tokens: torch.Tensor) -> torch.Tensor:
    """[B, S, V] in one piece, on the host, from the module's hidden states and the vocabulary rows that the log-probs use."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    (chunk,) = policy.chunks
    hidden = chunk.eval()(tokens.to(platform.device()), positions.to(platform.device()), None)
    weight, start = chunk.vocabulary_weight()
    assert start == 0
    scale, softcap = chunk.architecture.logits_scale, chunk.architecture.logits_softcap
    return shaped((hidden @ weight.t()).transpose(0, 1), scale=scale, softcap=softcap).cpu()


@torch.no_grad()
def their_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model(tokens).logits


def random_tokens(vocab: int, width: int) -> torch.Tensor:
    return torch.randint(0, vocab, (3, width), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_both_ways(name, hf_directory, load_policy, tmp_path):
    source = hf_directory(name)
    tokens, tolerance = random_tokens(61, 100), TOLERANCES.get(name, TOLERANCE)
    policy = load_policy(source)
    expected = their_logits(source, tokens)
    assert expected.std() > 0.5  # the comparison is of something
    assert (our_logits(policy, tokens) - expected).abs().max() < tolerance
    save_hf(policy.chunks, tmp_path / "export", writer=True)
    read, exported = load_file(source / "model.safetensors"), dict(policy.export_weights())
    assert exported.keys() == read.keys() and all(torch.equal(exported[key].cpu(), tensor) for key, tensor in read.items())
    assert len({path.stat().st_mode for path in (tmp_path / "export").iterdir()}) == 1  # whoever may read the config may read the weights
    assert (their_logits(tmp_path / "export", tokens) - expected).abs().max() < tolerance
    assert (our_logits(load_policy(tmp_path / "export"), tokens) - expected).abs().max() < tolerance


def test_longrope_is_chosen_by_the_context_of_the_run(changed, load_policy, capsys, monkeypatch):
    """What transformers makes of 60 tokens depends on the tokens behind them: 100 are beyond the original length. Here it depends on the
    longest sequence that the run allows."""
    monkeypatch.setattr(fusions, "_said", set())
    directory, tokens = changed("phi3_longrope", original_max_position_embeddings=60), random_tokens(61, 100)
    alone, beside = their_logits(directory, tokens[:, :60]), their_logits(directory, tokens)[:, :60]
    assert (alone - beside).abs().max() > 100 * TOLERANCE
    short, long = load_policy(directory, config={"seq_length": 60}), load_policy(directory)
    assert (our_logits(short, tokens[:, :60]) - alone).abs().max() < TOLERANCE
    assert (our_logits(long, tokens[:, :60]) - beside).abs().max() < TOLERANCE
    said = [line for line in capsys.readouterr().out.splitlines() if "LongRoPE" in line]
    assert said == [
        "rotary embedding: LongRoPE's short factors throughout (model.seq_length allows 60 tokens, within the 60 before)",
        "rotary embedding: LongRoPE's long factors throughout (model.seq_length allows 128 tokens, beyond the 60 before)",
    ]


@pytest.mark.shared
def test_stories260k_continues_as_documented(shared_data, load_policy):
    """The greedy continuation that the data's own description gives."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260k")
    text = "Once upon a time, there was a little girl named Lily."
    expected = " She loved to play outside in the park. One day, she saw a big, red ball."
    policy = load_policy(shared_data / "stories260k")
    sampling = SamplingConfig(temperature=0.0, max_response_length=40)
    engine = create_engine(policy, RolloutConfig(), eos_id=tokenizer.eos_token_id)
    prompt = Prompt(id=0, tokens=tuple(tokenizer(text)["input_ids"]), source="test:1")
    (rollout,) = next(engine.generate([prompt], [0], sampling))
    assert tokenizer.decode(list(rollout.tokens), skip_special_tokens=True).startswith(text + expected)


def test_several_files_with_an_index(hf_directory, load_policy, tmp_path, monkeypatch):
    policy = load_policy(hf_directory("qwen2"))
    monkeypatch.setattr(weights, "MAX_FILE_BYTES", 10_000)
    weights.save_hf(policy.chunks, tmp_path, writer=True)
    index = json.loads((tmp_path / weights.INDEX_FILE).read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    tensors = {name: tensor for file in files for name, tensor in load_file(tmp_path / file).items()}
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    # A file exceeds the limit only where one tensor alone does.
    assert all(sum(t.numel() * 4 for t in load_file(tmp_path / f).values()) <= 10_000 or len(load_file(tmp_path / f)) == 1 for f in files)
    tokens = random_tokens(61, 20)
    assert torch.equal(our_logits(load_policy(tmp_path), tokens), our_logits(policy, tokens))
    assert (their_logits(tmp_path, tokens) - our_logits(policy, tokens)).abs().max() < TOLERANCE


def test_a_second_export_replaces_the_first(hf_directory, load_policy, tmp_path, monkeypatch):
    """Fewer, other files than before: nothing of the old export may be read again."""
    with monkeypatch.context() as patch:
        patch.setattr(weights, "MAX_FILE_BYTES", 10_000)
        weights.save_hf(load_policy(hf_directory("llama")).chunks, tmp_path, writer=True)
    policy = load_policy(hf_directory("qwen3_tied"))
    weights.save_hf(policy.chunks, tmp_path, writer=True)
    tokens = random_tokens(61, 20)
    assert torch.equal(our_logits(load_policy(tmp_path), tokens), our_logits(policy, tokens))
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == [weights.SINGLE_FILE]


# What is wrong with a directory: its tensors.


WRONG_SHAPES = {
    "model.layers.0.self_attn.q_proj.weight": (30, 32),
    "model.layers.1.mlp.down_proj.weight": (32, 50),
    "model.norm.weight": (1,),  # would be broadcast
    "model.embed_tokens.weight": (60, 32),  # would be filled up as vocabulary padding
    "lm_head.weight": (200, 32),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_wrong_shape_is_named(name, changed, load_policy):
    broken = changed("llama", lambda tensors: tensors.update({name: torch.zeros(WRONG_SHAPES[name])}))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_policy(broken)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "cut short, or still being copied"),
        (lambda file: file.write_bytes(b""), r"\(0 bytes\) does not begin like a safetensors file"),
        (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "is a Git LFS pointer"),
        (lambda file: file.unlink(), "only safetensors weights are read"),
    ],
)
def test_a_damaged_file_is_refused_by_name(damage, message, changed, load_policy):
    directory = changed("llama")
    damage(directory / "model.safetensors")
    with pytest.raises(ModelFilesError, match=f"{directory}.*{message}") as caught:
        load_policy(directory)
    assert exit_code_of(caught.value) == 2


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "a JSON list"), ("version https://git-lfs.git", "Git LFS pointer")]
)
def test_a_damaged_config_is_refused_by_name(text, message, changed, load_policy):
    directory = changed("llama")
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelFilesError, match=f"{directory / 'config.json'} .*{message}"):
        load_policy(directory)


def test_an_export_to_a_full_disk_names_rank_and_file(hf_directory, load_policy, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    policy = load_policy(hf_directory("llama"))
    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(CheckpointError, match=rf"rank 0: {tmp_path}/part-0.safetensors: .*No space left on device.* free there"):
        weights.save_hf(policy.chunks, tmp_path, writer=True)


def test_score_head_of_the_wrong_width(hf_directory, topology, tmp_path):
    architecture = architecture_from_hf(json.loads((hf_directory("llama_multi_head") / "config.json").read_text()))
    (one,), (three,) = (
        build_model(architecture, ModelConfig(), ParallelConfig(), load=False, head=ScalarHead(outputs=tuple("abc"[:n]))) for n in (1, 3)
    )
    save_hf([one], tmp_path, writer=True)
    with pytest.raises(CheckpointError, match="score_head.weight"):
        load_hf([three], tmp_path)
    (again,) = build_model(architecture, ModelConfig(), ParallelConfig(), load=False, head=ScalarHead())
    torch.nn.init.zeros_(again.score_head.weight)
    load_hf([again], tmp_path)
    assert torch.equal(again.score_head.weight, one.score_head.weight)


def test_paths_that_hold_no_model(load_policy, tmp_path):
    with pytest.raises(ConfigError, match="model.path=.*no such directory"):
        load_policy(tmp_path / "absent")
    with pytest.raises(ConfigError, match="neither a Hugging Face model"):
        load_policy(tmp_path)


def test_sequence_longer_than_the_model_was_made_for(hf_directory, load_policy):
    with pytest.raises(ConfigError, match="model.seq_length=129: the model was made for at most 128"):
        load_policy(hf_directory("llama"), config={"seq_length": 129})
    assert load_policy(hf_directory("llama"), config={"seq_length": 50}).chunks[0].max_sequence_length == 50
