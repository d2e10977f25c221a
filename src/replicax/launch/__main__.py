"""`python -m replicax.launch`."""

import sys

from replicax.launch._cli import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:], "python -m replicax.launch"))
