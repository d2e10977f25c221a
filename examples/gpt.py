"""A character GPT that learns from Python's standard library to write functions' signatures and docstrings.

    python examples/gpt.py                    # on all accelerators or, without any, on 2 virtual devices
    python examples/gpt.py --replicas 4       # on 4 virtual devices: the same losses, up to rounding
    python examples/gpt.py --prompt "def read_json(path"

`shard_variables=True` divides the parameters and Adam's state among the replicas. docs/examples/gpt.md plans a step of
the same program with 300 million parameters, for 8 and 16 H100.
"""

import argparse
import ast
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax as rx

parser = argparse.ArgumentParser()
parser.add_argument("--replicas", type=int, default=2, help="virtual devices, used where there is no accelerator")
parser.add_argument("--steps", type=int, default=3000)
parser.add_argument("--batch", type=int, default=16, help="sequences of a step, of all replicas together")
parser.add_argument("--length", type=int, default=128, help="characters of a sequence")
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--dtype", default="float32", help="of activations; parameters are float32")
parser.add_argument("--remat", action="store_true", help="compute activations again for gradients: less memory")
parser.add_argument("--prompt", default="def ", help="what the generated text begins with")
options = parser.parse_args()

rx.config.set_virtual_devices({"CPU": options.replicas})
strategy = rx.MirroredStrategy(shard_variables=True)


def standard_library():
    """Return the signature and the docstring of each function in the standard library's modules, as one text."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                texts.append(f"def {node.name}({ast.unparse(node.args)}):\n{docstring}\n\n")
    return "".join(text for text in texts if text.isascii())


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        width, dtype = options.width, options.dtype
        self.attention_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(options.heads, width, dtype=dtype, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    def __init__(self, characters: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(characters, options.width, dtype=options.dtype, rngs=rngs)
        self.position = nnx.Embed(options.length, options.width, dtype=options.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(options.layers)])
        self.norm = nnx.LayerNorm(options.width, dtype=options.dtype, rngs=rngs)
        self.logits = nnx.Linear(options.width, characters, rngs=rngs)

    def __call__(self, tokens):
        x, mask = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1])), nnx.make_causal_mask(tokens)
        call = nnx.remat(Block.__call__) if options.remat else Block.__call__
        for block in self.blocks:
            x = call(block, x, mask)
        return self.logits(self.norm(x))


text = standard_library()
alphabet = sorted(set(text))
ids = {character: i for i, character in enumerate(alphabet)}
tokens = np.array([ids[character] for character in text], np.int32)
rows = tokens[: len(tokens) // (options.length + 1) * (options.length + 1)].reshape(-1, options.length + 1)
rows = np.random.default_rng(0).permutation(rows)
test_rows, train_rows = np.split(rows, [len(rows) // 20])
dataset = rx.data.Dataset.from_tensor_slices(train_rows).shuffle(len(train_rows), seed=0).repeat()
batches = strategy.experimental_distribute_dataset(dataset.batch(options.batch).take(options.steps))

with strategy.scope():
    model = GPT(len(alphabet), nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 100, max(options.steps, 101))
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)


def losses_of(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


@rx.function
def train_step(tokens):
    def replica_step(tokens):
        loss, gradients = nnx.value_and_grad(lambda model: rx.share_of_mean(losses_of(model, tokens)))(model)
        optimizer.update(model, rx.get_replica_context().all_reduce("SUM", gradients))
        return loss

    return strategy.reduce("SUM", strategy.run(replica_step, args=(tokens,)), axis=None)


@nnx.jit
def generate(model, text, start, key):
    """Replace the characters of a text from `start` on, one by one, by characters that the model draws."""

    def draw(i, text):
        window = jax.lax.dynamic_slice(text, [jnp.maximum(i - options.length, 0)], [options.length])
        logits = model(window[None])[0, jnp.minimum(i, options.length) - 1]
        return text.at[i].set(jax.random.categorical(jax.random.fold_in(key, i), logits / 0.7))

    return jax.lax.fori_loop(start, len(text), draw, text)


parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
print(f"{len(text):,} characters; {parameters:,} parameters on {strategy.num_replicas_in_sync} replicas")
losses, start = [], time.perf_counter()
for step, tokens in enumerate(batches, 1):
    losses.append(train_step(tokens))
    if step % 100 == 0 or step == options.steps:
        loss, seconds = np.mean([float(loss) for loss in losses[-100:]]), time.perf_counter() - start
        print(f"step {step}: loss {loss:.5f}, {seconds:.0f} s", flush=True)

test_loss = np.mean(nnx.jit(losses_of)(model, test_rows))
print(f"test loss {test_loss:.4f}, {test_loss / np.log(2):.2f} bits per character")
prompt = np.zeros(len(options.prompt) + 600, np.int32)
prompt[: len(options.prompt)] = [ids[character] for character in options.prompt]
print("".join(alphabet[i] for i in np.asarray(generate(model, prompt, len(options.prompt), jax.random.key(0)))))
