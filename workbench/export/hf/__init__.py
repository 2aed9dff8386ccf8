"""Weights of other trainers under the names, and in the shapes, of transformers."""
