"""Files in few bits: the numbers that transformers makes of them, and exports that are not quantised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_models import randomize
from safetensors.torch import load_file, save_file

from aligner.commands.preflight.models import check_model
from aligner.errors import CheckpointError, ModelFilesError
from aligner.models.checkpoint.hf_weights import fp8, mxfp4
from aligner.models.config import Implementation, LoraConfig, LoraTarget, ModelConfig, Quantization
from aligner.models.modules.linear import linear_weight
from aligner.models.weights import save_hf
from aligner.run.settings import UsedModel

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 61, "max_position_embeddings": 128, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def bytes_of(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(len(shape) + high))


def test_mxfp4_is_what_transformers_makes_of_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = bytes_of(3, 40, 5, 16), bytes_of(3, 40, 5)  # every byte, every exponent
    expected = convert_moe_packed_tensors(blocks, scales)
    found = torch.stack([mxfp4(*part) for part in zip(blocks, scales, strict=True)])
    assert found.dtype == expected.dtype and found.isfinite().any() and expected.unique().numel() > 1000
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.fixture
def quantised(tmp_path) -> Path:
    """A directory as gpt-oss's published ones are: experts in MXFP4, the rest in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = tmp_path / "published"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES)).to(torch.bfloat16)
    randomize(model, seed=1)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = bytes_of(experts, outputs, inputs // 32, 16)
        tensors[f"{name}_scales"] = bytes_of(experts, outputs, inputs // 32, low=121, high=126)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=MXFP4)
    return directory


def change_config(directory: Path, **changes: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("implementation", [Implementation.megatron, Implementation.transformers])
def test_a_published_model_is_read_and_written_unquantised(implementation, quantised, topology, load_policy, tmp_path):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    theirs = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True))
    policy = load_policy(quantised, config={"implementation": implementation})
    exported = dict(policy.export_weights())
    expected = {name: tensor.float() for name, tensor in theirs.state_dict().items()}
    assert exported.keys() == expected.keys() and all(torch.equal(exported[name].cpu(), tensor) for name, tensor in expected.items())
    save_hf(policy.chunks, tmp_path / "export", writer=True)
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    tokens = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(3))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs.float()(tokens).logits, rtol=0, atol=1e-4)


def test_a_pair_that_is_not_whole_is_refused(quantised, topology, load_policy):
    tensors = load_file(quantised / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    save_file({key: one for key, one in tensors.items() if key != name}, quantised / "model.safetensors")
    with pytest.raises(ModelFilesError, match=r"down_proj_scales is U8 \(1 such\): not read"):
        load_policy(quantised)
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, quantised / "model.safetensors")
    with pytest.raises(ModelFilesError, match="down_proj_blocks is U8"):
        load_policy(quantised)
    stacks = {key: one[:-1].contiguous() for key, one in tensors.items() if "down_proj_" in key}
    save_file(tensors | stacks, quantised / "model.safetensors")
    with pytest.raises(
        ModelFilesError, match=r"num_local_experts=3: .*down_proj would be \(3, 32, 64\), in model.safetensors it is \(2, 32, 64\)"
    ):
        load_policy(quantised)


