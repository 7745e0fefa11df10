"""Attention as layers: projections, an encoding and a cache around `attend`, in the forms that models use."""
