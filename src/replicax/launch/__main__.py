"""`python -m replicax.launch`."""

import sys

from replicax.launch._cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python -m replicax.launch"))
