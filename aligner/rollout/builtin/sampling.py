"""Drawing the next tokens: one pass over the logits of all running sequences, reproducible per sample.

Each draw uses one uniform number that is a pure function of (the sample's seed, the position in its response), so a sample is the same
whatever else is in the batch, on every rank, and after a preemption.

The order is Hugging Face's: repetition penalty (Keskar et al. 2019), frequency and presence penalties (OpenAI's), no stop token before
`min_response_length`, temperature, top-k, top-p (Holtzman et al. 2020), min-p (Nguyen et al. 2024). Ids that stand for no token are
excluded before all of these. Log-probs ignore all of this: they are log softmax(logits / temperature) over the whole vocabulary, the number
that the trainer's ratio compares with.

Sequences may have settings of their own: those with the same ones are drawn together, as in a run with these settings, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from aligner.errors import ConfigError
from aligner.models.modules.noise import GOLDEN, hashed, shifted
from aligner.parallel.logprobs import log_normalizer, row_sums
from aligner.rollout.builtin.attention import upload
from aligner.rollout.builtin.stopping import StopStrings
from aligner.rollout.engine import Likeliest, missing_ids
from aligner.types import SamplingConfig

BLOCK = 128  # tokens whose weights are summed first
WINDOW = 256  # positions for which uniforms are made at once
HEAD = 1024  # likeliest tokens among which top-p looks first on a CPU
_INT32_MAX = 2**31 - 1
GOES_ON, STOP, LENGTH = 0, 1, 2  # values of `Draw.ended`


FusedDraw = Callable[..., tuple[Tensor, Tensor, Tensor | None]]  # `aligner.rollout.builtin.native.Library.draw`


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One token per running sequence: int64 tokens [B], float32 logprobs [B] at the sampling temperature (greedy: 1), float32
    raw_logprobs [B] at temperature 1 if asked for, int8 ended [B] (GOES_ON, STOP, LENGTH), `tops` of rows that ask for them."""

    tokens: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor | None
    ended: Tensor
    tops: Tops | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tops:
    """Of some rows, by number the tokens that each asks for, the likeliest tokens: int64 ids and float32 logprobs [rows, most tokens]."""

    counts: Mapping[int, int]
    ids: Tensor
    logprobs: Tensor

    def by_row(self) -> dict[int, Likeliest]:
        found = zip(self.counts.items(), self.ids.tolist(), self.logprobs.tolist(), strict=True)
        return {row: [one for one in zip(ids[:n], logprobs, strict=False) if one[1] > -np.inf] for (row, n), ids, logprobs in found}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Manner:
    """How the sequences of some seats are drawn: their settings, and what is made of them once."""

    key: tuple[object, ...]  # settings that differ have another one; a response's length is its seat's own
    sampling: SamplingConfig
    stop_ids: Tensor  # int64, those in the vocabulary
    fused: FusedDraw | None
    stops: StopStrings | None


