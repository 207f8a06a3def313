"""Moestro's routing policies in front of verl's rollout servers: `router_class: moestro_verl.Router`."""

from moestro_verl.router import Router

__all__ = ["Router"]
