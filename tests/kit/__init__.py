"""What tests share: models, loaders, loops, references by hand, and ranks, real and simulated."""
