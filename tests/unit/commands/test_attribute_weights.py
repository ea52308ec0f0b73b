"""One reward from several attributes: settings, the served model's check, and the client's sum."""

from __future__ import annotations

import pytest
import torch

from aligner.errors import ConfigError, RequestRejected
from aligner.jobs.serves import _check_weights
from aligner.models.config import ModelConfig
from aligner.models.modules.scalar_head import Pooling, ScalarHead
from aligner.run.settings import check_pooling
from aligner.servers.client import weighted_sum
from aligner.servers.components import RewardConfig


def test_the_sum():
    reduce = weighted_sum([2.0, -1.0])
    assert reduce(torch.tensor([[1.0, 1.0], [0.0, 3.0]])).tolist() == [1.0, -3.0]
    with pytest.raises(RequestRejected, match="3 attributes per row, and reward.attribute_weights has 2"):
        reduce(torch.zeros(1, 3))


def test_weights_must_fit_the_served_model():
    one, two = ScalarHead(), ScalarHead(outputs=("good", "long"))
    for weights, head in (([], one), ([2.0], one), ([1.0, 0.0], two)):
        _check_weights(weights, head)
    for weights, head, text in (([], two, r"has 2 outputs \(good, long\), allowed: one weight for each$"), ([1.0, 2.0], one, "or none")):
        with pytest.raises(ConfigError, match=text):
            _check_weights(weights, head)
    for weights in ([float("nan")], [0.0, 0.0]):
        with pytest.raises(ConfigError, match="reward.attribute_weights"):
            RewardConfig(attribute_weights=weights)


def test_a_mean_needs_every_token_of_every_row():
    check_pooling(Pooling.last, ModelConfig(packing=True, micro_batch_tokens=8, share_prompts=True))
    with pytest.raises(ConfigError, match="algorithm.pooling=mean: needs model.share_prompts=false"):
        check_pooling(Pooling.mean, ModelConfig(packing=True, micro_batch_tokens=8, share_prompts=True))
