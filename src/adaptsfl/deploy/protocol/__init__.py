"""The edge server's rules as a state machine: events in, actions out, without network, threads or tensors."""

from adaptsfl.deploy.protocol.machine import EdgeProtocol

__all__ = ["EdgeProtocol"]
