"""The loop of a run, the same in simulation and in deployment: observe, decide, train, charge, record, end."""
