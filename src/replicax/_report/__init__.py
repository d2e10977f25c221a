"""What replicax shows: charts, drawings, progress, and the results of benchmarks and placements."""
