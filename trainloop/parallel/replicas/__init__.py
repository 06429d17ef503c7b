"""The parts of a batch, and the copies of a model that compute them in ``dp``."""