class Sampler:
    """Draws for the sequences in `num_seats` seats. `decode` (ids to text) is needed for stop strings only. `add_up` sums rows of [B, V]
    numbers from 0 to 1 for log-probs: the trainer's sum if both must be bit-identical. `fused` draws if no setting reshapes the softmax.

    Raises ConfigError if there are stop strings and no `decode`.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        *,
        eos_id: int,
        vocab_size: int,
        num_seats: int,
        device: torch.device,
        decode: Callable[[Sequence[int]], str] | None = None,
        add_up: Callable[[Tensor], Tensor] = row_sums,
        fused: FusedDraw | None = None,
    ) -> None:
        self._eos_id, self._vocab_size, self._device = eos_id, vocab_size, device
        self._decode, self._fused, self._add_up = decode, fused, add_up
        self._usual = self._new(sampling)
        self._own: dict[int, Manner] = {}  # by seat
        self._tops: dict[int, int] = {}  # by seat
        self._missing = upload(np.array(missing_ids(sampling), np.int64), device)
        self._arrived: dict[int, tuple[int, int, int]] = {}  # by seat, since the last draw: seed, position (of the next token), limit
        self._state = torch.zeros(4, num_seats, dtype=torch.int64, device=device)  # of all seats: these, and where its uniforms begin
        self._uniforms = torch.zeros(num_seats, WINDOW, dtype=torch.float64, device=device)  # for its next positions
        self._ahead = torch.arange(WINDOW, device=device)
        self._age = 0  # draws since all seats' uniforms were made
        self._counts: Tensor | None = None  # [seats, V], of each token in the response, once a seat needs them
        self._seen: Tensor | None = None  # bool [seats, V], in the prompt too
        self._texts: list[tuple[list[int], int]] = [([], 0)] * num_seats  # with stop strings: prompt's end + response, its start

    def manner(self, sampling: SamplingConfig | None) -> Manner:
        """What is made of these settings; None: the usual ones. Raises ConfigError if there are stop strings and no `decode`."""
        if sampling is None:
            return self._usual
        key = _key(sampling)
        return next((known for known in (self._usual, *self._own.values()) if known.key == key), None) or self._new(sampling)

    def _new(self, sampling: SamplingConfig) -> Manner:
        if sampling.stop_strings and self._decode is None:
            raise ConfigError(
                f"rollout.sampling.stop_strings={sampling.stop_strings}: needs a tokenizer; allowed: rollout.sampling.stop_token_ids"
            )
        stop_ids = sorted({i for i in (self._eos_id, *sampling.stop_token_ids) if 0 <= i < self._vocab_size})
        return Manner(
            key=_key(sampling),
            sampling=sampling,
            stop_ids=upload(np.array(stop_ids, np.int64), self._device),
            fused=None if sampling.reshaping() else self._fused,
            stops=StopStrings(sampling.stop_strings, self._decode) if sampling.stop_strings and self._decode else None,
        )

    def seat(
        self,
        seat: int,
        *,
        prompt: Sequence[int],
        response: Sequence[int],
        seed: int,
        limit: int,
        sampling: SamplingConfig | None = None,
        top: int = 0,
    ) -> None:
        """Give `seat` to a sequence: a new one, or (with the `response` so far) a preempted one, which continues exactly.

        Args:
            seed: int64; limit: the most tokens that this response may have. sampling: its settings, in place of all the others'.
            top: likeliest tokens to name in each place.
        """
        if len(response) >= limit:
            raise ValueError(f"seat {seat}: a response of {len(response)} tokens cannot go on with a limit of {limit}")
        how = self.manner(sampling)
        self._own.pop(seat, None)
        if how is not self._usual:
            self._own[seat] = how
        self._tops.pop(seat, None)
        if top:
            self._tops[seat] = top
        self._arrived[seat] = seed, len(response), limit
        size = len(self._texts), self._vocab_size
        if how.sampling.repetition_penalty != 1:
            if self._seen is None:
                self._seen = torch.zeros(size, dtype=torch.bool, device=self._device)
            self._seen[seat] = False
            self._seen[seat, upload(np.array([*prompt, *response], np.int64), self._device)] = True
        if how.sampling.presence_penalty != 0 or how.sampling.frequency_penalty != 0:
            if self._counts is None:
                self._counts = torch.zeros(size, device=self._device)
            self._counts[seat] = 0
            tokens = upload(np.array(response, np.int64), self._device)
            self._counts[seat].index_add_(0, tokens, torch.ones(len(response), device=self._device))
        if how.stops is not None:
            context = how.stops.context(prompt)
            self._texts[seat] = (context + list(response), len(context))

    @torch.no_grad()
    def draw(self, logits: Tensor, seats: Tensor, on_host: Sequence[int] | None = None) -> Draw:
        """The next token of each seat in `seats` (int64 [B], no seat twice) from its logits, float32 [B, V], which stay unchanged.

        A response ends with its stop token, with the token that completes a stop string, or at its limit. Waits for the device only if
        there are stop strings, or settings of several kinds and no `on_host`, the same numbers of seats.
        """
        self._settle()
        if on_host is None and (self._own or self._tops or self._usual.stops):
            on_host = seats.tolist()
        _, positions, limits, begins = self._state[:, seats]
        groups: dict[Manner, list[int]] = {}  # rows of each
        if self._own and on_host is not None:
            for row, seat in enumerate(on_host):
                groups.setdefault(self._own.get(seat, self._usual), []).append(row)
        if len(groups) <= 1:
            groups = groups or {self._usual: list(range(len(seats)))}
            (how,) = groups
            tokens, logprobs, raw_logprobs, stopped = self._drawn(how, logits, seats, positions, begins)
        else:
            tokens, logprobs, raw_logprobs, stopped = self._drawn_apart(groups, logits, seats, positions, begins)
        self._record(seats, tokens, positions + 1)
        if on_host is not None and any(how.stops for how in groups):
            stopped = stopped | self._completed(groups, on_host, tokens)
        ended = torch.where(stopped, STOP, (positions + 1 >= limits) * LENGTH).to(torch.int8)
        tops = self._likeliest(logits, on_host, tokens, logprobs) if self._tops and on_host is not None else None
        return Draw(tokens=tokens, logprobs=logprobs, raw_logprobs=raw_logprobs, ended=ended, tops=tops)

    def _likeliest(self, logits: Tensor, seats: Sequence[int], tokens: Tensor, logprobs: Tensor) -> Tops | None:
        """With log-probs as those of the drawn `tokens` are."""
        counts = {row: self._tops[seat] for row, seat in enumerate(seats) if seat in self._tops}
        if not counts:
            return None
        heats = [self._own.get(seats[row], self._usual).sampling.temperature or 1.0 for row in counts]
        rows = upload(np.array(list(counts)), self._device)
        z = logits[rows] / upload(np.array(heats, np.float32), self._device)[:, None]
        normalizer = z.gather(1, tokens[rows, None]) - logprobs[rows, None]
        best, ids = z.index_fill_(1, self._missing, -torch.inf).topk(min(max(counts.values()), self._vocab_size), dim=-1)
        return Tops(counts=counts, ids=ids, logprobs=best - normalizer)

    def _drawn(
        self, how: Manner, logits: Tensor, seats: Tensor, positions: Tensor, begins: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """(tokens, log-probs, raw log-probs if asked for, whether it is a stop token)."""
        with self._without_missing(logits) as beyond:
            tokens, logprobs, raw_logprobs = self._pick(how, logits, seats, positions, begins)
        if len(self._missing):
            logprobs = self._over_all(logprobs, tokens, _heated(how, logits), _heated(how, beyond))
            raw_logprobs = None if raw_logprobs is None else self._over_all(raw_logprobs, tokens, logits, beyond)
        return tokens, logprobs, raw_logprobs, (tokens[:, None] == how.stop_ids).any(dim=-1)

    def _drawn_apart(self, groups: dict[Manner, list[int]], *given: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The same for rows of several kinds."""
        parts = []
        for how, rows in groups.items():
            index = upload(np.array(rows), self._device)
            parts.append(self._drawn(how, *(one[index] for one in given)))
        back = upload(np.argsort(np.concatenate(list(groups.values()))), self._device)
        tokens, logprobs, raw_logprobs, stopped = zip(*parts, strict=True)
        asked = any(raw is not None for raw in raw_logprobs)
        raw = [other if own is None else own for own, other in zip(raw_logprobs, logprobs, strict=True)]
        return (
            torch.cat(tokens)[back],
            torch.cat(logprobs)[back],
            torch.cat(raw)[back] if asked else None,  # of the others it is not read
            torch.cat(stopped)[back],
        )

    def _settle(self) -> None:
        """Take over the new arrivals, and make uniforms for the next draws of every seat: made ahead, they cost next to nothing."""
        device = self._state.device
        if self._arrived:
            seats = upload(np.array(list(self._arrived)), device)
            seeds, positions, limits = upload(np.array(list(self._arrived.values()), np.int64), device).unbind(1)
            self._state[:, seats] = torch.stack([seeds, positions, limits, positions])
            self._uniforms[seats] = uniforms(seeds[:, None], positions[:, None] + self._ahead)
            self._arrived.clear()
        if self._age == WINDOW:  # no seat has drawn more often than that
            self._state[3] = self._state[1]
            self._uniforms[:] = uniforms(self._state[0][:, None], self._state[1][:, None] + self._ahead)
            self._age = 0

    def _pick(self, how: Manner, logits: Tensor, seats: Tensor, positions: Tensor, begins: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(tokens, log-probs, raw log-probs if asked for)."""
        uniform = self._uniforms[seats, positions - begins]
        if how.fused is not None:
            return how.fused(logits, uniform, how.sampling.temperature, raw=how.sampling.raw_logprobs)
        z = _heated(how, logits)
        peak = z.amax(dim=-1, keepdim=True)
        weights = (z - peak).exp_()
        logsumexp = log_normalizer(peak[:, 0], self._add_up(weights))
        processed = self._processed(how, logits, seats, positions)
        if how.sampling.temperature == 0:
            tokens = processed.argmax(dim=-1)
        else:
            tokens = invert(_kept(how, processed, logits, z, weights), uniform)
        index = tokens[:, None]
        logprobs = z.gather(1, index)[:, 0] - logsumexp
        if not how.sampling.raw_logprobs:
            return tokens, logprobs, None
        return tokens, logprobs, logprobs if z is logits else logits.gather(1, index)[:, 0] - self._normalizer(logits)

    @contextmanager
    def _without_missing(self, logits: Tensor) -> Iterator[Tensor]:
        """In the block the logits of ids that stand for no token are -inf; yields their real values, [B, ids]. Writes only these columns,
        without a pass over the vocabulary."""
        beyond = logits.index_select(1, self._missing)
        if len(self._missing):
            logits.index_fill_(1, self._missing, -torch.inf)
        yield beyond
        if len(self._missing):
            logits.index_copy_(1, self._missing, beyond)

    def _over_all(self, logprobs: Tensor, tokens: Tensor, z: Tensor, beyond: Tensor) -> Tensor:
        """The log-probs over the whole vocabulary, from log-probs over real tokens; `beyond` are the `z` of the other ids."""
        own = z.gather(1, tokens[:, None])[:, 0]
        if self._add_up is not row_sums:  # the trainer's own sum, bit for bit
            return own - self._normalizer(z)
        return logprobs - F.softplus(beyond.logsumexp(dim=-1) - own + logprobs)

    def _normalizer(self, z: Tensor) -> Tensor:
        peak = z.amax(dim=-1, keepdim=True)
        return log_normalizer(peak[:, 0], self._add_up((z - peak).exp_()))

    def _processed(self, how: Manner, logits: Tensor, seats: Tensor, positions: Tensor) -> Tensor:
        """The logits with penalties, and without stop tokens below the minimal length; `logits` itself if nothing changes."""
        sampling = how.sampling
        if sampling.repetition_penalty != 1 and self._seen is not None:
            penalty = sampling.repetition_penalty
            logits = torch.where(self._seen[seats], torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if (sampling.presence_penalty != 0 or sampling.frequency_penalty != 0) and self._counts is not None:
            counts = self._counts[seats]
            logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
        if sampling.min_response_length > 0:
            early = (positions < sampling.min_response_length)[:, None]
            allowed = logits[:, how.stop_ids].masked_fill(early, -torch.inf)
            logits = logits.index_copy(1, how.stop_ids, allowed)
        return logits

    def _record(self, seats: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        self._state[1].index_copy_(0, seats, lengths)
        self._age += 1
        if self._seen is not None:
            self._seen[seats, tokens] = True
        if self._counts is not None:
            self._counts[seats, tokens] += 1

    def _completed(self, groups: dict[Manner, list[int]], seats: Sequence[int], tokens: Tensor) -> Tensor:
        """Whether each row's token completes a stop string."""
        drawn, found = tokens.tolist(), [False] * len(seats)
        for how, rows in groups.items():
            for row in rows if how.stops is not None else ():
                text, start = self._texts[seats[row]]
                text.append(drawn[row])
                early = len(text) - start < how.sampling.min_response_length
                found[row] = not early and how.stops.completes(text, start)
        return torch.tensor(found, device=tokens.device)


def _key(sampling: SamplingConfig) -> tuple[object, ...]:
    values = (getattr(sampling, one.name) for one in fields(SamplingConfig) if one.name != "max_response_length")
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _heated(how: Manner, logits: Tensor) -> Tensor:
    return logits if how.sampling.temperature in (0.0, 1.0) else logits / how.sampling.temperature


def _kept(how: Manner, processed: Tensor, logits: Tensor, z: Tensor, weights: Tensor) -> Tensor:
    """[B, V], proportional to the probabilities to draw with; `weights` belong to the unprocessed `z`."""
    if processed is not logits:
        z = _heated(how, processed)
        weights = (z - z.amax(dim=-1, keepdim=True)).exp_()
    return truncated(z, weights, top_k=how.sampling.top_k, top_p=how.sampling.top_p, min_p=how.sampling.min_p)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, from int64 seeds and positions: SplitMix64 (Steele et al. 2014) seeded with `seed`, draw `position`."""
    return shifted(hashed(seeds + (positions + 1) * GOLDEN), 11).double() * 2.0**-53


def truncated(z: Tensor, weights: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """`weights` [B, V], 0 for the tokens that are not kept.

    Of equally likely tokens the lower id comes first, so exactly `top_k` are kept, and the same ones on every device.

    Args:
        z: float32 [B, V] logits; weights: exp(z - max z).
        top_k: keep the k likeliest; 0: all. top_p: of these, the smallest set of likeliest tokens with at least that share of their mass.
        min_p: of these, the ones at least `min_p` times as likely as the likeliest.
    """
    vocab_size = z.shape[1]
    if top_p < 1:
        total = None if 0 < top_k < vocab_size else weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
        if total is None:
            nucleus = _nucleus(z, top_p, total=None, num=top_k)
        elif z.device.type == "cpu":
            nucleus = _nucleus(z, top_p, total=total, num=min(HEAD, vocab_size))
        else:
            nucleus = halved_nucleus(z, weights, top_p * total)
        weights = weights * _likeliest(z, *nucleus)
    elif 0 < top_k < vocab_size:
        least = z.topk(top_k, dim=-1).values[:, -1:]
        weights = weights * _likeliest(z, least, torch.full_like(least, top_k, dtype=torch.int64))
    return weights * (weights >= min_p) if min_p > 0 else weights


def _nucleus(z: Tensor, top_p: float, *, total: Tensor | None, num: int) -> tuple[Tensor, Tensor]:
    """The smallest set of the `num` likeliest tokens with `top_p` of the `total` weight (None: of their own): its least logit [B, 1] and
    its size int64 [B, 1], at least one.

    Sorting a large vocabulary costs many times the rest of the sampler, so `num` is small, and rows that need more tokens are computed
    again. This is for the CPU: on another device it would wait.
    """
    ordered = z.topk(num, dim=-1).values if num < z.shape[1] else z.sort(dim=-1, descending=True).values
    own = (ordered - ordered[:, :1]).exp_().double()
    cumulative = own.cumsum(dim=-1)
    mass = top_p * (cumulative[:, -1:] if total is None else total)
    size = (cumulative - own < mass).sum(dim=-1, keepdim=True).clamp_(min=1)
    least = ordered.gather(1, size - 1)
    if total is not None and num < z.shape[1]:
        more = (cumulative[:, -1:] < mass)[:, 0].nonzero()[:, 0]
        if len(more):
            least[more], size[more] = _nucleus(z[more], top_p, total=total[more], num=z.shape[1])
    return least, size


def halved_nucleus(z: Tensor, weights: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """`_nucleus` without a sort, and without a step whose size depends on the logits: the least logit and the size of the smallest set of
    likeliest tokens that weighs `mass` (float64 [B, 1], at most the whole of `weights` [B, V]).

    Finds the least logit bit by bit, over integers in the order of the float32 numbers whose bits they are.
    """
    bits = z.view(torch.int32)
    keys = torch.where(bits < 0, bits ^ _INT32_MAX, bits)
    reached = torch.full_like(mass, -_INT32_MAX - 1, dtype=torch.int64)  # tokens from here on weigh enough
    for bit in reversed(range(32)):
        enough = torch.where(keys >= reached + (1 << bit), weights, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64) >= mass
        reached.add_(enough, alpha=1 << bit)
    least = torch.where(reached < 0, reached ^ _INT32_MAX, reached).int().view(torch.float32)
    above = z > least
    rest = mass - torch.where(above, weights, 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    own = (least - z.amax(dim=-1, keepdim=True)).exp().double()
    return least, above.sum(dim=-1, keepdim=True) + (rest / own).ceil().long().clamp_(min=1)


def _likeliest(z: Tensor, least: Tensor, count: Tensor) -> Tensor:
    """True for the `count` [B, 1] largest entries of each row of `z`, the first of equal ones; `least` is the smallest of them."""
    above, equal = z > least, z == least
    room = count - above.sum(dim=-1, keepdim=True)
    if z.device.type == "cpu" and bool((equal.sum(dim=-1, keepdim=True) == room).all()):
        return above | equal
    return above | equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room)


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative weight passes `uniform` of the whole; int64 [B]. Finds the block of tokens, then the token in it: a
    float64 cumulative sum over a large vocabulary costs several times as much as the rest of the sampler."""
    if weights.shape[1] <= 8 * BLOCK:
        return _pass(weights.double(), uniform)[0][:, 0]
    missing = -weights.shape[1] % BLOCK
    blocks = (F.pad(weights, (0, missing)) if missing else weights).view(weights.shape[0], -1, BLOCK)  # padding with nothing copies too
    sums = blocks.sum(dim=-1).double()
    block, share = _pass(sums, uniform)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    token, _ = _pass(inside.double(), share)
    return (block * BLOCK + token)[:, 0]


def _pass(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(where the cumulative sum of float64 `weights` [B, N] passes `share` [B] of the total, [B, 1]; how far into that entry, [B])."""
    cumulative = weights.cumsum(dim=-1)
    threshold = (share * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=weights.shape[1] - 1)
    own = weights.gather(1, index)
    return index, ((threshold - cumulative.gather(1, index) + own) / own)[:, 0]
