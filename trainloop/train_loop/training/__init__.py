"""Training in one rank: steps, gradients, and the state that is saved."""
