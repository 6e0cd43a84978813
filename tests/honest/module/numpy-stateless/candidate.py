import numpy as np
import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, frame: int, hop: int) -> None:
        super().__init__()
        self.frame, self.hop = frame, hop

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        values = np.square(signal.detach().numpy(), dtype=np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(values, self.frame, axis=-1)[..., :: self.hop, :]
        energy = windows.sum(-1) / self.frame
        return torch.from_numpy(np.log(energy + 1e-8).astype(np.float32))
