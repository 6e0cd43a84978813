from torch import nn


class ModelNew(nn.Module):
    def forward(self, signal, codes, gain, shift, mask, turned):
        return ((signal * codes + shift) * mask).sum(-1) * gain, turned + turned
