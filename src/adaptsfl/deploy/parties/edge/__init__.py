"""The edge server: carries out the protocol, trains the common layers, conducts the run."""
