"""PyTorch's contender of gpu.py: the same models, with the same parameters, as its users write them to be fast."""

from __future__ import annotations

import sys
import time
from typing import Any

import gpu_models
import serving
import torch
import torch.nn.functional as F


class CNN(torch.nn.Module):
    """`gpu_models.CNN`: weights turn from HWIO to OIHW."""

    def __init__(self, model: Any):
        super().__init__()
        self.blocks = model.blocks()
        given = {name: torch.from_numpy(value) for name, value in model.parameters().items()}
        given = {n: v.permute(3, 2, 0, 1).contiguous() if v.ndim == 4 else v for n, v in given.items()}
        self.p = torch.nn.ParameterDict({f"p{name}": value for name, value in given.items()})

    def conv(self, x: Any, name: str, stride: int = 1, biased: bool = True) -> Any:
        weights = self.p[f"p{name}"]
        bias = self.p[f"p{name}_b"] if biased else None
        return F.conv2d(x, weights, bias, stride=stride, padding=(weights.shape[2] - 1) // 2)

    def forward(self, x: Any) -> Any:
        x = F.max_pool2d(F.relu(self.conv(x, "stem", 2)), 3, 2, 1)
        scale = len(self.blocks) ** -0.5
        for name, channels, _, out, stride in self.blocks:
            skip = x if stride == 1 and channels == out else self.conv(x, f"{name}_skip", stride, biased=False)
            h = F.relu(self.conv(x, f"{name}_in"))
            h = F.relu(self.conv(h, f"{name}_mid", stride))
            x = F.relu(skip + scale * self.conv(h, f"{name}_out"))
        return F.linear(x.mean((2, 3)), self.p["phead"].T, self.p["phead_b"])


class Transformer(torch.nn.Module):
    """`gpu_models.Transformer`."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        given = {name: torch.from_numpy(value) for name, value in model.parameters().items()}
        self.p = torch.nn.ParameterDict({f"p{name}": value for name, value in given.items()})

    def dense(self, x: Any, name: str) -> Any:
        return F.linear(x, self.p[f"p{name}"].T, self.p[f"p{name}_b"])

    def norm(self, x: Any, name: str) -> Any:
        return F.layer_norm(x, (self.model.width,), self.p[f"p{name}"], self.p[f"p{name}_b"], 1e-5)

    def forward(self, x: Any) -> Any:
        rows, length = x.shape
        x = (F.embedding(x, self.p["pwords"]) + self.p["pplaces"]).to(torch.bfloat16)
        for i in range(self.model.blocks):
            parts = self.dense(self.norm(x, f"{i}_norm1"), f"{i}_qkv").chunk(3, -1)
            q, k, v = (part.view(rows, length, self.model.heads, -1).transpose(1, 2) for part in parts)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
            x = x + self.dense(h, f"{i}_o")
            h = F.gelu(self.dense(self.norm(x, f"{i}_norm2"), f"{i}_up"), approximate="tanh")
            x = x + self.dense(h, f"{i}_down")
        return F.linear(self.norm(x, "norm"), self.p["pwords"])


def optimizer_of(model: Any, parameters: Any, fused: bool) -> torch.optim.Optimizer:
    if model.optimizer == "momentum":
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=fused)
    return torch.optim.Adam(parameters, lr=3e-4, fused=fused)


def answering(device: str, size: str, model_name: str) -> serving.Answering:
    on_gpu = device == "gpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU here.")
    where = torch.device("cuda" if on_gpu else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    model = gpu_models.made(model_name, size == "quick")
    net: Any = {"cnn": CNN, "transformer": Transformer}[model_name](model).to(where)
    x, y = (torch.from_numpy(part).to(where) for part in model.data())
    if model_name == "cnn":
        net, x = net.to(memory_format=torch.channels_last), x.permute(0, 3, 1, 2)  # NHWC in memory as it is
    optimizer = optimizer_of(model, net.parameters(), fused=on_gpu)

    def loss_of(x: Any, y: Any) -> Any:
        with torch.autocast(where.type, torch.bfloat16):
            logits = net(x)
        return F.cross_entropy(logits.float().flatten(0, -2), y.flatten().long())

    forward = torch.compile(loss_of) if on_gpu else loss_of

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "build":
            losses = [float(step()) for _ in range(4)]
            name = torch.cuda.get_device_name() if on_gpu else "cpu"
            return {"losses": losses, "device": name, "versions": {"torch": torch.__version__}}
        if request["do"] == "memory":
            return {"peak": torch.cuda.max_memory_allocated() if on_gpu else 0}
        start = time.perf_counter()
        for _ in range(request["steps"]):
            loss = step()
        float(loss)
        return {"seconds": time.perf_counter() - start}

    return answer


if __name__ == "__main__":
    serving.serve(lambda: answering(*sys.argv[1:]))
