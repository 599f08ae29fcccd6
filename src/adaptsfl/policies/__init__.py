"""Who chooses the interval and the cuts: AdaptSFL, the paper's benchmarks, the classical ways, the user's own."""
