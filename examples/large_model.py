"""A transformer of which no device has more than an eighth: 4 replicas of 2 devices each, on 8 virtual devices.

    python examples/large_model.py

Rules split the large variables over the two devices of a replica, by heads and by columns and rows (tensor
parallelism). `shard_variables` then divides what a replica has among the four replicas. The step is what it is without.
"""

import jax
import numpy as np
import optax
from flax import nnx

import replicax as rx

rx.config.set_virtual_devices({"CPU": 8})
TOKENS, WIDTH, HEADS, LAYERS, LENGTH, BATCH, STEPS = 64, 128, 4, 2, 16, 64, 60

RULES = {
    "(query|key|value)/kernel": (None, "model"),  # [width, heads, width of a head]: each device has some heads
    "(query|key|value)/bias": ("model",),
    "attention/out/kernel": ("model",),
    "up/kernel": (None, "model"),  # by columns
    "up/bias": ("model",),
    "down/kernel": ("model",),  # by rows
    "embed": (None, "model"),
    "logits/kernel": ("model",),
}
strategy = rx.MirroredStrategy(
    [f"CPU:{i}" for i in range(8)], devices_per_replica={"model": 2}, sharding_rules=RULES, shard_variables=True
)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.logits = nnx.Linear(WIDTH, TOKENS, rngs=rngs)

    def __call__(self, tokens):
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.logits(x)


with strategy.scope():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)


def batch(seed):
    """Returns rows that count on, each from its own start in its own steps, which the second token tells."""
    start, step = np.random.default_rng(seed).integers(0, TOKENS, (2, BATCH, 1), dtype=np.int32)
    return (start + step * np.arange(LENGTH, dtype=np.int32)) % TOKENS


@rx.function
def train_step(tokens):
    def replica_step(tokens):
        def loss_of(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
            return losses[:, 1:].sum() / (BATCH * (LENGTH - 2))

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, rx.get_replica_context().all_reduce("SUM", gradients))
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=(tokens,)), axis=None)


dataset = rx.data.Dataset.from_tensor_slices(np.concatenate([batch(seed) for seed in range(STEPS)])).batch(BATCH)
for number, tokens in enumerate(strategy.experimental_distribute_dataset(dataset), 1):
    loss = float(train_step(tokens))
    if number % 20 == 0:
        print(f"step {number}: loss {loss:.3f}")

arrays = [x for x in jax.tree.leaves((nnx.state(model), nnx.state(optimizer))) if isinstance(x, jax.Array)]
held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
print(f"a device has {held / sum(x.nbytes for x in arrays):.3f} of the model and its optimizer's state")
kernel = model.blocks[0].up.kernel[...]
layout, part = tuple(kernel.sharding.spec), kernel.addressable_shards[0].data.shape
print(f"up/kernel {kernel.shape}: layout {layout}, {part} on a device")
