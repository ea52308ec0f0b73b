"""TRL's DPO, CPO, SimPO, ORPO, KTO, reward and distillation trainers on the same log-probs: the same losses and gradients.

TRL's own loss functions run on trainers that have nothing but the settings they read, with given tensors in the place of forward passes.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from aligner.losses.distillation import Divergence, distillation_loss
from aligner.losses.preference import DPOVariant, dpo_loss, kl_baseline, kto_loss, mean_log_ratio
from aligner.losses.reward import BradleyTerry, bradley_terry_loss
from aligner.types import LabeledBatch, PreferenceBatch, TokenOutputs

trl = pytest.importorskip("trl", reason="parity with TRL needs trl 1.16, which the `dev` extra installs on Python 3.11 and later")

# Three pairs of a prompt of one token; chosen responses are of one length, so that a mean over tokens is one of means over responses too.
LENGTHS = torch.tensor([4, 6, 4, 2, 4, 3])  # prompt and response; rows chosen and rejected in turn
ROWS, WIDTH = 6, 6
MASK = (torch.arange(WIDTH) < LENGTHS[:, None]) & (torch.arange(WIDTH) > 0)
THEIR_ORDER = torch.tensor([0, 2, 4, 1, 3, 5])  # all chosen, then all rejected
BETA = 0.5


def numbers(seed, spread):
    noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return (-(1.0 + spread * noise).abs() - 0.05) * MASK


POLICY, REFERENCE, MISMATCHED, MISMATCHED_REFERENCE = numbers(1, 0.8), numbers(2, 0.6), numbers(3, 0.7), numbers(4, 0.9)
MARGINS = torch.tensor([0.5, 2.0, 1.0])
PAIRS = PreferenceBatch(
    tokens=torch.zeros(ROWS, WIDTH, dtype=torch.int64), lengths=LENGTHS, loss_mask=MASK, margins=MARGINS, ref_logprobs=REFERENCE
)


@pytest.fixture(scope="module")
def trainers():
    """TRL's trainers by name; importing them takes seconds, and those that are experimental say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.gkd import GKDTrainer
        from trl.experimental.orpo import ORPOTrainer
    return {
        "dpo": trl.DPOTrainer,
        "kto": trl.KTOTrainer,
        "reward": trl.RewardTrainer,
        "cpo": CPOTrainer,
        "orpo": ORPOTrainer,
        "gkd": GKDTrainer,
    }


def given(trainer, **settings):
    """A trainer with these settings and no model."""
    alone = SimpleNamespace(device=torch.device("cpu"), gather=torch.clone, gather_for_metrics=lambda x: x)
    made = object.__new__(trainer)
    common = {"model": SimpleNamespace(training=True), "accelerator": alone, "aux_loss_enabled": False, "is_encoder_decoder": False}
    vars(made).update(common | {"_metrics": defaultdict(lambda: defaultdict(list)), "_total_train_tokens": 0, "_tp_size": 1} | settings)
    return made


