"""`python -m replicax.tf`: the command `replicax run-tf`."""

import sys

from replicax.tf._programs import run_tf

if __name__ == "__main__":
    sys.exit(run_tf.main(sys.argv[1:], "python -m replicax.tf"))
