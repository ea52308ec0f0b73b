"""The sampler: what it draws from, by hand, against transformers' processors and by chi-square; its log-probs; when responses end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from host_syncs import HostSyncs

from aligner.errors import ConfigError
from aligner.rollout.builtin.sampling import GOES_ON, LENGTH, STOP, Draw, Sampler, _heated, _kept, halved_nucleus, uniforms
from aligner.rollout.engine import EngineSampling
from aligner.types import SamplingConfig

EOS = 0
CPU = torch.device("cpu")


def sampler_of(num_seats: int, vocab_size: int, *, decode=None, **sampling) -> Sampler:
    return Sampler(SamplingConfig(**sampling), eos_id=EOS, vocab_size=vocab_size, num_seats=num_seats, device=CPU, decode=decode)


def seated(
    rows: int, vocab_size: int, *, prompt: Sequence[int] = (1,), response: Sequence[int] = (), limit: int = 100, **sampling
) -> Sampler:
    """Every seat has the same sequence, with seeds 0, 1, ..."""
    sampler = sampler_of(rows, vocab_size, **sampling)
    for seat in range(rows):
        sampler.seat(seat, prompt=prompt, response=response, seed=seat, limit=limit)
    return sampler


@torch.no_grad()
def probabilities(sampler: Sampler, logits: torch.Tensor, seats: torch.Tensor) -> torch.Tensor:
    """The distribution that the next draw would use, [B, V]."""
    sampler._settle()
    with sampler._without_missing(logits):
        how = sampler._usual
        z, processed = _heated(how, logits), sampler._processed(how, logits, seats, sampler._state[1, seats])
        weights = _kept(how, processed, logits, z, (z - z.amax(dim=-1, keepdim=True)).exp_())
    return weights / weights.sum(dim=-1, keepdim=True)


def by_hand(logits: list[float], prompt: Sequence[int], response: Sequence[int], config: SamplingConfig) -> list[float]:
    """The distribution that tokens are drawn from, token by token in plain Python."""
    z = list(logits)
    for token in {*prompt, *response}:
        z[token] = z[token] / config.repetition_penalty if z[token] > 0 else z[token] * config.repetition_penalty
    for token in response:
        z[token] -= config.frequency_penalty
    for token in set(response):
        z[token] -= config.presence_penalty
    if len(response) < config.min_response_length:
        for token in {EOS, *config.stop_token_ids}:
            z[token] = -math.inf
    p = [math.exp(x / config.temperature) for x in z]
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    order = order[: config.top_k or len(p)]
    mass, kept = 0.0, []
    for token in order:
        if mass < config.top_p * sum(p[t] for t in order):
            kept.append(token)
        mass += p[token]
    kept = [token for token in kept if p[token] >= config.min_p * p[order[0]]]
    return [p[token] / sum(p[t] for t in kept) if token in kept else 0.0 for token in range(len(p))]


EVERYTHING = {
    "temperature": 0.8,
    "top_k": 12,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "min_response_length": 6,
}
SETTINGS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.08},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": 0.4},
    {"presence_penalty": -1.0, "min_response_length": 9, "stop_token_ids": [4, 11]},
    EVERYTHING,
]
PROMPT, RESPONSE = [1, 2, 2, 9], [3, 9, 3, 3, 5]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "plain")
def test_draws_follow_the_distribution_that_the_settings_say(settings):
    """Chi-square of 3,000 draws, one for each seed, against the distribution by hand; the sampler's own statement of it to 1e-6."""
    rows, vocab_size = 3000, 24
    logits = (1.5 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(3))).expand(rows, -1)
    sampler = seated(rows, vocab_size, prompt=PROMPT, response=RESPONSE, **settings)
    expected = torch.tensor(by_hand(logits[0].tolist(), PROMPT, RESPONSE, SamplingConfig(**settings)), dtype=torch.float64)
    seats = torch.arange(rows)
    torch.testing.assert_close(probabilities(sampler, logits[:2], seats[:2])[1].double(), expected, rtol=0, atol=1e-6)
    draw = sampler.draw(logits, seats)
    counts = torch.bincount(draw.tokens, minlength=vocab_size).double()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    freedom = int(kept.sum()) - 1
    assert freedom >= 3
    chi_square = ((counts - rows * expected)[kept] ** 2 / (rows * expected)[kept]).sum().item()
    # Wilson and Hilferty (1931): exceeded with probability 3e-5
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("vocab_size", [50, 3000])
def test_the_distribution_is_transformers(vocab_size):
    from transformers import (
        MinNewTokensLengthLogitsProcessor,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(32, vocab_size, generator=generator)
    prompts = torch.randint(0, vocab_size, (32, 9), generator=generator)
    responses = torch.randint(0, vocab_size, (32, 6), generator=generator)
    ids = torch.cat([prompts, responses], dim=1)
    stops = [EOS, 7, 8]
    theirs = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor(1.4),
        "min_response_length": MinNewTokensLengthLogitsProcessor(9, 7, stops),
        "temperature": TemperatureLogitsWarper(0.8),
        "top_k": TopKLogitsWarper(30),
        "top_p": TopPLogitsWarper(0.9),
        "min_p": MinPLogitsWarper(0.03),
    }
    ours = {"repetition_penalty": 1.4, "min_response_length": 7, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.03}
    for names in [[name] for name in theirs] + [["temperature", "top_p"], list(theirs)]:
        scores = logits
        for name in names:
            scores = theirs[name](ids, scores)
        sampler = sampler_of(32, vocab_size, stop_token_ids=stops[1:], **{name: ours[name] for name in names})
        for row in range(32):
            sampler.seat(row, prompt=prompts[row].tolist(), response=responses[row].tolist(), seed=row, limit=50)
        torch.testing.assert_close(probabilities(sampler, logits, torch.arange(32)), scores.softmax(dim=-1), rtol=0, atol=1e-6)
    early = probabilities(seated(1, vocab_size, response=[5] * 6, min_response_length=7), logits[:1], torch.tensor([0]))
    late = probabilities(seated(1, vocab_size, response=[5] * 7, min_response_length=7), logits[:1], torch.tensor([0]))
    assert early[0, EOS] == 0 < late[0, EOS]


