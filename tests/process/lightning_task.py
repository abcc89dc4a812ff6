"""A LightningModule and its data, adopted."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep import Task

x = torch.randn(45, 6, generator=torch.Generator().manual_seed(0))
y = (x[:, :2].sum(1) > 0).long()


class Net(L.LightningModule):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self(batch[0])
        self.log("accuracy", (scores.argmax(1) == batch[1]).to(scores.dtype).mean(), prog_bar=True)
        return F.cross_entropy(scores, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch[0])
        self.log("val_loss", F.cross_entropy(scores, batch[1]), sync_dist=True)
        self.log("val_accuracy", (scores.argmax(1) == batch[1]).to(scores.dtype).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Points(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.train, self.valid = TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=6, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.valid, batch_size=6)


def task(dropout: float = 0.2) -> Task:
    torch.manual_seed(0)
    return evenstep.adopt.lightning(Net(dropout), Points())


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)], []


class Hooked(Net):
    def on_after_backward(self) -> None:
        pass


class Epochs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.current_epoch


class Indexed(Net):
    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return super().training_step(batch, 0) * number
