"""One AdamW step on a parameter and its two moments, all in place: megabytes that forward writes."""

import math

import torch
from torch import nn

from pytest_cudaforge import forge_target

SHAPE = (600, 1000)


def draw():
    moments = [torch.randn(SHAPE) * 0.05, torch.rand(SHAPE) * 0.01 + 1e-5]
    return [torch.randn(SHAPE), torch.randn(SHAPE) * 0.1, *moments]


@forge_target(inputs=draw, init=lambda: [1e-3, 100], dynamic=True)
class AdamWStep(nn.Module):
    def __init__(self, rate, step):
        super().__init__()
        self.rate, self.beta1, self.beta2, self.eps, self.decay = rate, 0.9, 0.999, 1e-8, 0.01
        self.correction1 = 1 - self.beta1**step
        self.root_correction2 = math.sqrt(1 - self.beta2**step)

    def forward(self, param, grad, average, square):
        param.mul_(1 - self.rate * self.decay)
        average.lerp_(grad, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        divisor = (square.sqrt() / self.root_correction2).add_(self.eps)
        param.addcdiv_(average, divisor, value=-self.rate / self.correction1)
        return param, average, square