def test_of_equal_tokens_the_first_are_kept():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    seats = torch.arange(2)

    def kept(**settings) -> list[list[int]]:
        return [row.nonzero()[:, 0].tolist() for row in probabilities(seated(2, 6, **settings), logits, seats)]

    assert kept(top_k=1) == [[1], [0]]
    assert kept(top_k=4) == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert kept(top_p=0.5) == [[1, 3], [0, 1, 2]]  # 2e / (2e + 4) = 0.576; 3 of 6 are just enough
    assert kept(top_p=0.6) == [[0, 1, 3], [0, 1, 2, 3]]
    assert kept(top_k=5, top_p=0.99, min_p=0.5) == [[1, 3], [0, 1, 2, 3, 4]]


def test_top_p_over_a_large_vocabulary_where_few_tokens_are_enough_and_where_they_are_not():
    vocab_size = 5000
    peaked = 4 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(1))
    flat = peaked / 8
    even = torch.zeros(vocab_size)
    logits = torch.stack([peaked, flat, peaked, even])
    found = probabilities(seated(4, vocab_size, top_p=0.9), logits, torch.arange(4))
    for row in range(4):
        p = logits[row].double().softmax(dim=-1)
        ordered, order = p.sort(descending=True, stable=True)
        size = int((ordered.cumsum(dim=-1) - ordered < 0.9 - 1e-12).sum())
        assert sorted(order[:size].tolist()) == found[row].nonzero()[:, 0].tolist()
    assert (found[3] > 0).sum() == 4500


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.9999])
def test_halving_finds_the_nucleus_that_sorting_finds(top_p):
    """What is done on a GPU: signs of both kinds, zeros of both, equal logits, bfloat16's few values, forbidden tokens."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(6, 3000, generator=generator)
    rows = [4 * normal[:2], normal[2:3].bfloat16().float() - 5, 0.1 * normal[3:4] + 7, normal[4:5].round(), 30 * normal[5:]]
    rows += [torch.zeros(1, 3000), torch.where(normal[:1] > 0, 0.0, -0.0), torch.where(normal[:1] > 1, normal[:1], -torch.inf)]
    z = torch.cat([*rows, torch.cat([torch.tensor([[50.0]]), torch.zeros(1, 2999)], dim=1)])
    weights = (z - z.amax(dim=-1, keepdim=True)).exp()
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    with HostSyncs() as syncs:
        least, size = halved_nucleus(z, weights, top_p * total)
    assert syncs.found == []
    ordered = z.sort(dim=-1, descending=True).values
    cumulative = (ordered - ordered[:, :1]).exp().double().cumsum(dim=-1)
    expected = (cumulative < top_p * total * (1 - 1e-12)).sum(dim=-1, keepdim=True) + 1
    assert torch.equal(size, expected) and torch.equal(least, ordered.gather(1, expected - 1))


def test_logprobs_are_of_the_unmodified_distribution():
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(300, 40, generator=generator)
    before, seats = logits.clone(), torch.arange(300)
    for settings in ({"temperature": 0.8}, EVERYTHING):
        sampler = seated(300, 40, prompt=[1, 2, 3], response=[4, 5], raw_logprobs=True, **settings)
        draw = sampler.draw(logits, seats)
        rows = torch.arange(300), draw.tokens
        torch.testing.assert_close(draw.logprobs, (logits / 0.8).log_softmax(dim=-1)[rows])
        torch.testing.assert_close(draw.raw_logprobs, logits.log_softmax(dim=-1)[rows])
        assert draw.logprobs.dtype == draw.raw_logprobs.dtype == torch.float32
    assert torch.equal(logits, before)
    assert seated(300, 40).draw(logits, seats).raw_logprobs is None
    plain = seated(300, 40, raw_logprobs=True).draw(logits, seats)
    assert torch.equal(plain.raw_logprobs, plain.logprobs)


def test_greedy_takes_the_likeliest_after_penalties_and_gives_its_logprob_at_temperature_one():
    logits = torch.tensor([[0.0, 3.0, -2.0, 2.5, 2.5]])
    seats = torch.tensor([0])
    draw = seated(1, 5, temperature=0.0, top_k=3, top_p=0.1, raw_logprobs=True).draw(logits, seats)
    assert draw.tokens.tolist() == [1]
    assert draw.logprobs.item() == draw.raw_logprobs.item() == pytest.approx(logits.log_softmax(dim=-1)[0, 1].item(), abs=1e-6)
    penalized = seated(1, 5, temperature=0.0, response=[1], presence_penalty=1.0).draw(logits, seats)
    assert penalized.tokens.tolist() == [3]  # the first of two equal ones
    assert penalized.logprobs.item() == pytest.approx(logits.log_softmax(dim=-1)[0, 3].item(), abs=1e-6)
    stop_is_best = torch.tensor([[9.0, 3.0, 1.0]])
    assert seated(1, 3, temperature=0.0, min_response_length=1).draw(stop_is_best, seats).tokens.tolist() == [1]
    assert seated(1, 3, temperature=0.0, response=[2], min_response_length=1).draw(stop_is_best, seats).tokens.tolist() == [EOS]


ALL_ON = EVERYTHING | {"stop_token_ids": [7, 17, 27], "stop_strings": ["yz", "abc"]}


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + i % 26) for i in ids)


def run(order: Sequence[int], *, num_seats: int, preempt_every: int = 0) -> dict[int, tuple]:
    """Responses of up to 20 tokens with seeds `order`; the logits of a sequence depend on its seed and position alone.

    As soon as a seat is free the next sequence takes it; every `preempt_every` draws the one that was seated last goes to the end of the
    queue with what it has.
    """
    sampler = sampler_of(num_seats, 40, decode=letters, **ALL_ON)
    table = 2 * torch.randn(16, 21, 40, generator=torch.Generator().manual_seed(8))
    waiting = [(seed, [], []) for seed in order]
    running: dict[int, tuple[int, list[int], list[float]]] = {}
    results = {}
    for step in range(10_000):
        for seat in range(num_seats):
            if seat not in running and waiting:
                running[seat] = sequence = waiting.pop(0)
                sampler.seat(seat, prompt=[3, 4, sequence[0]], response=sequence[1], seed=sequence[0], limit=12 + sequence[0] % 8)
        if not running:
            return results
        seats = list(running)[::-1]
        draw = sampler.draw(torch.stack([table[running[s][0], len(running[s][1])] for s in seats]), torch.tensor(seats))
        for row, seat in enumerate(seats):
            seed, tokens, logprobs = running[seat]
            tokens.append(draw.tokens[row].item())
            logprobs.append(draw.logprobs[row].item())
            if draw.ended[row] != GOES_ON:
                results[seed] = (tokens, logprobs, draw.ended[row].item())
                del running[seat]
        if preempt_every and step % preempt_every == 0 and running:
            waiting.append(running.pop(list(running)[-1]))
    raise AssertionError("sequences do not end")


def test_a_sample_depends_on_its_prompt_and_seed_alone():
    """Whatever seat it has, whoever is beside it, and whether or not it was preempted: the same tokens and log-probs."""
    expected = run(range(10), num_seats=10)
    assert {ended for _, _, ended in expected.values()} == {STOP, LENGTH}
    assert len({tuple(tokens) for tokens, _, _ in expected.values()}) == 10
    for other in (
        run(range(10), num_seats=1),
        run(list(range(10))[::-1], num_seats=5),
        run(range(10), num_seats=4, preempt_every=1),
        run(range(10), num_seats=7, preempt_every=3),
    ):
        assert other == expected


def test_a_fused_kernel_draws_where_nothing_reshapes_the_softmax():
    calls = []

    def fused(logits, uniforms, temperature, *, raw=False):
        calls.append((uniforms.tolist(), temperature, raw))
        return logits.argmin(dim=-1), logits[:, 0], None

    logits, seats = torch.randn(2, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([1, 0])
    for settings in ({"temperature": 0.7, "raw_logprobs": True}, {"top_k": 2}, {"presence_penalty": 0.1}, {"min_response_length": 1}):
        sampler = Sampler(SamplingConfig(**settings), eos_id=EOS, vocab_size=5, num_seats=2, device=CPU, fused=fused)
        for seat in range(2):
            sampler.seat(seat, prompt=[1], response=[2, 2], seed=10 + seat, limit=9)
        draw = sampler.draw(logits, seats)
        if "temperature" in settings:
            assert torch.equal(draw.tokens, logits.argmin(dim=-1)) and torch.equal(draw.logprobs, logits[:, 0])
    assert calls == [(uniforms(torch.tensor([11, 10]), torch.tensor([2, 2])).tolist(), 0.7, True)]


def test_every_draw_of_a_long_response_has_its_own_uniform():
    """700 draws, with sequences that come and go beside it, and one that comes back."""
    drawn: dict[int, list[float]] = {}

    def fused(logits, uniforms, temperature, *, raw=False):
        for seat, uniform in zip(seats, uniforms.tolist(), strict=True):
            drawn.setdefault(seed_of[seat], []).append(uniform)
        return torch.ones(len(seats), dtype=torch.int64), torch.zeros(len(seats)), None

    sampler = Sampler(SamplingConfig(max_response_length=1000), eos_id=EOS, vocab_size=4, num_seats=3, device=CPU, fused=fused)
    seed_of: dict[int, int] = {}
    for step in range(700):
        for seat, seed in {0: [(0, 5)], 100: [(1, 6)], 300: [(1, 7), (2, 8)], 400: [(1, 6)]}.get(step, []):
            seed_of[seat] = seed
            sampler.seat(seat, prompt=[1], response=[1] * len(drawn.get(seed, [])), seed=seed, limit=1000)
        seats = list(seed_of)[::-1]
        sampler.draw(torch.zeros(len(seats), 4), torch.tensor(seats))
    assert {seed: len(values) for seed, values in drawn.items()} == {5: 700, 6: 500, 7: 100, 8: 400}
    for seed, values in drawn.items():
        assert values == uniforms(torch.tensor(seed), torch.arange(len(values))).tolist()


MISSING = (2, 5, 6, 7)  # a gap, and the end of a padded vocabulary


def without(missing: Sequence[int], logits: torch.Tensor, *, fused=None, add_up=None, **sampling) -> tuple[Sampler, Draw]:
    """A draw in which these ids stand for no token."""
    settings, more = EngineSampling(missing_ids=tuple(missing), **sampling), {} if add_up is None else {"add_up": add_up}
    rows, vocab_size = logits.shape
    sampler = Sampler(settings, eos_id=EOS, vocab_size=vocab_size, num_seats=rows, device=CPU, fused=fused, **more)
    for seat in range(rows):
        sampler.seat(seat, prompt=[1], response=[], seed=seat, limit=9)
    return sampler, sampler.draw(logits, torch.arange(rows))


@pytest.mark.parametrize("height", [0.0, 30.0, 500.0])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.7, "raw_logprobs": True}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}, {"repetition_penalty": 1.2}],
)
@pytest.mark.parametrize("kernel", [False, True])
def test_ids_that_stand_for_no_token_are_never_drawn(height, sampling, kernel):
    """However likely they are; log-probs stay those over the whole vocabulary, and the logits what they were."""
    fused = None
    if kernel:
        from aligner.rollout.builtin.native import load

        if (library := load()) is None:
            pytest.skip("the kernels do not compile here")
        fused = library.draw
    logits = 2 * torch.randn(4000, 8, generator=torch.Generator().manual_seed(4))
    logits[:, list(MISSING)] += height
    before = logits.clone()
    sampler, draw = without(MISSING, logits, fused=fused, **sampling)
    assert torch.equal(logits, before) and not set(draw.tokens.tolist()) & set(MISSING)
    for temperature, found in ((sampling.get("temperature", 1.0) or 1.0, draw.logprobs), (1.0, draw.raw_logprobs)):
        if found is not None:
            expected = (logits.double() / temperature).log_softmax(-1).gather(1, draw.tokens[:, None])[:, 0]
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    reduced = logits.clone()
    reduced[:, list(MISSING)] = -torch.inf
    if sampling.get("temperature") == 0.0:
        assert torch.equal(draw.tokens, reduced.argmax(-1))
        return
    _, expected = without((), reduced, fused=fused, **sampling)
    assert torch.equal(draw.tokens, expected.tokens)  # what a vocabulary without them gives for the same numbers
    assert torch.equal(probabilities(sampler, logits, torch.arange(4000))[:, list(MISSING)], torch.zeros(4000, len(MISSING)))
    assert torch.equal(logits, before)


def test_the_likeliest_tokens_of_seats_that_ask_for_them():
    """With log-probs as the drawn ones have, whatever reshapes the draw; ids of no token are not named."""
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
    missing = (3, 6)
    settings = EngineSampling(missing_ids=missing, temperature=0.7, top_k=2)
    sampler = Sampler(settings, eos_id=EOS, vocab_size=8, num_seats=6, device=CPU)
    heats = {5: 0.7, 1: 0.0, 0: 2.0, 2: 0.7}
    for (seat, heat), top in zip(heats.items(), (3, 1, 20, 0), strict=True):
        own = None if heat == 0.7 else EngineSampling(missing_ids=missing, temperature=heat)
        sampler.seat(seat, prompt=(1,), response=(), seed=seat, limit=9, sampling=own, top=top)
    for on_host in (None, list(heats)):
        draw = sampler.draw(logits, torch.tensor(list(heats)), on_host)
        found = draw.tops.by_row()
        assert {row: len(line) for row, line in found.items()} == {0: 3, 1: 1, 2: 6}
        for row, line in found.items():
            expected = (logits[row] / (list(heats.values())[row] or 1.0)).log_softmax(-1)
            best = sorted((token for token in range(8) if token not in missing), key=lambda token: -expected[token])
            assert [token for token, _ in line] == best[: len(line)]
            assert [p for _, p in line] == pytest.approx([float(expected[token]) for token in best[: len(line)]], abs=1e-5)
            own = dict(line).get(int(draw.tokens[row]), float(draw.logprobs[row]))
            assert own == pytest.approx(float(draw.logprobs[row]), abs=1e-6)
    for seat in heats:
        sampler.seat(seat, prompt=(1,), response=(), seed=seat, limit=9)
    assert sampler.draw(logits, torch.tensor(list(heats))).tops is None


def certain(*tokens: int, vocab_size: int = 8) -> torch.Tensor:
    """Logits of which these tokens are drawn."""
    logits = torch.full((len(tokens), vocab_size), -100.0)
    logits[range(len(tokens)), list(tokens)] = 0
    return logits


def test_how_a_response_ends():
    sampler = sampler_of(4, 8, stop_token_ids=[5, 99])
    for seat, (response, limit) in enumerate([((), 2), ((3,), 2), ((3,), 2), ((), 1)]):
        sampler.seat(seat, prompt=[1], response=response, seed=seat, limit=limit)
    draw = sampler.draw(certain(4, 4, EOS, 5), torch.arange(4))
    assert draw.tokens.tolist() == [4, 4, EOS, 5]
    assert draw.ended.tolist() == [GOES_ON, LENGTH, STOP, STOP] and draw.ended.dtype == torch.int8  # a stop at the limit is a stop
    assert sampler.draw(certain(6), torch.tensor([0])).ended.tolist() == [LENGTH]
    sampler.seat(0, prompt=[1], response=[], seed=0, limit=3)  # the next sequence on this seat starts anew
    assert [sampler.draw(certain(6), torch.tensor([0])).ended.item() for _ in range(3)] == [GOES_ON, GOES_ON, LENGTH]
    with pytest.raises(ValueError, match="seat 1: a response of 4 tokens cannot go on with a limit of 4"):
        sampler.seat(1, prompt=[1], response=[6] * 4, seed=0, limit=4)


def test_a_response_ends_with_its_stop_string():
    """c-d-e: "cde" is completed by its third token; not where "cd" belongs to the prompt, and not before the least length."""

    def ends(tokens: Sequence[int], *, prompt: Sequence[int] = (7,), response: Sequence[int] = (), least: int = 0) -> list[int]:
        sampler = seated(
            1, 8, prompt=prompt, response=response, stop_strings=["cde", "gg"], decode=letters, min_response_length=least, limit=9
        )
        return [sampler.draw(certain(token), torch.tensor([0])).ended.item() for token in tokens]

    assert ends([2, 3, 4]) == [GOES_ON, GOES_ON, STOP]
    assert ends([4, 5, 6, 6]) == [GOES_ON, GOES_ON, GOES_ON, STOP]
    assert ends([4], prompt=[7, 2, 3]) == [GOES_ON]
    assert ends([4], response=[2, 3]) == [STOP]  # after preemption
    assert ends([2, 3, 4, 5, 2, 3, 4], least=4) == [GOES_ON] * 6 + [STOP]
    assert ends([2, 3, 4], least=3) == [GOES_ON, GOES_ON, STOP]
    with pytest.raises(ConfigError, match=r"sampling.stop_strings=\['x'\]: needs a tokenizer"):
        sampler_of(1, 8, stop_strings=["x"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be finite and not negative"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1: must not be negative"),
        ({"min_p": 1.5}, "min_p=1.5: must be between 0 and 1"),
        ({"max_response_length": -1}, "max_response_length=-1: must not be negative"),
        ({"min_response_length": 257}, "min_response_length=257: must be at most max_response_length=256"),
        ({"min_response_length": -1}, "min_response_length=-1"),
        ({"min_response_length": 9, "max_response_length": 8}, "min_response_length=9: must be at most max_response_length=8"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: must be finite and above 0"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: must be from -2 to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty=-2.5"),
        ({"stop_token_ids": [3, -1]}, r"stop_token_ids=\[3, -1\]: must not be negative"),
        ({"stop_strings": ["a", ""]}, r"stop_strings=\['a', ''\]: must not be empty strings"),
    ],
)
def test_sampling_config_names_what_is_wrong(values, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**values)
