"""What programs of TensorFlow 2 still do with sessions: they set options of the GPUs' memory before they begin."""

from __future__ import annotations

from typing import Any, NoReturn


class ConfigProto:
    """Options of a session, which have no effect here: JAX is configured by its environment variables.

    Every attribute is there, and may be set; one that was not set holds attributes itself.
    """

    def __init__(self, **options: object) -> None:
        self.__dict__.update(options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = ConfigProto()
        return self.__dict__[name]


class GPUOptions(ConfigProto):
    """Options of GPUs, without effect."""


class Session:
    """A session, which can be made and closed, but runs nothing: there are no graphs."""

    def __init__(self, target: str = "", graph: object = None, config: object = None) -> None:
        pass

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        """Nothing."""

    def run(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises `RuntimeError`: there are no graphs."""
        raise RuntimeError(
            "tf.compat.v1.Session.run needs TensorFlow 1's graphs, which replicax has none of. Call operations "
            "directly, and @tf.function compiles them."
        )


class InteractiveSession(Session):
    """A session that is the default one, and runs nothing either."""
