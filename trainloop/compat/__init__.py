"""Names and behaviour of other libraries, for scripts that were written for them; nothing else here imports these."""
