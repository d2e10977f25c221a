"""Plans: what a training step would need and do on devices that are not there."""
