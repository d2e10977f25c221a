"""`experimental.rpc`: compiled functions that other programs call over the network.

>>> import jax.numpy as jnp, replicax as rx
>>> rpc = rx.experimental.rpc
>>> @rx.function(input_signature=[rx.TensorSpec([]), rx.TensorSpec([])])
... def multiply(a, b):
...     return a * b
>>> server = rpc.Server.create("grpc", "localhost:0")
>>> server.register("multiply", multiply)
>>> server.start()
>>> client = rpc.Client.create("grpc", server.address)
>>> client.multiply_blocking(3.0, 2.0).item()
6.0
>>> result = client.multiply(jnp.float32(1), jnp.float32(2))
>>> result.is_ok().item(), result.get_value().item()
(True, 2.0)
>>> server.stop()
"""

from replicax._rpc.client import Client as Client
from replicax._rpc.server import Server as Server

__all__ = ["Client", "Server"]
