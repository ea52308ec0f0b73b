"""Losses, advantages and KL estimators: pure functions on tensors (level 1).

`loss(outputs, batch, *, hyperparameters) -> LossOutput`: a sum, an integer count, and metrics that carry their reduction. Nothing here
knows about micro-batches, devices or process groups, and values at masked-out positions never reach a result or a gradient.
"""
