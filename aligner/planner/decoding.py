"""What sampling costs: a decode step, prompts, replicas of the rollout engine, new weights for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from aligner.parallel.topology import ParallelConfig
from aligner.planner.config import ClusterConfig, Device
from aligner.planner.kernels import MICRO, TERA
from aligner.planner.layers import LayerSeconds, Passes, kernels, launched_layers, layer_flops, layer_seconds
from aligner.planner.memory import Sizes, cache_tokens, kv_bytes_per_token, state_bytes
from aligner.planner.sampling import ReplicaQueue, shares
from aligner.planner.workload import GIB, Component, Engine, padded_vocabulary

LOGIT_PASSES = 6  # how often float32 logits are read or written, in the log-probs of one pass or a draw
MAX_REPLICAS = 32  # of the engine, that are followed
OWN_SHARE = 0.88  # of a GPU's memory, that an engine alone on it uses
MILLI = 1e-3


def replicas_of(component: Component, engine: Engine) -> int:
    """Replicas of the engine, on the component's ranks or on its own."""
    return max(1, (engine.own_ranks or component.num_ranks) // engine.tp)


def replica(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig, *, static: bool = False) -> ReplicaQueue:
    """A replica of the engine, idle."""
    step = decode_step(component, engine, sizes, cluster)
    a, work = component.architecture, component.work
    prompt = max(1.0, work.mean_prompt)
    whole = Passes(count=1, tokens=max(prompt, engine.prefill_chunk_tokens), selected=1, length=prompt)
    layer = _layer_of_engine(component, whole, cluster, engine)
    per_token = a.num_layers * (layer.products + layer.attention + layer.small + layer.tensor) / whole.tokens

    def prefill(tokens: float) -> float:
        return tokens * per_token + a.num_layers * cluster.launch_microseconds * MICRO

    return ReplicaQueue(
        seats=engine.max_batch_size,
        capacity=_capacity(component, engine, sizes, cluster),
        step=step,
        prefill=prefill,
        seating=cluster.engine_request_microseconds * MICRO,
        static=static,
    )


def _capacity(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> float:
    """Tokens in a replica's cache: as the run has it, or, on GPUs of its own, what its weights leave."""
    if not engine.own_ranks or engine.kv_cache_tokens:
        return cache_tokens(component, engine)
    left = cluster.gpu_memory_gib * GIB * OWN_SHARE - sizes.engine_weights - engine.max_batch_size * state_bytes(component, engine)
    return max(component.work.length, left / max(1, kv_bytes_per_token(component, engine)))


def _layer_of_engine(component: Component, shape: Passes, cluster: ClusterConfig, engine: Engine) -> LayerSeconds:
    flat = ParallelConfig(tp=engine.tp, etp=engine.tp)
    return layer_seconds(replace(component, parallel=flat), shape, cluster, engine.tp)


def decode_step(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> Callable[[int, float], float]:
    """(active, cached): seconds of one token for each of the `active` sequences, with `cached` tokens in the cache of the replica."""
    a, k, tp = component.architecture, kernels(component, cluster), engine.tp
    linear, _ = layer_flops(component, 1)
    vocabulary = padded_vocabulary(component) / tp
    kv, state = kv_bytes_per_token(component, engine), 2 * state_bytes(component, engine)  # read and written
    attention = 2.0 * a.num_attention_heads / tp * (a.head_dim + (a.value_head_dim if a.latent_size else a.head_dim)) * a.key_value_layers
    of_experts = expert_bytes(component, sizes.engine_weights, tp)
    # Graphs on a GPU, compiled kernels on a CPU.
    is_one_by_one = cluster.device == Device.gpu and (not engine.uses_graphs or bool(a.linear_attention_layers))
    each = cluster.host_layer_microseconds if is_one_by_one else cluster.launch_microseconds
    floor = launched_layers(component, a.num_layers) * each * MICRO

    @cache
    def batch(active: int) -> float:
        chosen = 1 - (1 - a.experts_per_token / a.num_experts) ** active if a.num_experts else 1.0
        weights = sizes.engine_weights - of_experts + of_experts * chosen / cluster.achievable_experts
        products = active * (a.num_layers * linear + 2 * a.hidden_size * padded_vocabulary(component)) / tp / k.product_rate
        computing = k.moving(weights + active * state) + products + k.moving(LOGIT_PASSES * active * vocabulary * 4)
        exchange = 2 * a.num_layers * k.all_reduce(active * a.hidden_size * component.dtype_bytes, tp, tp)
        host = cluster.engine_step_milliseconds * MILLI + active * cluster.engine_sequence_microseconds * MICRO
        return k.together(computing, floor) + exchange + host

    def step(active: int, cached: float) -> float:
        return batch(active) + k.moving(cached * kv) + cached * attention / (k.cluster.bf16_tflops * TERA * cluster.achievable_attention)

    return step


def expert_bytes(component: Component, weights: int, tp: int) -> float:
    """Bytes of `weights` that belong to experts of which a token passes only some."""
    a = component.architecture
    if not a.num_experts:
        return 0.0
    mixtures = sum(a.has_experts(layer) for layer in range(a.num_layers))
    matrices = 3 if a.gated_mlp else 2
    return min(float(weights), mixtures * a.num_experts * matrices * a.hidden_size * a.expert_ffn_hidden_size * component.dtype_bytes / tp)


def refit_seconds(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> float:
    """New weights in the engine: gathered from the training layout where it is another one, and copied. Another package's engine, and one
    on GPUs of its own, are sent whole tensors."""
    if not component.engine_holds_weights:
        return 0.0
    k = kernels(component, cluster)
    copied = k.moving(2 * sizes.engine_weights)
    if engine.is_foreign or engine.own_ranks:
        return copied + sizes.engine_weights * engine.tp / k.link(component.num_ranks + engine.own_ranks)
    return copied + (sizes.engine_weights / k.link(component.num_ranks) if component.engine_reshards else 0.0)


def policy_away_seconds(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> float:
    """`rollout.offload`: the policy's weights to host memory before sampling, and back. Components that take turns move them anyway."""
    if not engine.offload or not component.engine_holds_weights or component.turns:
        return 0.0
    return 2 * max(state.weights for state in sizes.stages) / kernels(component, cluster).host_rate


def generation(component: Component, engine: Engine, sizes: Sizes, cluster: ClusterConfig) -> dict[str, float]:
    """The slowest replica's queue, with each response sampled in one turn."""
    work, prompt = component.work, component.work.mean_prompt
    slowest = 0.0
    for own in followed(work.responses(work.rows + work.extra_rows), replicas_of(component, engine)):
        queue = replica(component, engine, sizes, cluster)
        for number, length in enumerate(own):
            queue.add(number, [length], prompt)
        queue.until()
        slowest = max(slowest, queue.now)
    away = policy_away_seconds(component, engine, sizes, cluster)
    return {"sampling": slowest, "refit": refit_seconds(component, engine, sizes, cluster), "policy to host memory and back": away}


def followed(lengths: Sequence[int], replicas: int) -> list[Sequence[int]]:
    """The responses of the replicas that may be the slowest: those with the longest response, and those with most tokens. Where all have
    the same lengths, of one."""
    every = shares(lengths, replicas)
    if lengths[0] == lengths[-1] == max(lengths) == min(lengths):
        return every[:1]
    if len(every) <= MAX_REPLICAS:
        return every
    chosen = sorted(every, key=max)[-MAX_REPLICAS // 2 :] + sorted(every, key=sum)[-MAX_REPLICAS // 2 :]
    return list({id(own): own for own in chosen}.values())
