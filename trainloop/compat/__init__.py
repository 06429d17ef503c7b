"""Names and behaviour of other libraries, for scripts that were written for them.

No other part of trainloop imports this package.
"""
