"""What a loop remembers and shows: its attributes, how far it has trained, and how long that took."""
