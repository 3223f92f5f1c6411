"""Spread a model and its rows over ranks: mesh, sharding, off-load, collectives."""
