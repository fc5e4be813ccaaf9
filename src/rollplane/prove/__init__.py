"""Proof that RL runs end to end on this machine: weights by broadcast, adapters from disk, and routed replay.

Every run serves a tiny policy from a worker process of its own, samples from it over HTTP, trains on what it answered, and
hands the new policy back; every step must be explained by the trainer's own model of the same version, and not by the one before.
"""
