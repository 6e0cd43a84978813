"""In KernelBench's format, as its tasks stand: Model, get_inputs, get_init_inputs."""

import math

import torch
import torch.nn as nn

batch_size = 4096 if torch.cuda.is_available() else 96
dim = 4096


class Model(nn.Module):
    """The tanh approximation of GELU, written out as in GPT-2."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def get_inputs():
    return [torch.rand(batch_size, dim)]


def get_init_inputs():
    return []
