"""The same job by Lightning's Trainer, one thread a rank; bars, logs and checkpoints off.

python bench/jobs/with_lightning.py FOLDER EPOCHS
"""

import sys
import warnings

import lightning
import torch
import torch.nn.functional as F
from pictures import BATCH_A_RANK, RANKS, Pictures, SimpleNet
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = SimpleNet()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        right = (self.network(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, epochs = sys.argv[1], int(sys.argv[2])
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=epochs,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, DataLoader(Pictures(folder, "train"), batch_size=BATCH_A_RANK, shuffle=True))
    trainer.limit_val_batches = 1.0
    trainer.validate(model, DataLoader(Pictures(folder, "t10k"), batch_size=500), verbose=False)
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.4f}")
