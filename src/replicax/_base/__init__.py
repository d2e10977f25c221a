"""What everything else uses: types of the API, errors, specs, nests, devices, files, and JAX's internals."""
