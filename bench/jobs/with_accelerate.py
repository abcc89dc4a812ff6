"""The same job as accelerate's documentation writes it; started by torchrun, one thread a rank.

torchrun --nproc-per-node 2 bench/jobs/with_accelerate.py FOLDER EPOCHS
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from pictures import BATCH_A_RANK, Pictures, SimpleNet
from torch.utils.data import DataLoader

torch.set_num_threads(1)
folder, epochs = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(cpu=True)
set_seed(0)
model = SimpleNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(Pictures(folder, "train"), batch_size=BATCH_A_RANK, shuffle=True)
valid = DataLoader(Pictures(folder, "t10k"), batch_size=500)
model, optimizer, loader, valid = accelerator.prepare(model, optimizer, loader, valid)
for _ in range(epochs):
    for data, target in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(data), target))
        optimizer.step()
right = []
with torch.no_grad():
    for data, target in valid:
        right.append(accelerator.gather_for_metrics(model(data).argmax(1) == target))
accelerator.print(f"accuracy {torch.cat(right).float().mean().item():.4f}")
accelerator.end_training()
