"""The compiled CPU kernels give torch's numbers, for any number of rows and threads and any width of the processor's vectors, and are
compiled once; without a compiler generation goes on in torch."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from rollout_parts import decoder_of

from aligner.models.config import Activation, Normalization
from aligner.rollout.config import Kernels

pytestmark = [
    pytest.mark.usefixtures("topology"),
    pytest.mark.cpu,
    pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")), reason="no C compiler"),
]
SIZES = {  # heads of 12 and 40 dimensions are no whole vectors; 7 queries per group are no whole tiles
    "plain": {},
    "odd": {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 12, "ffn_hidden_size": 44, "linear_bias": True},
    "wide": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40, "rotary_fraction": 0.5, "qk_norm": True},
    "gelu": {"activation": Activation.gelu, "normalization": Normalization.layer_norm_1p, "qk_norm": True, "linear_bias": True},
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The kernels as they are, and for vectors of 16 numbers."""
    from aligner.rollout.builtin.native import FLAGS, Library, compiled, load

    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    found = {"own": load(), "16 lanes": Library(str(compiled(cache, (*FLAGS, "-O1", "-DLANES=16", "-Wno-psabi"))))}
    assert found["own"] is not None
    return found


@torch.no_grad()
def steps(decoder, batch: int, *, seed: int) -> torch.Tensor:
    """Logits of three decode steps after prompts of different lengths."""
    from aligner.rollout.builtin.attention import DecodeBatch, PrefillChunk

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 50, (batch,), generator=generator)
    width = 53 // decoder.page_size + 1
    cache = decoder.new_cache(batch * width)
    pages = torch.randperm(batch * width, generator=generator).view(batch, width).int()
    prompts = [torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths.tolist()]
    chunks = [PrefillChunk(tokens=p, start=0, pages=row, wants_logits=False) for p, row in zip(prompts, pages.tolist(), strict=True)]
    decoder.prefill(chunks, cache)
    found = []
    for step in range(3):
        tokens = torch.randint(3, 61, (batch,), generator=generator)
        found.append(decoder.decode(DecodeBatch(tokens=tokens, positions=lengths + step, pages=pages), cache))
    return torch.stack(found)


@pytest.mark.parametrize("name", SIZES)
def test_decode_steps_equal_torchs(name, make_model, libraries, monkeypatch):
    from aligner.rollout.builtin import native

    policy = make_model("policy", architecture=SIZES[name])
    expected = {batch: steps(decoder_of(policy, kernels=Kernels.torch), batch, seed=batch) for batch in (1, 5, 19, 70)}
    for library in libraries.values():
        monkeypatch.setattr(native, "load", lambda library=library: library)
        decoder = decoder_of(policy)
        assert decoder.fused_draw == library.draw
        for batch in (1, 19, 5, 70):  # three matrix products; room grows and stays
            torch.testing.assert_close(steps(decoder, batch, seed=batch), expected[batch], rtol=1e-5, atol=3e-5)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for batch in (5, 19):
            torch.testing.assert_close(steps(decoder_of(policy), batch, seed=batch), expected[batch], rtol=1e-5, atol=3e-5)
    finally:
        torch.set_num_threads(threads)


def test_weights_that_move_are_found_again(make_model):
    """As after `rollout.offload`: another address, other numbers."""
    policy = make_model("policy")
    decoder = decoder_of(policy)
    before = steps(decoder, 3, seed=1)
    for parameter in policy.module.parameters():
        parameter.data = parameter.data * 1.25
    after = steps(decoder, 3, seed=1)
    assert (before - after).abs().max() > 0.1
    torch.testing.assert_close(after, steps(decoder_of(policy, kernels=Kernels.torch), 3, seed=1), rtol=1e-5, atol=1e-4)


def test_bfloat16_stays_with_torch(make_model):
    from aligner.models.config import Dtype

    assert decoder_of(make_model("policy", config={"dtype": Dtype.bfloat16})).fused_draw is None


@pytest.mark.parametrize("vocabulary", [1, 7, 61, 128, 3000])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_draws_equal_torchs(vocabulary, temperature, libraries):
    """Expected: the first token at which the cumulative probability in float64 passes the uniform number."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(200, vocabulary, generator=generator) * 4
    logits[::3, : vocabulary // 2] = -torch.inf
    uniforms = torch.rand(200, dtype=torch.float64, generator=generator)
    uniforms[0], uniforms[1] = 0.0, 1 - 2.0**-53
    z = logits.double() / (temperature or 1.0)
    expected = (z.softmax(-1).cumsum(-1) > uniforms[:, None]).int().argmax(-1) if temperature else z.argmax(-1)
    for library in libraries.values():
        tokens, logprobs, raw = library.draw(logits, uniforms, temperature, raw=True)
        assert (tokens != expected).sum() <= 1 and (tokens != expected).nonzero().tolist() in ([], [[1]])  # the last one is at the edge
        index = tokens[:, None]
        torch.testing.assert_close(logprobs, z.log_softmax(-1).gather(1, index)[:, 0].float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(raw, logits.double().log_softmax(-1).gather(1, index)[:, 0].float(), rtol=1e-5, atol=1e-5)
        assert torch.isfinite(logprobs).all()
        assert library.draw(logits, uniforms, temperature)[2] is None


def test_nan_shows(libraries):
    logits = torch.zeros(3, 20)
    logits[1, 4] = torch.nan
    for library in libraries.values():
        _, logprobs, _ = library.draw(logits, torch.full((3,), 0.5, dtype=torch.float64), 1.0)
        assert logprobs.isnan().tolist() == [False, True, False]
    with pytest.raises(ValueError, match="uniforms torch.float32"):
        libraries["own"].draw(logits, torch.zeros(3), 1.0)


def test_compiled_once(tmp_path, monkeypatch):
    from aligner.rollout.builtin import native as library

    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    calls = []
    monkeypatch.setattr(
        library.subprocess, "run", lambda command, run=library.subprocess.run, **o: calls.append(command) or run(command, **o)
    )
    quickly = (*library.FLAGS, "-O0")
    first = library.compiled(environment, quickly)
    assert library.compiled(environment, quickly) == first and len(calls) == 1
    assert [path.name for path in (tmp_path / "aligner").iterdir()] == [first.name]  # nothing half done is left
    with pytest.raises(library.BuildError, match="failed: .*no-such-flag"):
        library.compiled(environment, (*library.FLAGS, "-fno-such-flag"))
    assert [path.name for path in (tmp_path / "aligner").iterdir()] == [first.name]


def test_without_a_compiler_it_is_said_once_and_torch_computes(make_model, monkeypatch, caplog, tmp_path):
    from aligner.rollout.builtin import native

    compiled = native.compiled

    def missing():
        return compiled({"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)})

    monkeypatch.setattr(native, "compiled", missing)
    native.load.cache_clear()
    try:
        policy = make_model("policy")
        with caplog.at_level(logging.WARNING):
            decoders = [decoder_of(policy) for _ in range(2)]
        assert [record.getMessage() for record in caplog.records] == [
            "rollouts compute without the compiled CPU kernels: no C compiler: looked for cc, gcc, clang"
        ]
        assert torch.equal(steps(decoders[0], 2, seed=1), steps(decoder_of(policy, kernels=Kernels.torch), 2, seed=1))
    finally:
        native.load.cache_clear()
