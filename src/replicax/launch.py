"""`python -m replicax.launch`, which is the command `replicax launch`. In programs `replicax.launch` is a function."""

import sys

if __name__ == "__main__":
    from replicax._launch._cli import main

    sys.exit(main(sys.argv[1:], "python -m replicax.launch"))

from replicax._launch.function import launch

# An import sets `replicax.launch` to what is here, which therefore has to be the function.
sys.modules[__name__] = launch  # type: ignore[assignment]
