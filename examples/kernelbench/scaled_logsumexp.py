"""In KernelBench's format: a scale, a clamp and a log-sum-exp over features, then Mish."""

import torch
import torch.nn as nn
import torch.nn.functional as F

batch_size = 4096 if torch.cuda.is_available() else 256
features = 2048


class Model(nn.Module):
    """``y * mish(y)`` with ``y = logsumexp(clamp(2 * scale * x))``."""

    def __init__(self, scale, low, high):
        super().__init__()
        self.scale = scale
        self.low = low
        self.high = high

    def forward(self, x):
        x = x * self.scale
        x = x + x
        x = torch.clamp(x, self.low, self.high)
        y = torch.logsumexp(x, dim=1, keepdim=True)
        return y * F.mish(y)


def get_inputs():
    return [torch.randn(batch_size, features)]


def get_init_inputs():
    return [2.0, -10.0, 10.0]
