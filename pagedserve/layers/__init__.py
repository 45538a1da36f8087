"""Layers: what models are made of. Plain callables over finished weights; no autograd, no hidden state."""
