"""What notebooks show of variables and distributed values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from strategies import mirrored, per_replica

import replicax as rx


def test_small_values_are_shown_with_a_picture_of_their_devices():
    strategy = mirrored(2)
    with strategy.scope():
        v = rx.Variable([1.0, 2.0], name="<b>&v")
    html = v._repr_html_()
    assert "numpy=array([1., 2.], dtype=float32)" in html and "<svg" in html
    assert "whole on GPU:0, whole on GPU:1" in html and "&lt;b&gt;&amp;v" in html and "<b>" not in html
    assert v._repr_mimebundle_() == {"text/html": html}  # IPython adds the `repr` as text
    html = per_replica(strategy, [jnp.ones(2), jnp.zeros(2)])._repr_html_()
    assert "1: Array([0., 0.], dtype=float32)" in html and "<svg" in html


@pytest.mark.parametrize("value", [jnp.ones((64, 64)), {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}], ids=type)
def test_large_values_stay_on_their_devices(value, monkeypatch):
    with mirrored(2).scope():
        v = rx.Variable(value, name="v")
    monkeypatch.setattr(type(v._signature), "text", None)  # which would fetch them
    shown = v._repr_mimebundle_()
    assert "float32[64, 64], 32.00 KiB on its devices" in shown["text/plain"] and "<svg" in shown["text/html"]
    assert "array(" not in shown["text/html"]


def test_values_without_a_place_are_shown_as_text():
    shown = []

    @jax.jit
    def f(x):
        shown.append(rx.PerReplica([x])._repr_mimebundle_())
        return x

    f(1.0)
    assert shown == [{}]
    assert rx.PerReplica(["a", "b"])._repr_html_() is None
