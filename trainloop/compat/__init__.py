"""Names and behaviour of other libraries, for scripts that were written for them.

Nothing else here imports these modules, but for :mod:`trainloop.callbacks`, which looks some names up when asked.
"""