def test_the_preflight_knows_the_pairs(quantised):
    model = UsedModel(component="trainer", key="model", config=ModelConfig(path=str(quantised)), is_scalar=False)
    assert "tensors" in check_model(model)[0]
    tensors = load_file(quantised / "model.safetensors")
    pair = ("model.layers.0.mlp.experts.down_proj_blocks", "model.layers.0.mlp.experts.down_proj_scales")
    save_file({name: tensor for name, tensor in tensors.items() if name not in pair}, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensor named .*0.mlp.experts.down_proj, and 0 more"):
        check_model(model)
    save_file(tensors | {pair[0].removesuffix("_blocks"): torch.zeros(2)}, quantised / "model.safetensors")
    with pytest.raises(CheckpointError, match="down_proj_blocks and .*down_proj are two of one tensor; allowed: one of them"):
        check_model(model)


# FP8 by blocks.


def fp8_of(*shape: int) -> torch.Tensor:
    """Every number of the format; two bytes of 256 are none."""
    numbers = bytes_of(*shape)
    return torch.where(numbers & 0x7F == 0x7F, 0, numbers).view(torch.float8_e4m3fn)


def scales_of(rows: int, columns: int) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.001 + 1e-4


def test_fp8_is_what_transformers_makes_of_it():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    numbers, scales = fp8_of(48, 80), scales_of(3, 5)
    for dtype in (torch.float32, torch.bfloat16):
        expected = Fp8Dequantize(None)._dequantize_one(numbers, scales, dtype)
        assert expected.unique().numel() > 500 and torch.equal(fp8(numbers, scales, (16, 16)).to(dtype), expected)


def test_fp8_in_blocks_that_are_not_whole():
    """3 rows in blocks of 2, 5 columns in blocks of 4: as DeepSeek-V3's 576 rows in blocks of 128."""
    found = fp8(torch.ones(3, 5).to(torch.float8_e4m3fn), torch.tensor([[2.0, 3.0], [5.0, 7.0]]), (2, 4))
    assert found.tolist() == [[2.0] * 4 + [3.0]] * 2 + [[5.0] * 4 + [7.0]]


@pytest.fixture
def in_fp8(tmp_path) -> Path:
    """A directory as those of DeepSeek-V3 and Qwen3 in FP8 are; the blocks are smaller."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory, sizes = tmp_path / "fp8", SIZES | {"head_dim": 16, "intermediate_size": 48}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes)).to(torch.bfloat16)
    randomize(model, seed=1)
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        tensors |= {name: fp8_of(rows, columns), f"{name}_scale_inv": scales_of(rows // 16, columns // 16)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    own = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic", "fmt": "e4m3"}
    change_config(directory, quantization_config=own)
    return directory


@pytest.mark.parametrize("implementation", [Implementation.megatron, Implementation.transformers])
def test_a_model_in_fp8_is_read_and_written_unquantised(implementation, in_fp8, topology, load_policy):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    own = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    theirs = AutoModelForCausalLM.from_pretrained(in_fp8, dtype=torch.float32, quantization_config=own)
    exported = dict(load_policy(in_fp8, config={"implementation": implementation}).export_weights())
    expected = theirs.state_dict()
    assert exported.keys() == expected.keys() and all(torch.equal(exported[name].cpu(), tensor) for name, tensor in expected.items())


def test_scales_that_do_not_fit_are_refused(in_fp8, topology, load_policy):
    tensors = load_file(in_fp8 / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {f"{name}_scale_inv": torch.ones(3, 3)}, in_fp8 / "model.safetensors")
    with pytest.raises(ModelFilesError, match=rf"{name} has \(3, 3\) scales for \(48, 64\) in blocks of \(16, 16\)"):
        load_policy(in_fp8)
    save_file({key: one for key, one in tensors.items() if key != f"{name}_scale_inv"}, in_fp8 / "model.safetensors")
    with pytest.raises(ModelFilesError, match=rf"{name} is F8_E4M3 \(1 such\): not read"):
        load_policy(in_fp8)


# In four bits, as bitsandbytes saves them.


@pytest.fixture(params=[False, True], ids=["plain", "nested"])
def in_four_bits(request, tmp_path) -> Path:
    """What transformers saves of a model that bitsandbytes has packed; `nested` with double quantization."""
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    sizes = SIZES | {"head_dim": 16, "intermediate_size": 128}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).to(torch.bfloat16)
    randomize(model, seed=1)
    model.save_pretrained(tmp_path / "whole")
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=request.param)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16, quantization_config=how, device_map="cpu")
    packed.save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.parametrize("implementation", [Implementation.megatron, Implementation.transformers])
def test_a_model_in_four_bits_is_read_exactly(implementation, in_four_bits, topology, load_policy, tmp_path):
    """And packed again without double quantization it has the same numbers, though the file has it."""
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(in_four_bits, dtype=torch.bfloat16, device_map="cpu")
    states = {name: getattr(one, "quant_state", None) for name, one in theirs.named_parameters()}
    expected = {
        name: one.detach() if states[name] is None else dequantize_4bit(one.detach(), states[name])
        for name, one in theirs.named_parameters()
    }
    assert sum(state is not None for state in states.values()) == 14
    own = {"implementation": implementation}
    policy = load_policy(in_four_bits, config=own)
    exported = {name: one.clone() for name, one in policy.export_weights()}
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name].bfloat16(), one) for name, one in expected.items())
    save_hf(policy.chunks, tmp_path / "export", writer=True)
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    lora = LoraConfig(rank=2, targets=[LoraTarget.qkv])
    again = dict(load_policy(in_four_bits, config=own | {"quantization": Quantization.nf4, "lora": lora}).export_weights())
    assert all(torch.equal(again[name], one) for name, one in exported.items())


@pytest.mark.parametrize("in_four_bits", [True], indirect=True, ids=["nested"])
def test_four_bits_without_their_parts_are_refused(in_four_bits, topology, load_policy):
    file, name = in_four_bits / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    state = f"{name}.quant_state.bitsandbytes__nf4"
    for part, message in (
        (state, rf"{name} is U8 \(2 such\): not read"),
        (f"{name}.nested_absmax", rf"no tensor named {name}\.nested_absmax, which the state of {name} expects"),
    ):
        save_file({key: one for key, one in tensors.items() if key != part}, file)
        for implementation in (Implementation.megatron, Implementation.transformers):
            with pytest.raises(ModelFilesError, match=message):
                load_policy(in_four_bits, config={"implementation": implementation})
    save_file(tensors | {f"{name}.absmax": tensors[f"{name}.absmax"][1:].contiguous()}, file)
    with pytest.raises(ModelFilesError, match=rf"{name} has 127 scales for 8192 numbers in blocks of 64"):
        load_policy(in_four_bits)
    save_file(tensors | {name: tensors[name][:-32].contiguous(), f"{name}.absmax": tensors[f"{name}.absmax"][1:].contiguous()}, file)
    with pytest.raises(ModelFilesError, match=rf"{name} .*is invalid for input of size 8128"):
        load_policy(in_four_bits)
    whole = json.loads(bytes(tensors[state].tolist()))
    for wrong in ({"shape": [0]}, {"shape": None}, {"blocksize": "64"}, {"nested_blocksize": -1}, {"nested_offset": None}):
        save_file(tensors | {state: torch.tensor(list(json.dumps(whole | wrong).encode()), dtype=torch.uint8)}, file)
        with pytest.raises(ModelFilesError, match=rf"the state of {name} is damaged: shape, blocksize or nested ones"):
            load_policy(in_four_bits)


@pytest.fixture
def in_eight_bits(tmp_path) -> Path:
    """What transformers saves of a model that bitsandbytes has packed in INT8."""
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES | {"head_dim": 16, "intermediate_size": 48}))
    randomize(model, seed=1)
    model.save_pretrained(tmp_path / "whole")
    how = BitsAndBytesConfig(load_in_8bit=True)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=how, device_map="cpu")
    packed.save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        (Implementation.megatron, "decoder.layers.1.mlp.linear_fc2.weight"),
        (Implementation.transformers, "hf.model.layers.1.mlp.down_proj.weight"),
    ],
)
def test_a_model_in_eight_bits_is_read_exactly(implementation, name, in_eight_bits, topology, load_policy):
    """And packed again it has the very codes and scales of the file."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(in_eight_bits, dtype=torch.float32, device_map="cpu").dequantize()
    own = {"implementation": implementation}
    policy = load_policy(in_eight_bits, config=own)
    exported = {name: one.clone() for name, one in policy.export_weights()}
    expected = dict(theirs.named_parameters())
    assert exported.keys() == expected.keys() and all(torch.equal(exported[name], one) for name, one in expected.items())
    lora = LoraConfig(rank=2, targets=[LoraTarget.qkv])
    again = load_policy(in_eight_bits, config=own | {"quantization": Quantization.int8, "lora": lora})
    codes, scales = linear_weight(again.module.get_parameter(name)).storage
    stored, layer = load_file(in_eight_bits / "model.safetensors"), "model.layers.1.mlp.down_proj"
    assert torch.equal(codes, stored[f"{layer}.weight"]) and codes.unique().numel() > 100
    torch.testing.assert_close(scales[:, 0] * 127, stored[f"{layer}.SCB"], rtol=1e-6, atol=0)


def test_eight_bits_without_their_scales_are_refused(in_eight_bits, topology, load_policy):
    file, layer = in_eight_bits / "model.safetensors", "model.layers.0.mlp.up_proj"
    tensors = load_file(file)
    for wrong in ({}, {f"{layer}.SCB": tensors[f"{layer}.SCB"][1:].contiguous()}):
        save_file({name: one for name, one in tensors.items() if name != f"{layer}.SCB"} | wrong, file)
        with pytest.raises(ModelFilesError, match=rf"{layer}\.weight is I8 \(2 such\): not read"):
            load_policy(in_eight_bits)
    save_file(tensors | {f"{layer}.weight_format": torch.tensor(2, dtype=torch.uint8)}, file)
    with pytest.raises(ModelFilesError, match=rf"{layer}\.weight_format is 2; allowed: 0, numbers in rows"):
        load_policy(in_eight_bits)