def passes(logprobs, **others):
    """A model whose log-probs are given: for each `input_ids` that it is called with, by identity, or for all."""

    def forward(input_ids, **_):
        found = next((tensor for ids, tensor in others.values() if ids is input_ids), logprobs)[:, 1:]
        zeros = torch.zeros_like(found)
        return SimpleNamespace(log_probs=found, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    return forward


def logits_of(logprobs):
    """Of a vocabulary of two tokens, of which every one in a text is the first."""
    certain = logprobs.clamp(max=-1e-3)  # what stands in masked-out positions does not matter
    return torch.stack([certain, torch.log1p(-certain.exp())], dim=-1).roll(-1, dims=1)


def same(found, loss, logprobs, theirs):
    """Both losses and their gradients agree."""
    assert (found.total / found.count).item() == pytest.approx(loss.item(), rel=2e-6)
    (found.total / found.count).backward()
    loss.backward()
    torch.testing.assert_close(logprobs.grad, theirs.grad * MASK, rtol=2e-5, atol=2e-7)
    assert logprobs.grad.abs().max() > 1e-3


def leaves():
    return POLICY.clone().requires_grad_(), POLICY.clone().requires_grad_()


DPO = {
    "sigmoid": ({}, {}),
    "robust": ({"label_smoothing": 0.1}, {"variant": "robust", "label_smoothing": 0.1}),
    "hinge": ({}, {"variant": "hinge"}),
    "ipo": ({}, {"variant": "ipo"}),
    "exo_pair": ({"label_smoothing": 0.01}, {"variant": "exo", "label_smoothing": 0.01}),
    "nca_pair": ({}, {"variant": "nca"}),
    "bco_pair": ({}, {"variant": "bco"}),
    "sppo_hard": ({}, {"variant": "sppo"}),
    "apo_zero": ({}, {"variant": "apo_zero"}),
    "apo_down": ({}, {"variant": "apo_down"}),
    "sigmoid_norm": ({}, {"average_logprobs": True}),
    "sigmoid,sft": ({"loss_weights": [1.0, 0.3]}, {"sft_coef": 0.3}),
}


@pytest.mark.parametrize("name", DPO)
def test_dpo(trainers, name):
    settings, options = DPO[name][0], dict(DPO[name][1])
    ours, theirs = leaves()
    kinds = name.split(",")
    defaults = {"beta": BETA, "label_smoothing": 0.0, "loss_weights": [1.0], "loss_types": kinds, "precompute_ref_logps": True}
    trainer = given(trainers["dpo"], **(defaults | settings), ld_alpha=None, f_divergence_type="reverse_kl", use_weighting=False)
    reference = REFERENCE.sum(dim=1)[THEIR_ORDER]
    tokens = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    inputs = {"input_ids": tokens, "attention_mask": tokens, "completion_mask": MASK[THEIR_ORDER].long()}
    inputs |= {"ref_chosen_logps": reference[:3], "ref_rejected_logps": reference[3:]}
    loss = trainer._compute_loss(passes(theirs[THEIR_ORDER]), inputs, False)
    variant = DPOVariant(options.pop("variant", "sigmoid"))
    same(dpo_loss(TokenOutputs(logprobs=ours), PAIRS, beta=BETA, variant=variant, **options), loss, ours, theirs)


def halves(tensor):
    return {"chosen": tensor[THEIR_ORDER[:3]], "rejected": tensor[THEIR_ORDER[3:]]}


def pair_inputs():
    """Labels are -100 outside the response; attention is on prompt and response."""
    attention = torch.arange(WIDTH) < LENGTHS[:, None]
    parts = {
        "labels": torch.where(MASK, 0, -100),
        "input_ids": torch.zeros(ROWS, WIDTH, dtype=torch.int64),
        "attention_mask": attention.long(),
    }
    return {f"{half}_{name}": x for name, tensor in parts.items() for half, x in halves(tensor).items()}


CPO = {
    "cpo": ({"loss_type": "sigmoid", "cpo_alpha": 1.0}, {"variant": "cpo"}),
    "cpo, smoothed": ({"loss_type": "sigmoid", "label_smoothing": 0.1, "cpo_alpha": 0.4},
                      {"variant": "cpo", "label_smoothing": 0.1, "sft_coef": 0.4}),
    "simpo": ({"loss_type": "simpo", "simpo_gamma": 0.7, "cpo_alpha": 0.0}, {"variant": "simpo", "gamma": 0.7}),
    "simpo, smoothed": ({"loss_type": "simpo", "simpo_gamma": 0.7, "label_smoothing": 0.2, "cpo_alpha": 0.0},
                        {"variant": "simpo", "gamma": 0.7, "label_smoothing": 0.2}),
    "cpo-simpo": ({"loss_type": "simpo", "simpo_gamma": 0.3, "cpo_alpha": 0.5}, {"variant": "simpo", "gamma": 0.3, "sft_coef": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", CPO)
def test_cpo_and_simpo(trainers, name):
    settings, options = CPO[name][0], dict(CPO[name][1])
    ours, theirs = leaves()
    trainer = given(trainers["cpo"], **({"beta": BETA, "alpha": 0.0, "label_smoothing": 0.0, "pad_token_id": 0} | settings))
    loss, _ = trainer.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits_of(theirs)[THEIR_ORDER]), pair_inputs())
    variant = DPOVariant(options.pop("variant"))
    same(dpo_loss(TokenOutputs(logprobs=ours), PAIRS, beta=BETA, variant=variant, **options), loss, ours, theirs)


def test_orpo(trainers):
    """TRL's likelihood is of the prompt too: here that is one token, which nothing predicts."""
    ours, theirs = leaves()
    trainer = given(trainers["orpo"], beta=BETA, padding_value=0)
    loss, _ = trainer.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits_of(theirs)[THEIR_ORDER]), pair_inputs())
    same(dpo_loss(TokenOutputs(logprobs=ours), PAIRS, beta=BETA, variant=DPOVariant.orpo), loss, ours, theirs)


