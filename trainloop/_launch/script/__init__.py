"""What ranks take over from the script: its file, the values in its modules, and the settings of its process."""
