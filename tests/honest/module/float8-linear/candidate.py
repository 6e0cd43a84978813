import torch
from torch import nn

ROWS, FEATURES, OUTPUTS = 32, 128, 64


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randn(OUTPUTS, FEATURES).to(torch.float8_e4m3fn))

    def forward(self, x, scale, shift):
        y = torch.addcmul(shift.float(), x.float(), scale).matmul(self.weight.float().t())
        return y, y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
