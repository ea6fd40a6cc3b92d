"""Benchmarks of ampkernels against its peers: speed and error against float64 in one table. See README.md here."""
