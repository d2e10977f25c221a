"""Calls of registered functions over the network, as `experimental.rpc` has them."""
