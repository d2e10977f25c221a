"""The models of gpu.py: their sizes and first parameters, and their arithmetic on JAX.

Parameters and optimizer state are float32; products and convolutions are of bfloat16, norms and losses of float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CLASSES = 1000


class CNN:
    """A residual network of bottleneck blocks, as ResNet-50 without batch norm: each block scales what it adds."""

    optimizer = "momentum"

    def __init__(self, quick: bool):
        self.batch, self.side = (4, 32) if quick else (256, 224)
        self.stages = [(8, 1), (16, 1)] if quick else [(64, 3), (128, 4), (256, 6), (512, 3)]  # width, blocks
        self.stem = 8 if quick else 64

    def blocks(self) -> list[tuple[str, int, int, int, int]]:
        """Name, channels in, width, channels out and stride of each block."""
        found, channels = [], self.stem
        for i, (width, count) in enumerate(self.stages):
            for j in range(count):
                found.append((f"{i}_{j}", channels, width, 4 * width, 2 if i > 0 and j == 0 else 1))
                channels = 4 * width
        return found

    def parameters(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        p = {"stem": _weights(rng, 7, 7, 3, self.stem), "stem_b": np.zeros(self.stem, np.float32)}
        for name, channels, width, out, stride in self.blocks():
            p[f"{name}_in"] = _weights(rng, 1, 1, channels, width)
            p[f"{name}_mid"] = _weights(rng, 3, 3, width, width)
            p[f"{name}_out"] = _weights(rng, 1, 1, width, out)
            p |= {f"{name}_{k}_b": np.zeros(n, np.float32) for k, n in (("in", width), ("mid", width), ("out", out))}
            if stride != 1 or channels != out:
                p[f"{name}_skip"] = _weights(rng, 1, 1, channels, out)
        p["head"], p["head_b"] = _weights(rng, 4 * self.stages[-1][0], CLASSES), np.zeros(CLASSES, np.float32)
        return p

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(1)
        x = rng.standard_normal((self.batch, self.side, self.side, 3), np.float32)
        return x, rng.integers(0, CLASSES, self.batch).astype(np.int32)

    def logits(self, p: dict[str, Any], x: Any) -> Any:
        import jax.numpy as jnp
        from jax import lax

        def conv(x, name, stride=1):
            weights = p[name].astype(jnp.bfloat16)
            pad = (weights.shape[0] - 1) // 2
            numbers = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(x, weights, (stride, stride), [(pad, pad)] * 2, dimension_numbers=numbers)

        def biased(x, name, stride=1):
            return conv(x, name, stride) + p[f"{name}_b"].astype(jnp.bfloat16)

        def relu(x):
            return jnp.maximum(x, 0)

        x = relu(biased(x.astype(jnp.bfloat16), "stem", 2))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)])
        scale = len(self.blocks()) ** -0.5
        for name, channels, _, out, stride in self.blocks():
            skip = x if stride == 1 and channels == out else conv(x, f"{name}_skip", stride)
            h = relu(biased(x, f"{name}_in"))
            h = relu(biased(h, f"{name}_mid", stride))
            x = relu(skip + jnp.bfloat16(scale) * biased(h, f"{name}_out"))
        x = jnp.mean(x.astype(jnp.float32), (1, 2)).astype(jnp.bfloat16)
        return (x @ p["head"].astype(jnp.bfloat16)).astype(jnp.float32) + p["head_b"]


class Transformer:
    """A decoder as GPT-2's small one, with the next token of each as its label."""

    optimizer = "adam"

    def __init__(self, quick: bool):
        self.batch, self.length, self.words = (2, 16, 64) if quick else (16, 1024, 50304)
        self.width, self.heads, self.blocks = (32, 2, 2) if quick else (768, 12, 12)

    def parameters(self) -> dict[str, np.ndarray]:
        rng, d = np.random.default_rng(0), self.width
        p = {"words": 0.02 * rng.standard_normal((self.words, d), np.float32)}
        p["places"] = 0.01 * rng.standard_normal((self.length, d), np.float32)
        for i in range(self.blocks):
            for name, rows, columns in (("qkv", d, 3 * d), ("o", d, d), ("up", d, 4 * d), ("down", 4 * d, d)):
                p[f"{i}_{name}"] = 0.5 * _weights(rng, rows, columns)
                p[f"{i}_{name}_b"] = np.zeros(columns, np.float32)
            p |= {f"{i}_norm{j}": np.ones(d, np.float32) for j in (1, 2)}
            p |= {f"{i}_norm{j}_b": np.zeros(d, np.float32) for j in (1, 2)}
        return {**p, "norm": np.ones(d, np.float32), "norm_b": np.zeros(d, np.float32)}

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        text = np.random.default_rng(1).integers(0, self.words, (self.batch, self.length + 1)).astype(np.int32)
        return text[:, :-1].copy(), text[:, 1:].copy()

    def logits(self, p: dict[str, Any], x: Any) -> Any:
        import jax
        import jax.numpy as jnp

        def dense(x, name):
            return x @ p[name].astype(jnp.bfloat16) + p[f"{name}_b"].astype(jnp.bfloat16)

        def norm(x, name):
            x = x.astype(jnp.float32)
            x = x - jnp.mean(x, -1, keepdims=True)
            x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
            return (x * p[name] + p[f"{name}_b"]).astype(jnp.bfloat16)

        attention = "cudnn" if jax.default_backend() == "gpu" else "xla"
        x = (p["words"][x] + p["places"]).astype(jnp.bfloat16)
        for i in range(self.blocks):
            q, k, v = jnp.split(dense(norm(x, f"{i}_norm1"), f"{i}_qkv"), 3, -1)
            q, k, v = (part.reshape(*part.shape[:2], self.heads, -1) for part in (q, k, v))
            h = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
            x = x + dense(h.reshape(x.shape), f"{i}_o")
            h = jax.nn.gelu(dense(norm(x, f"{i}_norm2"), f"{i}_up"), approximate=True)
            x = x + dense(h, f"{i}_down")
        return (norm(x, "norm") @ p["words"].T.astype(jnp.bfloat16)).astype(jnp.float32)


def _weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(np.prod(shape[:-1]) ** -0.5)


def made(name: str, quick: bool) -> Any:
    return {"cnn": CNN, "transformer": Transformer}[name](quick)


def loss(model: Any, p: dict[str, Any], x: Any, y: Any) -> Any:
    """The mean cross-entropy, on JAX."""
    import jax
    import jax.numpy as jnp

    logits = model.logits(p, x)
    right = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - right)
