"""`python -m replicax`: the command `replicax`, where it is not on the path."""

import sys

from replicax._commands import main

if __name__ == "__main__":
    sys.exit(main())
