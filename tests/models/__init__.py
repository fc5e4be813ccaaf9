"""Tiny random models, made on the spot: real architectures, real file formats, no downloads."""
