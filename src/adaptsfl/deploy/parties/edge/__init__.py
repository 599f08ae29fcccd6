"""The edge server: carries out the protocol, computes the common layers, conducts the run."""
