"""The command `replicax info`: versions, devices, extras, the cluster, settings, and what is wrong with them."""
