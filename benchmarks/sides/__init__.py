"""The sides of ``speed.py``: PPO by ``puffer_lightning`` and by others, each on the same work."""
