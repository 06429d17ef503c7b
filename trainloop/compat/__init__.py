"""Names and behaviour of other libraries, for scripts that were written for those.

No other module of this package imports them.
"""
