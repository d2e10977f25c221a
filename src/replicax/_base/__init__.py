"""The base of all other packages: types of the API, errors, specs, nests, devices, files, and JAX's internals."""