KTO = {
    "kto": {"loss_type": "kto", "calculate_KL": True},
    "weighted": {"loss_type": "kto", "calculate_KL": True, "desirable_weight": 1.3, "undesirable_weight": 0.7},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired", "calculate_KL": False},
}


@pytest.mark.parametrize("name", KTO)
def test_kto(trainers, name):
    ours, theirs = leaves()
    good = torch.tensor([True, False, False, True, True, False])
    settings = {"beta": BETA, "desirable_weight": 1.0, "undesirable_weight": 1.0, "precompute_ref_logps": True} | KTO[name]
    trainer = given(trainers["kto"], **settings)
    tokens, others = torch.zeros(ROWS, WIDTH, dtype=torch.int64), torch.ones(ROWS, WIDTH, dtype=torch.int64)
    inputs = {"input_ids": tokens, "attention_mask": tokens, "completion_mask": MASK.long(), "label": good}
    inputs |= {"KL_input_ids": others, "KL_attention_mask": others, "KL_completion_mask": MASK.long()}
    inputs |= {"ref_logps": REFERENCE.sum(dim=1), "ref_KL_logps": MISMATCHED_REFERENCE.sum(dim=1)}
    loss = trainer._compute_loss(passes(theirs, mismatched=(others, MISMATCHED)), inputs, False)
    kl = kl_baseline([mean_log_ratio(MISMATCHED, MISMATCHED_REFERENCE, MASK)]) if trainer.calculate_KL else 0.0
    assert trainer._metrics["train"]["kl"] == [pytest.approx(kl, abs=1e-6)] and (kl > 0.1) == trainer.calculate_KL
    batch = LabeledBatch(
        tokens=tokens, lengths=LENGTHS, loss_mask=MASK, labels=torch.where(good, 1.0, -1.0)[:, None], ref_logprobs=REFERENCE
    )
    weights = {key: settings[key] for key in ("desirable_weight", "undesirable_weight")}
    same(kto_loss(TokenOutputs(logprobs=ours), batch, kl=kl, beta=BETA, **weights), loss, ours, theirs)


@pytest.mark.parametrize("centre", [None, 0.01])
@pytest.mark.parametrize("variant", [BradleyTerry.standard, BradleyTerry.margin])
def test_reward_model(trainers, variant, centre):
    ours, theirs = (torch.tensor([[1.0], [0.5], [-0.25], [0.75], [2.0], [1.5]], requires_grad=True) for _ in range(2))
    trainer = given(trainers["reward"], args=SimpleNamespace(center_rewards_coefficient=centre))
    inputs = {"attention_mask": MASK} | ({"margin": MARGINS} if variant is BradleyTerry.margin else {})
    loss = trainer.compute_loss(lambda **_: SimpleNamespace(logits=theirs[THEIR_ORDER]), inputs)
    found = bradley_terry_loss(TokenOutputs(scores=ours), PAIRS, variant=variant, centre_coef=centre or 0.0)
    (found.total / found.count).backward()
    loss.backward()
    assert (found.total / found.count).item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("divergence", "weight"), [(Divergence.forward_kl, 0), (Divergence.backward_kl, 1), (Divergence.jsd, 0.5), (Divergence.jsd, 0.2)]
)
def test_distillation(trainers, divergence, weight):
    generator = torch.Generator().manual_seed(5)
    student, teacher = (torch.randn(2, 4, 8, generator=generator) for _ in range(2))
    ours, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
    loss = trainers["gkd"].generalized_jsd_loss(theirs, teacher, torch.where(mask, 0, -100), beta=weight, temperature=1.5)
    options = {"teacher_weight": weight} if divergence is Divergence.jsd else {}
    found = distillation_loss(ours, teacher, mask, divergence=divergence, temperature=1.5, **options)
    (found.total / found.count).backward()
    loss.backward()
    assert (found.total / found.count).item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad)
