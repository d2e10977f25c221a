import torch
from lightning_fabric import Fabric, seed_everything
from task import BATCH, CLASSES, EPOCHS, FEATURES, LEARNING_RATE, WIDTH, data, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=4, strategy="ddp")
fabric.launch()
seed_everything(0)

x, y = data()
dataset = TensorDataset(torch.from_numpy(x), torch.from_numpy(y).long())
loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=BATCH // fabric.world_size, shuffle=True))

model = nn.Sequential(
    nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
)
loss_fn = nn.CrossEntropyLoss()
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=LEARNING_RATE))

for _ in range(EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        loss = fabric.all_reduce(loss.detach(), reduce_op="mean")
        if fabric.is_global_zero:
            record(loss)
